"""The file with the charts: SVG of our own, or PNG by matplotlib where that is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from trioserve.bench.plot import Chart, as_svg, is_wide


def write_picture(path: Path, charts: Sequence[Chart]) -> None:
    """Draw charts into a file.

    Arguments:
        path: ends in ``.svg`` or ``.png``.
        charts: stand side by side.

    Raises:
        ImportError: PNG is asked for, and matplotlib is not installed.
        OSError: the file can't be written.
    """
    if path.suffix.lower() == ".png":
        path.write_bytes(_as_png(charts))
    else:
        path.write_text(as_svg(charts), encoding="utf-8")


def _as_png(charts: Sequence[Chart]) -> bytes:
    from matplotlib.figure import Figure  # the figure alone: no window, and nothing global

    figure = Figure(figsize=(5.5 * len(charts), 4.5), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        for series, marker in zip(chart.series, "os^D" * len(chart.series), strict=False):
            axes.plot(*zip(*chart.points(series), strict=True), marker=marker, label=series.label)
        xs = chart.xs
        axes.set(title=chart.title, xlabel=chart.x_label, xscale="log" if is_wide(xs) else "linear")
        axes.set_xticks(xs, [f"{x:g}" for x in xs], minor=False)
        axes.minorticks_off()
        axes.set(yscale="log") if chart.log_y else axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
