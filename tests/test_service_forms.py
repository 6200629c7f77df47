"""Which form an answer is held to."""

import pytest

from trioserve.chat import Expected, Tool, ToolUse
from trioserve.chat.dialects import GENERIC, HERMES, LLAMA, MISTRAL
from trioserve.engine.base import Constraint, ConstraintError, ConstraintKind
from trioserve.errors import InvalidRequestError
from trioserve.service import GenerationRequest, TextPrompt
from trioserve.service.forms import constraint_of

GOOD = Tool("good", {"properties": {"kept": {}}}, {})
BAD = Tool("bad", {"properties": {"refused": {}}}, {}, field="tools[1].function.parameters")
NATIVES = pytest.mark.parametrize("dialect", [HERMES, LLAMA, MISTRAL], ids=lambda dialect: dialect.name)


class Weights:
    """Refuses what says so."""

    word = "refused"

    def __init__(self):
        self.checked = []

    def check_constraint(self, constraint):
        self.checked.append(constraint)
        if self.word in constraint.source:
            raise ConstraintError("no")


def form(use, dialect, weights, **fields):
    expected = None if use is None else Expected(False, use, dialect)
    return constraint_of(GenerationRequest(TextPrompt(""), **fields), expected, weights, lambda: "")


@NATIVES
def test_calls_that_a_model_is_free_to_make_are_held_to_after_its_own_word(dialect):
    weights = Weights()
    constraint = form(ToolUse([GOOD]), dialect, weights)
    assert constraint.trigger == dialect.trigger
    assert "kept" in constraint.source
    assert weights.checked == [constraint]


@NATIVES
def test_arguments_that_cannot_be_held_to_are_any_object_where_nobody_insists(dialect):
    source = form(ToolUse([GOOD, BAD]), dialect, Weights()).source
    assert "kept" in source
    assert '"bad"' in source.replace('\\"', '"')
    assert "refused" not in source
    with pytest.raises(InvalidRequestError) as caught:
        form(ToolUse([GOOD, BAD], required=True), dialect, Weights())
    assert caught.value.param == "tools[1].function.parameters"


def test_calls_are_free_where_none_can_be_held_to(monkeypatch):
    monkeypatch.setattr(Weights, "word", "")
    assert form(ToolUse([GOOD]), HERMES, Weights()) is None


def test_a_model_without_calls_of_its_own_is_always_held_to_them():
    assert form(ToolUse([GOOD]), GENERIC, Weights()).trigger == ""
    with pytest.raises(InvalidRequestError):
        form(ToolUse([BAD]), GENERIC, Weights())


def test_an_answer_without_tools_has_the_form_that_was_asked_for():
    wanted = Constraint(ConstraintKind.REGEX, "a")
    assert form(None, HERMES, Weights()) is None
    assert form(None, HERMES, Weights(), constraint=wanted) is wanted
    assert (
        constraint_of(
            GenerationRequest(TextPrompt(""), constraint=wanted), Expected(False, None, HERMES), Weights(), str
        )
        is wanted
    )
