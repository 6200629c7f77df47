"""The form of an answer: the one that was asked for, or that of calls of tools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from trioserve.chat import Expected, Tool, ToolUse
from trioserve.engine.base import Constraint, ConstraintError, ConstraintKind, Weights
from trioserve.errors import InvalidRequestError
from trioserve.service.requests import GenerationRequest


def constraint_of(
    request: GenerationRequest, expected: Expected | None, weights: Weights, template: Callable[[], str]
) -> Constraint | None:
    """What an answer has to look like, and can be held to.

    Arguments:
        request: may ask for a form.
        expected: may expect calls.
        weights: of the model.
        template: reads the source of its chat template.

    Raises:
        InvalidRequestError: it can't be held to that.
    """
    use = expected.use if expected is not None else None
    if expected is None or use is None:
        return _asked(request, weights)
    grammar = expected.grammar(template())
    if grammar is None:
        return _triggered(expected, use, weights)
    constraint = Constraint(ConstraintKind.LARK, grammar)
    try:
        weights.check_constraint(constraint)
    except ConstraintError as error:
        _check_parameters(use, weights)
        raise InvalidRequestError(f"tools can't be honoured: {error}", param="tools") from None
    return constraint


def _asked(request: GenerationRequest, weights: Weights) -> Constraint | None:
    if request.constraint is None:
        return None
    try:
        weights.check_constraint(request.constraint)
    except ConstraintError as error:
        name = request.constraint_field
        raise InvalidRequestError(f"{name} can't be honoured: {error}", param=name) from None
    return request.constraint


def _triggered(expected: Expected, use: ToolUse, weights: Weights) -> Constraint | None:
    """The form of calls that a model is free to make: as far as it can be honoured, for nobody insists on it."""
    trigger = expected.dialect.trigger
    for offered in _as_far_as_possible(use, weights):
        constraint = Constraint(ConstraintKind.LARK, expected.dialect.triggered(offered), trigger)
        with contextlib.suppress(ConstraintError):
            weights.check_constraint(constraint)
            return constraint
    return None


def _as_far_as_possible(use: ToolUse, weights: Weights) -> Iterator[ToolUse]:
    yield use
    yield replace(use, tools=[tool if _is_honoured(tool, weights) else tool.loosened for tool in use.tools])


def _is_honoured(tool: Tool, weights: Weights) -> bool:
    try:
        weights.check_constraint(Constraint(ConstraintKind.JSON_SCHEMA, tool.schema))
    except ConstraintError:
        return False
    return True


def _check_parameters(use: ToolUse, weights: Weights) -> None:
    """Say which tool it is whose parameters can't be followed."""
    for tool in use.tools:
        try:
            weights.check_constraint(Constraint(ConstraintKind.JSON_SCHEMA, tool.schema))
        except ConstraintError as error:
            raise InvalidRequestError(f"{tool.field} can't be honoured: {error}", param=tool.field) from None
