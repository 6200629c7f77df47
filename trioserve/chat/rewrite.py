"""What is added to a template's syntax tree, so that the meter sees what no hook of Jinja's sandbox shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from trioserve.chat.meter import METER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2.parser import Parser

# Names with a space, which no template can write as a filter.
_TICK = "bound tick"
_PASS = "bound pass"
_KEEP = "bound keep"
_CONCAT = "bound concat"


def _tick(_: object) -> bool:
    METER.get().tick()
    return True


def _pass(value: object) -> object:
    METER.get().tick()
    return value


def _keep(value: object) -> object:
    return METER.get().keep(value)


def _concat(values: list[object]) -> str:
    meter = METER.get()
    texts = [str(value) for value in values]
    meter.reserve(sum(map(len, texts)))
    return meter.keep("".join(texts))


#: The filters that rewritten trees call.
REWRITE_FILTERS: Mapping[str, Callable[..., Any]] = {_TICK: _tick, _PASS: _pass, _KEEP: _keep, _CONCAT: _concat}


def _call(name: str, value: nodes.Expr, lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=lineno)


class BoundsRewriter(NodeTransformer):
    """Puts the meter into loops (which run without a call), literals, slices, ``~`` and comparisons.

    Everything else that a template can do passes through the environment's own hooks.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Tick at the head of each turn, and for each item that a filtered loop skips."""
        self.generic_visit(node)
        tick = _call(_TICK, nodes.Const(None, lineno=node.lineno), node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """``a ~ b`` is joined by us, who count first."""
        self.generic_visit(node)
        return _call(_CONCAT, nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Weigh a literal."""
        self.generic_visit(node)
        return _call(_KEEP, node, node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Weigh a literal; a tuple of names that are assigned to stays as it is."""
        self.generic_visit(node)
        return _call(_KEEP, node, node.lineno) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Slices bypass the environment's ``getitem`` and copy."""
        self.generic_visit(node)
        return _call(_KEEP, node, node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """A comparison of long values takes time."""
        self.generic_visit(node)
        node.expr = _call(_PASS, node.expr, node.lineno)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        """``{% autoescape %}`` would escape a prompt as HTML and join texts past the meter."""
        raise TemplateAssertionError("autoescape has no place in a chat template", node.lineno)


class GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}``: marks the assistant's words for training; here a plain scope.

    Source of the tag: Hugging Face transformers, ``apply_chat_template(return_assistant_tokens_mask=True)``.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body in a scope of its own: assignments in it end with it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)
