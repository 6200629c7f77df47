"""Validation that answers in OpenAI's error shape, naming the field and the limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails

from trioserve.engine.base import Constraint
from trioserve.engine.sampling import Dry, Mirostat, Sampling
from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.constraints import JSON_SCHEMA, NAMES, RESPONSE_FORMAT, SOURCE, parse_constraint

INT64 = 2**63
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIASES = 4096
MAX_STOPS = 16
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""Token ids as a JSON Schema."""
MAX_STOP_CHARACTERS = 4096


def encodable(text: str) -> str:
    """Refuse lone surrogates, which JSON can spell and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


def is_tokens(value: object) -> bool:
    """Whether this is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _listed(value: object) -> object:
    """Take one string for a list of one."""
    if value is not None and not isinstance(value, (str, list)):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _biases(value: object) -> object:
    """Take OpenAI's object and llama-server's list of pairs for the same thing."""
    if value is None:
        return None
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise ValueError("must be an object of token ids and numbers, or a list of such pairs")
    if len(pairs) > MAX_BIASES:
        raise ValueError(f"has {len(pairs)} tokens, at most {MAX_BIASES} are allowed")
    return tuple(_bias(pair) for pair in pairs)


def _bias(pair: object) -> tuple[int, float]:
    match pair:
        case (str() as text, bias) if text.isascii() and text.isdigit() and len(text) < 10 and isinstance(pair, tuple):
            token = int(text)  # a key of an object
        case (bool(), _):
            raise ValueError("token ids must be integers")
        case [int() as token, bias] if 0 <= token < 2**31:
            pass
        case _:
            raise ValueError("must hold token ids, 0 or more, each with a number")
    if bias is False:
        return token, -math.inf
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
        raise ValueError(f"the bias of token {token} must be a number from -100 to 100, or false")
    return token, float(bias)


Text = Annotated[str, AfterValidator(encodable)]
Breaker = Annotated[Text, Field(min_length=1, max_length=64)]
Bias = tuple[int, Annotated[float, Field(allow_inf_nan=True)]]

_BIAS_VALUE = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_BIAS_PAIR = {
    "type": "array",
    "prefixItems": [{"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}, _BIAS_VALUE],
    "minItems": 2,
    "maxItems": 2,
}
_BIASES = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": _BIAS_VALUE,
            "maxProperties": MAX_BIASES,
        },
        {"type": "array", "items": _BIAS_PAIR, "maxItems": MAX_BIASES},
        {"type": "null"},
    ]
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]}


_SAMPLING, _DRY, _MIROSTAT = Sampling(), Dry(), Mirostat()
_DEFAULTS: Mapping[str, object] = {
    "stream": False,
    "temperature": _SAMPLING.temperature,
    "top_p": _SAMPLING.top_p,
    "top_k": _SAMPLING.top_k,
    "min_p": _SAMPLING.min_p,
    "repeat_penalty": _SAMPLING.repeat_penalty,
    "repeat_last_n": _SAMPLING.repeat_last_n,
    "typical_p": _SAMPLING.typical_p,
    "top_n_sigma": _SAMPLING.top_n_sigma,
    "xtc_probability": _SAMPLING.xtc_probability,
    "xtc_threshold": _SAMPLING.xtc_threshold,
    "dynatemp_range": _SAMPLING.dynatemp_range,
    "dynatemp_exponent": _SAMPLING.dynatemp_exponent,
    "mirostat": _MIROSTAT.version,
    "mirostat_tau": _MIROSTAT.tau,
    "mirostat_eta": _MIROSTAT.eta,
    "dry_multiplier": _DRY.multiplier,
    "dry_base": _DRY.base,
    "dry_allowed_length": _DRY.allowed_length,
    "dry_penalty_last_n": _DRY.last_n,
    "dry_sequence_breakers": list(_DRY.breakers),
    "n": 1,
    "frequency_penalty": _SAMPLING.frequency_penalty,
    "presence_penalty": _SAMPLING.presence_penalty,
    "ignore_eos": False,
    "timings_per_token": False,
    "cache_prompt": True,
}


def usual(*names: str) -> dict[str, object]:
    """Defaults that several bodies share."""
    return {name: _DEFAULTS[name] for name in names}


