"""Answers that follow a grammar, on real models: whatever the model would say, the form is kept."""

import dataclasses
import enum
import json
import math
import re

import pytest
from pydantic import BaseModel, Field
from tiny_models import BOS, GREEDY, answer, asking, finish, loaded, opened, smollm2, tiny_model

from trioserve.engine.base import Constraint, ConstraintError, ConstraintKind, Failed, FinishReason
from trioserve.engine.llama.constraint import Matcher
from trioserve.engine.sampling import Sampling

HOT = Sampling(temperature=2.0, top_k=0, min_p=0.0, seed=1)


def schema(value):
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def regex(pattern):
    return Constraint(ConstraintKind.REGEX, pattern)


@pytest.fixture(scope="module")
def real():
    with loaded(smollm2()) as weights:
        yield weights


@pytest.fixture(scope="module")
def tiny():
    with loaded(tiny_model()) as weights:
        yield weights


@pytest.fixture(scope="module")
def said(real):
    """The answer to a question under some constraint."""
    with opened(real, n_ctx=512) as session:
        prompt = real.tokenize("Describe a person in JSON:\n", special=False, add_bos=True)

        def ask(constraint, sampling=GREEDY, max_tokens=200, **fields):
            return answer(session, asking(prompt, max_tokens, sampling, constraint=constraint, **fields))

        yield ask


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str = Field(max_length=12)
    number: int | None = None


class Person(BaseModel):
    name: str = Field(max_length=12)
    favourite: Colour | None
    age: int = Field(ge=0, le=150)
    colours: list[Colour] = Field(max_length=3)
    address: Address
    boss: "Person | None" = None


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_an_answer_validates_against_its_schema_or_was_cut_off(said, sampling):
    got = said(schema(Person.model_json_schema()), sampling)
    if got.reason is FinishReason.STOP:
        Person.model_validate_json(got.text)
    else:
        assert got.text.lstrip().startswith("{")


@pytest.mark.parametrize("place", ["#/$defs/choice/anyOf/0", "#/$defs/list/items", "#/properties/own"])
def test_references_lead_anywhere_in_a_schema(said, place):
    red = {"enum": ["red"]}
    defined = {"choice": {"anyOf": [red, {"type": "null"}]}, "list": {"type": "array", "items": red}}
    form = {"anyOf": [{"$ref": place}], "$defs": defined, "properties": {"own": red}}
    assert said(schema(form), max_tokens=10).text == '"red"'


def test_any_object_is_json(said):
    got = said(schema({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}))
    assert got.reason is FinishReason.STOP
    assert isinstance(json.loads(got.text), dict)


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("pattern", ["yes|no", "[0-9]{3}-[0-9]{2}", "(red|blue)( and (red|blue)){2}", "é+ü"])
def test_an_answer_matches_its_expression_as_a_whole(said, pattern, sampling):
    got = said(regex(pattern), sampling, max_tokens=60)
    if got.reason is FinishReason.STOP:
        assert re.fullmatch(pattern, got.text)
    else:
        assert pattern == "é+ü"


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'root ::= "y" rest\nrest ::= "es"'])
def test_an_answer_follows_a_grammar(said, grammar):
    assert said(Constraint(ConstraintKind.GBNF, grammar)).text in ("yes", "no")


def test_a_lark_grammar(said):
    assert said(Constraint(ConstraintKind.LARK, 'start: "a" "b"+ "c"'), max_tokens=30).text.startswith("ab")


def test_an_answer_ends_where_its_form_does_without_a_token_for_that(said):
    got = said(regex("yes"), ignore_eos=True)
    assert (got.text, got.reason) == ("yes", FinishReason.STOP)


def test_an_answer_that_is_cut_off_says_so(said):
    assert said(regex("[a-z]{50}"), max_tokens=3).reason is FinishReason.LENGTH


def test_a_form_works_beside_biases_and_penalties(said):
    sampling = Sampling(temperature=1.0, repeat_penalty=1.3, logit_bias=((300, 5.0),), seed=3)
    assert re.fullmatch("[0-9]{4}", said(regex("[0-9]{4}"), sampling).text)


@pytest.mark.parametrize(
    ("constraint", "word"),
    [
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "strange"}), "strange"),
        (schema({"$ref": "http://example.com/x"}), "example.com"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "nsatisfiable"),
        (regex("(a"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (Constraint(ConstraintKind.GBNF, "root ::= foo"), "foo"),
        (Constraint(ConstraintKind.GBNF, "nonsense"), "::="),
        (Constraint(ConstraintKind.LARK, "start: missing"), "missing"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), ""),
        (schema(False), "nsatisfiable"),
        (schema({"$ref": "#"}), "allows no answer"),
        (schema({"x-guidance": {"lenient": True}, "type": "string", "not": {}}), "x-guidance"),
        (regex(r"a[^\s\S]"), "allows no answer"),
        (Constraint(ConstraintKind.GBNF, "root ::= root"), "allows no answer"),
    ],
    ids=lambda value: str(getattr(value, "source", value))[:30],
)
def test_what_cannot_be_followed_is_said(real, constraint, word):
    with pytest.raises(ConstraintError) as caught:
        real.check_constraint(constraint)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "((a*)*)*b" * 50, "[a-z]{1,100000}x"])
