"""Request bodies: each field with everything that a client may put there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from trioserve.engine.sampling import Dry, Mirostat, Sampling
from trioserve.errors import InvalidRequestError
from trioserve.http.body import decode_object
from trioserve.http.requests import batch_request, generation_request, translated_request
from trioserve.http.schemas.base import INT64, MAX_STOP_CHARACTERS, MAX_STOPS, GenerationFields
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import MAX_PROMPTS, CompletionRequest
from trioserve.http.schemas.constraints import NAMES, parse_constraint
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.schemas.text import TokenizeRequest
from trioserve.service import TextPrompt, TokenPrompt

MESSAGES = [{"role": "user", "content": "hi"}]
BASE = {ChatCompletionRequest: {"messages": MESSAGES}, CompletionRequest: {"prompt": "hi"}}
BOTH = pytest.mark.parametrize("schema", BASE, ids=lambda schema: schema.__name__)
LONES = ["\ud800", "\udfff", "a\udc00b", "\udc00\ud800"]
NAN, INF = float("nan"), float("inf")

INTEGERS = {  # name: least, most
    "max_tokens": (1, INT64 - 1),
    "max_completion_tokens": (1, INT64 - 1),
    "top_k": (-1, 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
    "seed": (-INT64, INT64 - 1),
    "busy_timeout_ms": (0, 2**31 - 1),
    "mirostat": (0, 2),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "n": (1, 128),
    "top_logprobs": (0, 20),
}
NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (None, 10),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dynatemp_range": (0, 2),
    "dynatemp_exponent": (0, 10),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 10),
}
NEEDED = {"top_logprobs": {"logprobs": True}}  # fields that make sense beside others only
BOOLS = ("stream", "ignore_eos", "cache_prompt", "timings_per_token", "parallel_tool_calls")
NOT_INTEGERS = (True, False, "1", "", 1.5, 1.0, NAN, INF, -INF, [], [1], {}, {"a": 1})
NOT_NUMBERS = (True, False, "1", "", [], [0.5], {}, {"a": 1})
NOT_BOOLS = (0, 1, 1.0, "true", "", NAN, [], [True], {})
NOT_TEXTS = (0, 1.5, True, NAN, [], ["a"], {}, {"a": 1})
NOT_OBJECTS = (0, 1.5, True, "a", NAN, [], [{}])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT_ONLY = {"max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_format"}
FIELDS = {*INTEGERS, *NUMBERS, *BOOLS, "model", "stream_options", "stop", *CHAT_ONLY}
FIELDS |= {"best_of", "logit_bias", "dry_sequence_breakers", *NAMES}


def parse(schema, **fields):
    return schema.parse({**BASE[schema], **fields})


def refused(schema, body, param, *words):
    """See that a body is refused for one field, in words that name it."""
    with pytest.raises(InvalidRequestError) as caught:
        schema.parse(body)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param) or param in error.message
    for word in words:
        assert word in error.message
    assert "Input should" not in error.message
    error.message.encode()
    return error.message


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def schemas_of(name):
    return [ChatCompletionRequest] if name in CHAT_ONLY else list(BASE)


def test_the_tables_here_cover_every_field():
    assert FIELDS | {"messages", "logprobs"} == set(ChatCompletionRequest.model_fields)
    assert (FIELDS - CHAT_ONLY) | {"prompt", "logprobs", "suffix", "echo"} == set(CompletionRequest.model_fields)
    assert set(GenerationFields.model_fields) == FIELDS - CHAT_ONLY


@BOTH
def test_nothing_but_the_required_field_is_required(schema):
    parsed = parse(schema)
    assert parsed.model is None
    assert parsed.stream is None
    assert parsed.max_tokens is None
    assert parsed.stops == ()


@BOTH
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_null_is_absent(schema, name):
    assert parse(schema, **{name: None}) == parse(schema)


@BOTH
def test_unknown_fields_are_ignored(schema):
    unknown = {"user": "u", "store": True, "metadata": {"a": [1]}, "n_probs_typo": NAN, "": 0, "\ud800": "\ud800"}
    assert parse(schema, **unknown) == parse(schema)


@BOTH
@pytest.mark.parametrize(("schema_field", "missing"), [("messages", {}), ("prompt", {})])
def test_the_required_field_is_named_when_it_is_missing(schema, schema_field, missing):
    if schema_field in BASE[schema]:
        refused(schema, missing, schema_field, "is required")


# Types


@pytest.mark.parametrize(("name", "value"), cases(dict.fromkeys(INTEGERS, NOT_INTEGERS)))
def test_integers_are_integers(name, value):
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: value}, name, "must be an integer")


@pytest.mark.parametrize(("name", "value"), cases(dict.fromkeys(NUMBERS, NOT_NUMBERS)))
def test_numbers_are_numbers(name, value):
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: value}, name, "must be a number")


@pytest.mark.parametrize(("name", "value"), cases(dict.fromkeys(NUMBERS, (NAN, INF, -INF))))
def test_numbers_are_finite(name, value):
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: value}, name, "must be a finite number")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_beyond_every_float_is_no_way_around_the_limits(name):
    """JSON can spell infinity as a number; an integer may have hundreds of digits."""
    for schema in schemas_of(name):
        body = json.dumps({**BASE[schema], name: 0})
        for spelling in ("1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400):
            decoded = decode_object(body.replace(f'"{name}": 0', f'"{name}": {spelling}').encode())
            refused(schema, decoded, name)


@pytest.mark.parametrize(("name", "value"), cases(dict.fromkeys(BOOLS, NOT_BOOLS)))
def test_switches_are_bools(name, value):
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: value}, name, "must be true or false")


@BOTH
@pytest.mark.parametrize("value", NOT_TEXTS)
def test_the_model_is_a_string(schema, value):
    refused(schema, {**BASE[schema], "model": value}, "model", "must be a string")


@BOTH
@pytest.mark.parametrize("value", NOT_OBJECTS)
def test_stream_options_are_an_object(schema, value):
    refused(schema, {**BASE[schema], "stream_options": value}, "stream_options", "must be an object")


@BOTH
@pytest.mark.parametrize("value", NOT_BOOLS)
def test_include_usage_is_a_bool(schema, value):
    body = {**BASE[schema], "stream_options": {"include_usage": value}}
    refused(schema, body, "stream_options.include_usage", "must be true or false")


@BOTH
@pytest.mark.parametrize("options", [{}, {"include_usage": None}, {"include_usage": True}, {"other": 1}])
def test_stream_options_may_say_little(schema, options):
    assert parse(schema, stream_options=options).stream_options.include_usage is options.get("include_usage")


# Ranges


@pytest.mark.parametrize(("name", "bounds"), (INTEGERS | NUMBERS).items())
def test_bounds_belong_to_the_range(name, bounds):
    for schema in schemas_of(name):
        for bound in bounds:
            if bound is not None:
                assert getattr(parse(schema, **{**NEEDED.get(name, {}), name: bound}), name) == bound


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
@pytest.mark.parametrize("step", [1, 2**64, 10**400])
def test_integers_beyond_the_bounds_are_refused_with_the_bound(name, bounds, step):
    least, most = bounds
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: least - step}, name, f"must be {least} or more")
        words = f"must be less than {most + 1}" if most > 1000 else f"must be {most} or less"
        refused(schema, {**BASE[schema], name: most + step}, name, words)


@pytest.mark.parametrize(("name", "bounds"), NUMBERS.items())
@pytest.mark.parametrize("step", [1e-9, 1, 1e300, 2**64])
def test_numbers_beyond_the_bounds_are_refused_with_the_bound(name, bounds, step):
    least, most = bounds
    for schema in schemas_of(name):
        refused(schema, {**BASE[schema], name: most + step}, name, f"must be {most:g} or less")
        if least is not None:
            refused(schema, {**BASE[schema], name: least - step}, name, f"must be {least:g} or more")


@BOTH
@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, -1e-9])
def test_a_repeat_penalty_divides_and_is_not_zero(schema, value):
    refused(schema, {**BASE[schema], "repeat_penalty": value}, "repeat_penalty", "must be more than 0")


@BOTH
@pytest.mark.parametrize("value", [0, 1e-8, 1e-4, 5e-324, 1, 2])
def test_tiny_temperatures_are_temperatures(schema, value):
    assert parse(schema, temperature=value).temperature == value


# max_tokens: zero, null and absent are three things


@BOTH
def test_max_tokens_of_zero_is_not_unlimited(schema):
    refused(schema, {**BASE[schema], "max_tokens": 0}, "max_tokens", "must be 1 or more")


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": None, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_either_name_limits_the_answer(fields, limit):
    assert parse(ChatCompletionRequest, **fields).limit == limit


def test_two_different_limits_contradict_each_other():
    body = {**BASE[ChatCompletionRequest], "max_tokens": 5, "max_completion_tokens": 6}
    refused(ChatCompletionRequest, body, "max_completion_tokens", "max_tokens is 5", "max_completion_tokens is 6")


# Sampling


def sampling_of(**fields):
    return generation_request(parse(ChatCompletionRequest, **fields), "id").sampling


def test_what_is_not_given_is_the_default_of_sampling():
    drawn = sampling_of()
    assert drawn == Sampling(seed=drawn.seed)


@pytest.mark.parametrize(
    ("field", "value", "attribute", "meant"),
    [
        ("temperature", 0, "temperature", 0),
        ("top_p", 0, "top_p", 0),
        ("min_p", 0, "min_p", 0),
        ("top_k", 0, "top_k", 0),
        ("top_k", -1, "top_k", 0),
        ("repeat_last_n", 0, "repeat_last_n", 0),
        ("repeat_last_n", -1, "repeat_last_n", 2**31 - 1),
        ("frequency_penalty", -2, "frequency_penalty", -2),
        ("seed", 0, "seed", 0),
        ("seed", 42, "seed", 42),
        ("seed", 2**32 + 42, "seed", 42),
    ],
)
def test_zero_is_a_value_and_minus_one_is_all(field, value, attribute, meant):
    assert getattr(sampling_of(**{field: value}), attribute) == meant


def test_seeds_repeat_and_no_seed_is_a_fresh_one():
    def seeds(**fields):
        return {sampling_of(**fields).seed for _ in range(8)}

    assert len(seeds(seed=-2)) == 1
    assert len(seeds(seed=-1)) > 1
    assert len(seeds(seed=None)) > 1


# Stop strings


@BOTH
@pytest.mark.parametrize(
    ("value", "stops"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([], ()),
        ("x" * MAX_STOP_CHARACTERS, ("x" * MAX_STOP_CHARACTERS,)),
        (["a"] * MAX_STOPS, ("a",) * MAX_STOPS),
        ("\U0001f600", ("\U0001f600",)),
        (" \n", (" \n",)),
    ],
)
def test_stop_is_one_string_or_several(schema, value, stops):
    assert parse(schema, stop=value).stops == stops


@BOTH
@pytest.mark.parametrize("value", [0, 1.5, True, NAN, {}, {"a": "b"}])
def test_stop_of_another_type(schema, value):
    refused(schema, {**BASE[schema], "stop": value}, "stop", "must be a string or a list of strings")


@BOTH
@pytest.mark.parametrize("item", [None, 0, True, ["a"], {}])
def test_each_stop_is_a_string(schema, item):
    refused(schema, {**BASE[schema], "stop": ["a", item]}, "stop[1]", "must be a string")


@BOTH
@pytest.mark.parametrize("value", ["", [""], ["a", ""], "x" * (MAX_STOP_CHARACTERS + 1), ["x" * 5000]])
def test_stops_have_a_length(schema, value):
    refused(schema, {**BASE[schema], "stop": value}, "stop", "stop", f"1 to {MAX_STOP_CHARACTERS} characters")


@BOTH
def test_stops_have_a_number(schema):
    body = {**BASE[schema], "stop": ["a"] * (MAX_STOPS + 1)}
    refused(schema, body, "stop", f"{MAX_STOPS + 1} strings", f"at most {MAX_STOPS}")


# Lone surrogates: JSON can spell them, UTF-8 can't


@BOTH
@pytest.mark.parametrize("text", LONES)
@pytest.mark.parametrize(
    ("field", "wrap", "param"),
    [
        ("model", lambda text: text, "model"),
        ("stop", lambda text: text, "stop[0]"),
        ("stop", lambda text: ["a", text], "stop[1]"),
    ],
)
def test_lone_surrogates_in_common_fields(schema, text, field, wrap, param):
    refused(schema, {**BASE[schema], field: wrap(text)}, param, "lone surrogate")


@pytest.mark.parametrize("text", LONES)
def test_lone_surrogates_in_prompts_and_roles(text):
    refused(CompletionRequest, {"prompt": text}, "prompt", "lone surrogate")
    refused(CompletionRequest, {"prompt": [text]}, "prompt", "lone surrogate")
    body = {"messages": [*MESSAGES, {"role": text, "content": "a"}]}
    refused(ChatCompletionRequest, body, "messages[1].role", "lone surrogate")
    body = {"messages": [{"role": "user", "content": "a", text: "b"}]}
    refused(ChatCompletionRequest, body, "messages[0]", "lone surrogate")


@BOTH
def test_pairs_of_surrogates_are_characters(schema):
    """As JSON spells characters beyond the first plane."""
    decoded = decode_object(rb'{"stop": "\ud83d\ude00"}')
    assert parse(schema, **decoded).stops == ("\U0001f600",)


# Choices, biases and logarithms of probability


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ({}, ()),
        ([], ()),
        ({"5": 1, "7": -100}, ((5, 1.0), (7, -100.0))),
        ([[5, 0.5], [7, False]], ((5, 0.5), (7, -INF))),
        ({"5": False}, ((5, -INF),)),
    ],
)
def test_biases_in_both_forms(value, meant):
    assert sampling_of(logit_bias=value).logit_bias == meant


@BOTH
@pytest.mark.parametrize(
    "value",
    [
        *(0, True, "a", {"a": 1}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"9" * 30: 1}, {"٣": 1}, {"5": 101}, {"5": -101}),
        *({"5": None}, {"5": True}, {"5": "1"}, {"5": NAN}, {"5": INF}, [5, 1], [[5]], [[5, 1, 1]], [[-1, 1]]),
        *([[True, 1]], [["5", 1]], [["5a", 1]], [[5.0, 1]], [{"5": 1}], [[2**40, 1]], [[1, 1]] * 4097),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_bias(schema, value):
    refused(schema, {**BASE[schema], "logit_bias": value}, "logit_bias")


def test_dry_and_mirostat_are_taken_apart():
    sampling = sampling_of(
        mirostat=2, mirostat_tau=3, dry_multiplier=0.8, dry_penalty_last_n=9, dry_sequence_breakers=["x"]
    )
    assert sampling.mirostat == Mirostat(2, tau=3.0)
    assert sampling.dry == Dry(0.8, last_n=9, breakers=("x",))
    assert sampling_of(dry_sequence_breakers=[]).dry.breakers == ()


@BOTH
@pytest.mark.parametrize("value", ["a", [1], [""], ["a" * 65], ["a"] * 65, {}, [None], ["\ud800"]])
def test_what_is_no_list_of_breakers(schema, value):
    with pytest.raises(InvalidRequestError, match=r"^dry_sequence_breakers") as caught:
        parse(schema, dry_sequence_breakers=value)
    assert caught.value.param.startswith("dry_sequence_breakers")


@BOTH
def test_each_choice_has_random_numbers_of_its_own(schema):
    def seeds(**fields):
        return [item.sampling.seed for item in batch_request(parse(schema, **fields), "id").items]

    assert seeds(n=3, seed=42) == [42, 43, 44]
    assert len(set(seeds(n=3))) == 3
    assert len(seeds()) == 1


def test_choices_of_several_prompts_stand_together():
    items = batch_request(parse(CompletionRequest, prompt=["a", "b"], n=2, seed=1), "id").items
    assert [item.prompt.text for item in items] == ["a", "a", "b", "b"]
    assert [item.sampling.seed for item in items] == [1, 2, 1, 2]


@BOTH
def test_best_of_is_n_or_nothing(schema):
    assert parse(schema, n=3, best_of=3).choices == 3
    assert parse(schema, best_of=1).choices == 1
    refused(schema, {**BASE[schema], "best_of": 3}, "best_of", "best_of is 3 and n is 1")
    refused(schema, {**BASE[schema], "n": 2, "best_of": 1}, "best_of")


def test_choices_of_all_prompts_together_have_a_bound():
    refused(CompletionRequest, {"prompt": ["a"] * 100, "n": 21}, "n", "2100 answers", "2048")


@pytest.mark.parametrize(
    ("fields", "reported"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 7}, 7)],
)
def test_logprobs_of_a_chat(fields, reported):
    assert parse(ChatCompletionRequest, **fields).reported == reported


def test_top_logprobs_need_logprobs():
    refused(ChatCompletionRequest, {**BASE[ChatCompletionRequest], "top_logprobs": 1}, "top_logprobs", "not true")


@pytest.mark.parametrize(("value", "reported"), [(None, None), (0, 0), (5, 5), (20, 20)])
def test_logprobs_of_a_completion(value, reported):
    assert parse(CompletionRequest, logprobs=value).reported == reported


@pytest.mark.parametrize(
    ("schema", "values"), [(ChatCompletionRequest, NOT_BOOLS), (CompletionRequest, (*NOT_INTEGERS, -1, 21))]
)
def test_what_is_no_logprobs(schema, values):
    for value in values:
        refused(schema, {**BASE[schema], "logprobs": value}, "logprobs")


# The form of an answer


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@BOTH
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"grammar": "", "regex": "", "json_schema": {}}, None),
        ({"response_format": {"type": "json_object"}}, ("response_format", "json_schema", '{"type":"object"}')),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ("response_format", "json_schema", AS_JSON)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            ("response_format", "json_schema", AS_JSON),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            ("response_format", "json_schema", "{}"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
            ("response_format", "json_schema", "{}"),
        ),
        ({"json_schema": SCHEMA}, ("json_schema", "json_schema", AS_JSON)),
        ({"json_schema": True}, ("json_schema", "json_schema", "true")),
        ({"regex": "a+"}, ("regex", "regex", "a+")),
        ({"grammar": "root ::= 'a'", "regex": None}, ("grammar", "gbnf", "root ::= 'a'")),
    ],
)
def test_forms_of_an_answer(schema, fields, form):
    parsed = parse(schema, **fields).form
    assert (parsed and (parsed[0], parsed[1].kind.value, parsed[1].source)) == form


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"response_format": value}, "response_format") for value in ("text", 0, [], True)),
        *(({"response_format": value}, "response_format.type") for value in ({}, {"type": "xml"}, {"type": None})),
        *(
            ({"response_format": {"type": "json_schema", "json_schema": value}}, "response_format.json_schema")
            for value in (None, "x", [])
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
        *(({"json_schema": value}, "json_schema") for value in ("x", 0, [])),
        *(
            ({name: value}, name)
            for name in ("regex", "grammar")
            for value in (0, True, [], {}, "\ud800", "a" * 300_000)
        ),
        ({"regex": "a", "grammar": "root ::= 'a'"}, "grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_form(schema, fields, param):
    refused(schema, {**BASE[schema], **fields}, param)


def test_a_schema_that_is_nested_too_deeply():
    schema = {}
    for _ in range(5000):
        schema = {"not": schema}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        parse_constraint({"json_schema": schema})


# Fields that can't be honoured


UNSUPPORTED = {
    "lora": ([[]], [[{"id": 0, "scale": 1}]]),
    "n_predict": ([-1], [0, 128]),
    "n_probs": ([0], [5]),
    "return_tokens": ([False], [True, 0]),
    "samplers": ([], [["top_k"], []]),
    "min_keep": ([0], [1]),
    "n_indent": ([0], [4]),
    "t_max_predict_ms": ([0, -1], [100]),
    "repetition_penalty": ([1, 1.0], [1.1]),
    "min_tokens": ([0], [10]),
    "stop_token_ids": ([[]], [[2]]),
    "bad_words": ([[]], [["a"]]),
    "guided_json": ([], [{}, {"type": "object"}]),
    "guided_regex": ([], ["a"]),
    "guided_choice": ([], [["a", "b"]]),
    "guided_grammar": ([], ["root ::= 'a'"]),
    "structured_outputs": ([{}], [{"choice": ["a"]}]),
}
UNSUPPORTED_CHAT = {
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "audio": ([], [{"voice": "a"}, {}]),
    "modalities": ([["text"]], [["text", "audio"], []]),
    "web_search_options": ([], [{}]),
    "reasoning_effort": (["none"], ["low", "high"]),
    "verbosity": (["medium"], ["low", "high"]),
    "moderation": ([], [{"model": "a"}]),
    "chat_template_kwargs": ([{}], [{"enable_thinking": False}]),
}


def unsupported(schema):
    return UNSUPPORTED | (UNSUPPORTED_CHAT if schema is ChatCompletionRequest else {})


@BOTH
def test_the_table_of_unsupported_fields_is_whole(schema):
    assert set(unsupported(schema)) == set(schema.neutral)


@BOTH
def test_neutral_values_ask_for_nothing(schema):
    for name, (neutral, _) in unsupported(schema).items():
        for value in [None, *neutral]:
            assert parse(schema, **{name: value}) == parse(schema)


@BOTH
def test_unsupported_fields_are_refused_and_not_ignored(schema):
    for name, (_, asking) in unsupported(schema).items():
        for value in asking:
            refused(schema, {**BASE[schema], name: value}, name, "not supported")


SMALLEST = {
    **BASE,
    EmbeddingsRequest: {"input": "a"},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    CountTokensRequest: {"messages": [{"role": "user", "content": "a"}]},
    TokenizeRequest: {"content": "a"},
}


@pytest.mark.parametrize("schema", SMALLEST, ids=lambda schema: schema.__name__)
def test_what_is_without_effect_may_hold_anything(schema):
    for name in getattr(schema, "ignored", ()):
        for value in (None, "a", 0, True, [], {"a": [None]}):
            assert schema.parse({**SMALLEST[schema], name: value}) == schema.parse(SMALLEST[schema]), name


@pytest.mark.parametrize("schema", SMALLEST.keys() - {CountTokensRequest}, ids=lambda schema: schema.__name__)
def test_defaults_are_what_fields_that_are_left_out_amount_to(schema):
    """Sending one makes the same request as leaving it out, as far as a request holds the field."""
    assert schema.defaults
    for name, value in schema.defaults.items():
        given = schema.parse({**SMALLEST[schema], name: value})
        left_out = schema.parse(SMALLEST[schema])
        assert getattr(given, name) is not None
        assert getattr(left_out, name) is None
        assert amounts(given) == amounts(left_out), name


def amounts(body):
    """What the server makes of a body."""
    match body:
        case ChatCompletionRequest() | CompletionRequest():
            (item,) = batch_request(body, "id").items
            told = (bool(body.stream), bool(body.timings_per_token), body.choices)
            thoughts = getattr(body, "shows_reasoning", None)
            return replace(item, sampling=replace(item.sampling, seed=0)), told, thoughts
        case MessagesRequest() | ResponsesRequest():
            request = translated_request(body, "id")
            return replace(request, sampling=replace(request.sampling, seed=0)), bool(body.stream)
        case EmbeddingsRequest():
            return body.input, body.dimensions, body.encoding_format == "base64"
        case TokenizeRequest():
            return body.content, bool(body.add_special), body.parse_special is not False, bool(body.with_pieces)


# Tools and reasoning


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        *((value, "tools") for value in (0, 1.5, True, "a", {}, {"type": "function"})),
        *(([value], "tools[0]") for value in (0, "a", None, [])),
        ([{}], "tools[0].type"),
        ([{"type": "custom"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(), tool(name=None)], "tools[1].function.name"),
        ([tool(name="")], "tools[0].function.name"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name='"')], "tools[0].function.name"),
        ([tool(name="f\n")], "tools[0].function.name"),
        ([tool(name="é")], "tools[0].function.name"),
        ([tool(name="x" * 65)], "tools[0].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"type": ["object", "null"]})], "tools[0].function.parameters.type"),
        ([tool(description="\ud800")], "tools"),
        ([tool(description="x" * (256 * 1024))], "tools"),
        ([tool()] * 129, "tools"),
    ],
)
def test_tools_are_functions_with_a_schema(value, param):
    refused(ChatCompletionRequest, {**BASE[ChatCompletionRequest], "tools": value}, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        *((value, "tool_choice") for value in (0, True, "", "any", [], ["auto"], {}, {"type": "allowed_tools"})),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
    ],
)
def test_a_choice_of_tools_is_one_of_four(value, param):
    refused(ChatCompletionRequest, {**BASE[ChatCompletionRequest], "tools": TOOLS, "tool_choice": value}, param)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_no_tool_can_be_required_where_there_is_none(tools, choice):
    refused(
        ChatCompletionRequest, {**BASE[ChatCompletionRequest], "tools": tools, "tool_choice": choice}, "tool_choice"
    )


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({"tools": []}, None),
        ({"tool_choice": "auto"}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS}, (False, None, True)),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, (False, None, False)),
        ({"tools": TOOLS, "tool_choice": "required"}, (True, None, True)),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, (True, "f", True)),
    ],
)
def test_what_is_asked_of_tools(fields, use):
    parsed = parse(ChatCompletionRequest, **fields).prompts[0].tools
    assert use == (parsed and (parsed.required, parsed.named, parsed.parallel))


def test_an_answer_is_a_call_or_has_a_form():
    body = {**BASE[ChatCompletionRequest], "tools": TOOLS, "response_format": {"type": "json_object"}}
    refused(ChatCompletionRequest, body, "response_format", "tools")
    assert parse(ChatCompletionRequest, tools=TOOLS, tool_choice="none", regex="a").form is not None


@pytest.mark.parametrize("value", [0, True, "", "raw", [], {}])
def test_a_reasoning_format_is_a_known_one(value):
    body = {**BASE[ChatCompletionRequest], "reasoning_format": value}
    refused(ChatCompletionRequest, body, "reasoning_format", "'auto', 'deepseek' or 'none'")
    assert parse(ChatCompletionRequest).shows_reasoning
    assert parse(ChatCompletionRequest, reasoning_format="deepseek").shows_reasoning
    assert not parse(ChatCompletionRequest, reasoning_format="none").shows_reasoning


# Prompts


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("a", TextPrompt("a")),
        ("", TextPrompt("")),
        (["a"], TextPrompt("a")),
        ([""], TextPrompt("")),
        ([1, 2], TokenPrompt([1, 2])),
        ([0], TokenPrompt([0])),
        ([[1, 2]], TokenPrompt([1, 2])),
        ([-1], TokenPrompt([-1])),  # the model knows its tokens; here they are integers
        ([2**70], TokenPrompt([2**70])),
    ],
)
def test_a_prompt_in_all_its_forms(value, prompt):
    assert list(parse(CompletionRequest, prompt=value).prompt) == [prompt]


@pytest.mark.parametrize(
    "value",
    [None, 0, 1.5, True, {}, {"a": 1}, [], [[]], [None], [True], [1.0], [NAN], [1, "a"], [[True]], [["a"]], [[["a"]]]],
)
def test_what_is_no_prompt(value):
    refused(CompletionRequest, {"prompt": value}, "prompt", "must be a string or a non-empty list of token ids")


def test_several_prompts_keep_their_order():
    value = ["a", [1, 2], ""]
    assert list(parse(CompletionRequest, prompt=value).prompt) == [TextPrompt("a"), TokenPrompt([1, 2]), TextPrompt("")]


@pytest.mark.parametrize("value", [["a", 1], [[], []], [["a"], "b"], ["a", None]])
def test_a_list_of_prompts_that_holds_something_else(value):
    refused(CompletionRequest, {"prompt": value}, "prompt", "or a list of such prompts")


def test_too_many_prompts_are_counted():
    value = ["a"] * (MAX_PROMPTS + 1)
    refused(CompletionRequest, {"prompt": value}, "prompt", f"holds {len(value)} prompts", f"at most {MAX_PROMPTS}")


# Messages


@pytest.mark.parametrize("value", [None, 0, True, "hi", {}, {"role": "user"}])
def test_messages_are_a_list(value):
    refused(ChatCompletionRequest, {"messages": value}, "messages", "must be a list")


def test_there_is_at_least_one_message():
    refused(ChatCompletionRequest, {"messages": []}, "messages", "1 or more items")


@pytest.mark.parametrize("value", [None, 0, True, "hi", []])
def test_each_message_is_an_object(value):
    refused(ChatCompletionRequest, {"messages": [*MESSAGES, value]}, "messages[1]", "must be an object")


def test_each_message_has_a_role():
    refused(ChatCompletionRequest, {"messages": [{"content": "a"}]}, "messages[0].role", "is required")
    for value in (None, 0, True, [], {}):
        body = {"messages": [{"role": value, "content": "a"}]}
        refused(ChatCompletionRequest, body, "messages[0].role", "must be a string")
    body = {"messages": [{"role": "", "content": "a"}]}
    refused(ChatCompletionRequest, body, "messages[0].role", "1 or more characters")


@pytest.mark.parametrize("value", [0, 1.5, True, NAN, {}, {"type": "text", "text": "a"}, ["a"], [None], [[]]])
def test_content_is_text_or_parts(value):
    body = {"messages": [{"role": "user", "content": value}]}
    refused(ChatCompletionRequest, body, "messages[0].content", "must be a string or a list of parts")


@pytest.mark.parametrize("value", [None, "", "a", [], [{"type": "text", "text": "a"}]])
def test_content_of_every_form_comes_through(value):
    message = {"role": "user", "content": value, "name": "Ann", "extra": {"deep": [1]}}
    parsed = ChatCompletionRequest.parse({"messages": [message]})
    assert parsed.messages[0].model_dump(exclude_unset=True) == message


def test_a_schema_that_is_nested_as_deep_as_a_body_may_be_is_refused():
    deepest = {}
    for _ in range(sys.getrecursionlimit()):
        deepest = {"items": deepest}
    with pytest.raises(InvalidRequestError, match="json_schema: is nested too deeply") as caught:
        parse_constraint({"json_schema": deepest})
    assert caught.value.param == "json_schema"