class Schema(BaseModel):
    """Base of all request bodies: strict types, finite numbers, null as absent, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    # What a field that is left out amounts to, where it amounts to a value.
    defaults: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object.

        Raises:
            InvalidRequestError: the first field that is wrong.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _first_problem(error) from None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe also what holds where fields are left out."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, value in cls.defaults.items():
            schema["properties"][name]["default"] = value
        return schema


class StreamOptions(Schema):
    """How a stream is told."""

    defaults: ClassVar[Mapping[str, object]] = {"include_usage": False}

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before the end.")


class HonestSchema(Schema):
    """Base of bodies with fields that can't be honoured."""

    # Fields of the API that this server can't honour, with the values that ask for nothing. Anything else in them is
    # refused, since the answer would silently be another one than was asked for.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    # Fields of the API that change no answer of this server, whatever they hold, each with the reason.
    ignored: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also refuse what this server can't honour."""
        parsed = super().parse(body)
        for name, values in cls.neutral.items():
            value = body.get(name)
            if value is not None and not any(_same(value, neutral) for neutral in values):
                raise InvalidRequestError(f"{name} is not supported with this value; leave it out", param=name)
        return parsed

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe also the fields that are only taken where they ask for nothing, and those without effect."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        for name, values in cls.neutral.items():
            described = {"enum": _distinct(*values, None), "description": "Only taken where it asks for nothing."}
            schema["properties"][name] = described
        for name, reason in cls.ignored.items():
            schema["properties"][name] = {"description": f"Without effect: {reason}."}
        return schema