def test_an_expression_of_any_size_costs_a_bounded_time(tiny, pattern):
    try:
        tiny.check_constraint(regex(pattern))
    except ConstraintError:
        return
    with opened(tiny) as session:
        number = session.add(asking([BOS, 5], 5, constraint=regex(pattern)))
        finish(session, number)


def chained_schemas(count):
    chain = {f"d{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(count)}
    return schema({"$ref": "#/$defs/d0", "$defs": chain | {f"d{count}": {"type": "string"}}})


def chained_rules(count):
    rules = [f'r{index} ::= "x" r{index - 1}' for index in range(1, count)]
    return Constraint(ConstraintKind.GBNF, "\n".join([f"root ::= r{count - 1}", 'r0 ::= "e"', *rules]))


@pytest.mark.parametrize("constraint", [chained_schemas(4000), chained_rules(8000)], ids=["schema", "grammar"])
def test_a_long_chain_of_references_does_not_overflow_the_stack(tiny, constraint):
    tiny.check_constraint(constraint)
    with opened(tiny) as session:
        finish(session, session.add(asking([BOS, 5], 5, constraint=constraint)))


def test_a_schema_that_is_true_allows_any_json(said):
    json.loads(said(Constraint(ConstraintKind.JSON_SCHEMA, "true")).text)


@pytest.mark.parametrize("sampling", [GREEDY, HOT, dataclasses.replace(HOT, typical_p=0.5)])
@pytest.mark.parametrize("constraint", [None, regex("a+")], ids=["free", "form"])
def test_an_answer_that_may_have_no_token_fails_as_the_request_s_own_fault(tiny, sampling, constraint):
    nothing = dataclasses.replace(sampling, logit_bias=tuple((token, -math.inf) for token in range(tiny.vocab_size)))
    with opened(tiny) as session:
        got = finish(session, session.add(asking([BOS, 5], 5, nothing, constraint=constraint)))[0]
    assert got.tokens == []
    assert isinstance(got.end, Failed)
    assert got.end.unanswerable
    assert "logit_bias" in got.end.message


def test_a_grammar_that_becomes_too_complex_fails_alone(tiny, monkeypatch):
    def fail(self, logits):
        raise ConstraintError("too complex")

    monkeypatch.setattr(Matcher, "restrict", fail)
    with opened(tiny, max_sequences=2) as session:
        broken = session.add(asking([BOS, 5], 5, constraint=regex("a+")))
        free = session.add(asking([BOS, 6], 5, ignore_eos=True))
        failed, good = finish(session, broken, free)
    assert isinstance(failed.end, Failed)
    assert "too complex" in failed.end.message
    assert len(good.tokens) == 5


def test_sequences_side_by_side_follow_their_own_forms(real):
    forms = ["yes|no", "[0-9]{3}", None]
    prompt = real.tokenize("Answer:", special=False, add_bos=True)
    with opened(real, max_sequences=3) as session:
        numbers = [session.add(asking(prompt, 8, constraint=form and regex(form))) for form in forms]
        answers = finish(session, *numbers)
    for form, got in zip(forms, answers, strict=True):
        assert form is None or re.fullmatch(form, got.text)


def test_one_grammar_serves_many_requests_from_its_beginning(said):
    assert [said(regex("[a-c]{3}")).text for _ in range(3)] == [said(regex("[a-c]{3}")).text] * 3


def test_the_same_answer_comes_with_and_without_a_form_that_allows_it(said):
    free = said(None, max_tokens=12)
    assert said(regex("(?s:.*)"), max_tokens=12).tokens == free.tokens


@pytest.mark.parametrize("seed", range(4))
def test_excluded_top_choices_leave_nothing_that_may_not_follow(said, seed):
    sampling = Sampling(temperature=1.0, min_p=0.0, top_k=0, xtc_probability=1.0, xtc_threshold=0.0, seed=seed)
    assert re.fullmatch("[ab]{3}", said(regex("[ab]{3}"), sampling, max_tokens=20).text)


@pytest.mark.parametrize("base", [GREEDY, HOT], ids=["greedy", "hot"])
def test_a_form_of_which_nothing_is_left_fails_by_itself(real, base):
    banned = real.tokenize("a", special=False, add_bos=False)[0]
    sampling = dataclasses.replace(base, logit_bias=((banned, -float("inf")),))
    with opened(real) as session:
        number = session.add(asking([1, 5], 5, sampling, constraint=regex("a")))
        (got,) = finish(session, number)
    assert isinstance(got.end, Failed)
    assert got.end.unanswerable
    assert "logit_bias" in got.end.message


@pytest.mark.parametrize(
    "constraint",
    [Constraint(ConstraintKind.GBNF, "root ::= " + "(" * 5000), Constraint(ConstraintKind.JSON_SCHEMA, "[" * 50_000)],
    ids=["brackets", "lists"],
)
def test_what_is_nested_too_deeply_is_said_in_our_words(tiny, constraint):
    with pytest.raises(ConstraintError) as caught:
        tiny.check_constraint(constraint)
    assert "python" not in str(caught.value).lower()


def test_few_forms_are_kept_where_they_are_long(tiny):
    constraints = tiny._constraints
    for number in range(12):
        tiny.check_constraint(regex(f"{number}(" + "|".join(f"{word}x" for word in range(12_000)) + ")"))
    assert sum(len(kept.source) for kept in constraints._compiled) <= 512 * 1024
