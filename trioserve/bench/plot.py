"""Line charts as SVG, side by side in one picture that reads well on light and on dark pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 420, 260  # of one chart, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 18, 34, 44  # between its border and its axes
_LINE = 20  # height of a line of the legend
_LETTER = 6.4  # width of a letter of a tick's label, about
_LONGEST = 54  # letters of any text
_TICKS = 5  # about so many on an upright axis
_LOG_FROM = 8  # an axis whose values lie further apart than that is logarithmic
_LIGHT = ("#ffffff", "#24292f", "#d0d7de", ("#0969da", "#bc4c00", "#1a7f37", "#8250df"))
_DARK = ("#0d1117", "#e6edf3", "#30363d", ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff"))
_COLOURS = len(_LIGHT[-1])
_SHAPE = """
svg { font: 12px system-ui, sans-serif } .end { text-anchor: end } .middle { text-anchor: middle }
.title { font-weight: 600 } polyline { fill: none; stroke-width: 2 } .s1 polyline { stroke-dasharray: 6 3 }
.s2 polyline { stroke-dasharray: 2 3 } .s3 polyline { stroke-dasharray: 8 3 2 3 }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        label: for the legend.
        points: in the order of their x; y is 0 or more, or NaN where there is no value, which leaves the point out.
    """

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Some lines over the same x, which is above 0.

    Attributes:
        title: what y is, with its unit.
        x_label: what x is, with its unit.
        series: the lines.
        log_y: the axis of y is logarithmic; points that are not above 0 have no place there.
    """

    title: str
    x_label: str
    series: Sequence[Series]
    log_y: bool = False

    def points(self, series: Series) -> list[tuple[float, float]]:
        """The points of a line that can be drawn."""
        least = 0 if not self.log_y else math.ulp(0)
        return [(x, y) for x, y in series.points if least <= y < math.inf]

    @property
    def xs(self) -> list[float]:
        """Where any line has a point, in order."""
        return sorted({x for series in self.series for x, _ in self.points(series)})


def as_svg(charts: Sequence[Chart], columns: int = 2) -> str:
    """Draw charts side by side, so many in a row, with one legend for each."""
    columns = min(columns, len(charts))
    tallest = _HEIGHT + _LINE * max(len(chart.series) for chart in charts) + 8
    width, height = columns * _WIDTH, -(-len(charts) // columns) * tallest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}">',
        f"<title>{escape('; '.join(chart.title for chart in charts))}</title><style>{_style()}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for number, chart in enumerate(charts):
        row, column = divmod(number, columns)
        parts += [f'<g transform="translate({column * _WIDTH} {row * tallest})">', *_draw(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    """Sheets for both kinds of pages. No variables: not every viewer of pictures knows them."""

    def colours(ground: str, ink: str, faint: str, lines: Sequence[str]) -> str:
        rules = [f".ground {{ fill: {ground} }} text {{ fill: {ink} }} .faint {{ stroke: {faint} }}"]
        for number, line in enumerate(lines):
            rules.append(f".s{number} polyline {{ stroke: {line} }} .s{number} .mark {{ fill: {line} }}")
        return "\n".join(rules)

    return f"{_SHAPE}{colours(*_LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{colours(*_DARK)}\n}}\n"


def _draw(chart: Chart) -> Iterator[str]:
    yield _text(_LEFT - 40, 20, chart.title, "title")
    xs = chart.xs
    ys = [y for series in chart.series for _, y in chart.points(series)]
    if not xs:
        yield _text(_WIDTH / 2, _HEIGHT / 2, "nothing was measured", "middle")
        return
    log_x = is_wide(xs)
    x_of = _scale(xs[0], xs[-1], _LEFT + 8, _WIDTH - _RIGHT - 8, log=log_x)
    steps = _decades(min(ys), max(ys)) if chart.log_y else _steps(max(ys))
    y_of = _scale(steps[0], steps[-1], _HEIGHT - _BOTTOM, _TOP, log=chart.log_y)
    for y in steps:
        yield f'<path class="faint" d="M{_LEFT} {y_of(y):.1f}H{_WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 6, y_of(y) + 4, _number(y), "end")
    for x in _apart(xs, x_of):
        yield _text(x_of(x), _HEIGHT - _BOTTOM + 17, _number(x), "middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 35, chart.x_label, "middle")
    for number, series in enumerate(chart.series):
        yield from _line(series, number, [(x_of(x), y_of(y)) for x, y in chart.points(series)])


def _line(series: Series, number: int, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """A line, its marks, and its entry in the legend."""
    legend = _HEIGHT + number * _LINE + 6
    yield f'<g class="s{number % _COLOURS}">'
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    yield f'<polyline points="{_LEFT - 40},{legend} {_LEFT - 12},{legend}"/>'
    yield from (_mark(x, y, number) for x, y in [*points, (_LEFT - 26, legend)])
    yield "</g>"
    yield _text(_LEFT - 4, legend + 4, series.label)


def _mark(x: float, y: float, number: int) -> str:
    """A disc, a square, a triangle or a diamond: lines are told apart without their colours too."""
    shapes = (
        "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
        "m-3 -3h6v6h-6z",
        "m0 -4l4 7h-8z",
        "m0 -4.5l4 4.5l-4 4.5l-4 -4.5z",
    )
    return f'<path class="mark" d="M{x:.1f} {y:.1f}{shapes[number % len(shapes)]}"/>'


def is_wide(xs: Sequence[float]) -> bool:
    """Whether sorted values lie so far apart that their axis is logarithmic."""
    return bool(xs) and xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM


def _scale(low: float, high: float, start: float, end: float, *, log: bool) -> Callable[[float], float]:
    """Return what maps low..high to start..end; a lone value goes to the middle."""
    bend: Callable[[float], float] = math.log if log else float
    span = bend(high) - bend(low)

    def place(value: float) -> float:
        share = (bend(value) - bend(low)) / span if span else 0.5
        return start + share * (end - start)

    return place


def _steps(highest: float) -> list[float]:
    """Round numbers from 0 to a little above the highest value."""
    if highest <= 0:
        return [0, 1]
    rough = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _decades(lowest: float, highest: float) -> list[float]:
    """Powers of ten around all values."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _apart(xs: Iterable[float], x_of: Callable[[float], float]) -> Iterator[float]:
    """Those values whose labels don't touch."""
    free = -math.inf
    for x in xs:
        half = _LETTER * len(_number(x)) / 2 + 3
        if x_of(x) - half >= free:
            free = x_of(x) + half
            yield x


def _number(value: float) -> str:
    text = f"{value:,.10g}" if abs(value) < 10000 else f"{value:,.0f}"
    return text if len(text) < 9 else f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    # XML has no place for control characters, not even escaped ones, and a chart none for long names.
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    shown = shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escape(shown)}</text>'
