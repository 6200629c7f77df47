"""The Jinja environment of chat templates: the reference's syntax, within a sandbox and the meter's bounds.

Source of the settings: Hugging Face transformers' ``apply_chat_template`` (immutable sandbox, ``trim_blocks``,
``lstrip_blocks``, loop controls, the lenient undefined).
"""

from __future__ import annotations

from types import BuiltinMethodType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any

from jinja2 import pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from trioserve.chat import text_bounds
from trioserve.chat.filters import TemplateNamespace, bounded_filters, bounded_tests
from trioserve.chat.meter import METER
from trioserve.chat.rewrite import REWRITE_FILTERS, BoundsRewriter, GenerationTag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2 import nodes
    from jinja2.runtime import Context

    from trioserve.chat.meter import Meter

# What the compiler passes to each call beside the template's own arguments.
_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")


@pass_context
def _finalize(_: Context, value: object) -> object:
    """Sees each printed expression. Taking the context also keeps Jinja from evaluating constants while it compiles."""
    METER.get().tick()
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose every loop, call, operator and filter asks the meter of the rendering."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_finalize,
            # The optimizer evaluates constant expressions at compile time, when no meter runs.
            optimized=False,
        )
        self.filters = {**bounded_filters(), **REWRITE_FILTERS}
        self.tests = bounded_tests()
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = BoundsRewriter().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro, a block or a ``set`` block has written."""
        meter = METER.get()
        parts = list(pieces)
        meter.reserve(sum(map(len, parts)))
        return meter.keep("".join(parts))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``; filters such as ``map`` and ``sort`` look attributes up in loops of their own."""
        METER.get().tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``, likewise."""
        METER.get().tick()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The immutable sandbox's rule, and no methods that could leave the bounds."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, str):
            return attr in text_bounds.STR_METHODS
        if isinstance(obj, (bytes, type, GeneratorType)):
            return False
        return not (isinstance(obj, int) and attr in ("to_bytes", "from_bytes"))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` with our formatter; None for any other value."""
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        mapped = value.__name__ == "format_map"

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            if mapped:
                (kwargs,), args = args, ()
            # A formatter counts what it wrote, so each call has its own.
            return type(text)(self._formatter(text).vformat(text, args, kwargs))

        return bounded_format

    def _formatter(self, text: str) -> text_bounds.BoundedFormatter | text_bounds.BoundedEscapeFormatter:
        if isinstance(text, Markup):
            return text_bounds.BoundedEscapeFormatter(self, escape=text.escape)
        return text_bounds.BoundedFormatter(self)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a global or a method."""
        meter = METER.get()
        named = {key: value for key, value in kwargs.items() if key not in _COMPILER_ARGUMENTS}
        meter.check_arguments(args, named.values())
        if isinstance(obj, (MethodType, BuiltinMethodType)) and isinstance(obj.__self__, str):
            args = _predict_method(meter, obj.__self__, obj.__name__, args, named)
        return meter.keep(super().call(context, obj, *args, **kwargs), args)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator, or ``%`` on a text."""
        meter = METER.get()
        meter.tick()
        if operator == "*":
            _predict_repeat(meter, left, right)
            _predict_repeat(meter, right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.reserve_bits((left.bit_length() - 1) * right)
        elif operator == "%" and isinstance(left, str):
            text_bounds.predict_percent(meter, left, right)
        result = super().call_binop(context, operator, left, right)
        return meter.keep_sum(result, left, right) if operator == "+" else meter.keep(result)


def _predict_repeat(meter: Meter, value: object, times: object) -> None:
    if not isinstance(times, int):
        return
    if isinstance(value, str):
        meter.reserve(len(value) * times)
    elif isinstance(value, (list, tuple)):
        meter.reserve(meter.shape(value).weight * times)


def _predict_method(
    meter: Meter, text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Refuse a method call whose result would be too large; gives the positional arguments to call it with."""
    if name == "join":
        (iterable,) = (*args, *named.values())
        items = list(iterable)  # a generator can be read once only, so the call gets what was counted
        text_bounds.predict_join(meter, text, items)
        return (items,)
    predict = text_bounds.METHOD_PREDICTORS.get(name)
    if predict is not None:
        predict(meter, text, *args, **named)
    return args