class GenerationFields(HonestSchema):
    """Fields that chat and text completions share."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "lora": ([],),
        # Of llama-server and vLLM, whose clients come here too.
        "n_predict": (-1,),
        "n_probs": (0,),
        "return_tokens": (False,),
        "samplers": (),
        "min_keep": (0,),
        "n_indent": (0,),
        "t_max_predict_ms": (0, -1),
        "repetition_penalty": (1,),
        "min_tokens": (0,),
        "stop_token_ids": ([],),
        "bad_words": ([],),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": ({},),
    }
    ignored: ClassVar[Mapping[str, str]] = {"user": "nobody is told apart by it"}
    defaults: ClassVar[Mapping[str, object]] = _DEFAULTS

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = Field(None, description="How a stream is told.")
    max_tokens: int | None = Field(None, ge=1, lt=INT64, description="Most tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="Randomness; 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus: the share of probability that is kept.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Most likely tokens that are kept; 0 or -1 is all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop what is less likely than this share of the top.")
    repeat_penalty: float | None = Field(None, gt=0, le=10, description="Divisor for tokens used lately; 1 is off.")
    repeat_last_n: int | None = Field(None, ge=-1, lt=2**31, description="How far back that looks; -1 is everything.")
    typical_p: float | None = Field(None, ge=0, le=1, description="Locally typical sampling; 1 is off.")
    top_n_sigma: float | None = Field(
        None,
        ge=-1,
        le=1000,
        description="Keep logits this many standard deviations below the top; 0 or -1 is all.",
    )
    xtc_probability: float | None = Field(None, ge=0, le=1, description="How often top choices are excluded; 0 is off.")
    xtc_threshold: float | None = Field(None, ge=0, le=1, description="Probability that makes a token a top choice.")
    dynatemp_range: float | None = Field(None, ge=0, le=2, description="How far the temperature follows the entropy.")
    dynatemp_exponent: float | None = Field(None, ge=0, le=10, description="How the temperature follows the entropy.")
    mirostat: int | None = Field(None, ge=0, le=2, description="Version of Mirostat sampling; 0 is off.")
    mirostat_tau: float | None = Field(None, ge=0, le=100, description="Surprise that Mirostat aims at, in bits.")
    mirostat_eta: float | None = Field(None, ge=0, le=1, description="How fast Mirostat corrects itself.")
    dry_multiplier: float | None = Field(None, ge=0, le=100, description="Strength of the DRY penalty; 0 is off.")
    dry_base: float | None = Field(None, ge=1, le=10, description="How fast the DRY penalty grows with a repetition.")
    dry_allowed_length: int | None = Field(None, ge=0, lt=2**31, description="Tokens of a repetition that are free.")
    dry_penalty_last_n: int | None = Field(None, ge=-1, lt=2**31, description="How far back DRY looks; -1 is all.")
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=64)] | None = Field(
        None, description="Strings at which a repetition ends."
    )
    logit_bias: Annotated[tuple[Bias, ...] | None, BeforeValidator(_biases), WithJsonSchema(_BIASES)] = Field(
        None,
        description="What is added to the logits of tokens, -100 to 100, by token id; false never takes the token.",
        json_schema_extra={"examples": [{"50256": -100}]},
    )
    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT)] = Field(
        None, description="The form of the answer: text, json_object or json_schema."
    )
    json_schema: Annotated[Any, WithJsonSchema(JSON_SCHEMA)] = Field(
        None, description="A JSON Schema that the answer follows; llama-server's own form."
    )
    regex: Annotated[Any, WithJsonSchema(SOURCE)] = Field(
        None, description="A regular expression that the whole answer matches."
    )
    grammar: Annotated[Any, WithJsonSchema(SOURCE)] = Field(
        None, description="A grammar in GBNF, with a rule named root, that the answer follows."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="How many answers to give.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Accepted where it is the same as n.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Penalty per earlier use in the answer.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Penalty for any earlier use in the answer.")
    seed: int | None = Field(None, ge=-INT64, lt=INT64, description="Of the random numbers; -1 or none is a fresh one.")
    stop: Annotated[list[Text] | None, BeforeValidator(_listed), WithJsonSchema(_STOPS)] = Field(
        None, description="One or several strings that end the answer and don't appear in it."
    )
    ignore_eos: bool | None = Field(None, description="Never end the answer at the model's own wish.")
    timings_per_token: bool | None = Field(None, description="Tell at the end of each answer where its time went.")
    cache_prompt: bool | None = Field(
        None, description="Reuse what the slot has kept of earlier prompts; false evaluates all of this one."
    )
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for a slot, in milliseconds; may only shorten the server's."
    )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also refuse what this server can't honour."""
        parsed = super().parse(body)
        parsed._check_stops()
        parsed.form  # noqa: B018 - read here, so that what is wrong with it is told here
        if parsed.best_of not in (None, parsed.choices):
            raise InvalidRequestError(
                f"best_of is {parsed.best_of} and n is {parsed.choices}: all answers that are made are returned",
                param="best_of",
            )
        return parsed

    @cached_property
    def form(self) -> tuple[str, Constraint] | None:
        """The field that gives the answer a form, and what it says."""
        given = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return parse_constraint(given)

    @property
    def choices(self) -> int:
        """How many answers to give."""
        return self.n or 1

    @property
    def following(self) -> str:
        """The text that follows the answer."""
        return ""

    @property
    def echoed(self) -> bool:
        """Whether the prompt is told before the answer."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop or ())

    def _check_stops(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise InvalidRequestError(
                f"stop has {len(self.stops)} strings, at most {MAX_STOPS} are allowed", param="stop"
            )
        for stop in self.stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"each stop string needs 1 to {MAX_STOP_CHARACTERS} characters, one has {len(stop)}", param="stop"
                )


def _distinct(*values: object) -> list[object]:
    """Without those that JSON Schema takes for the same, such as 1 and 1.0."""
    return [value for index, value in enumerate(values) if not any(_same(value, other) for other in values[:index])]


def _same(value: object, neutral: object) -> bool:
    """Equality that doesn't take true for 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _first_problem(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    param, text = _path(first["loc"]), _plain(first)
    return InvalidRequestError(f"{param}: {text}", param=param)


def _path(location: tuple[Any, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _plain(item: ErrorDetails) -> str:
    """One problem in plain words, with the limit where there is one."""
    kind, context = item["type"], {name: _as_given(value) for name, value in item.get("ctx", {}).items()}
    if kind == "value_error":
        return str(context["error"])
    words = _WORDS.get(kind)
    if words is None:
        return item["msg"]
    return words.format(**context)


def _as_given(limit: object) -> object:
    """A limit as the schema spells it: pydantic hands the bounds of numbers back as floats."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


_WORDS = {
    "missing": "is required",
    "literal_error": "must be {expected}",
    "int_type": "must be an integer",
    "int_parsing_size": "is out of range",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be {le} or less",
    "less_than": "must be less than {lt}",
    "string_unicode": "must not contain lone surrogates",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have {max_length} items or fewer",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} characters or fewer",
}
