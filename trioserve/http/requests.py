"""From validated fields to what the service takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.engine.sampling import Dry, Mirostat, Sampling, fold_seed
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.service import BatchRequest, GenerationRequest
from trioserve.service.requests import Prompt

_RANDOM_SEED = -1

Body = ChatCompletionRequest | CompletionRequest
Translated = MessagesRequest | ResponsesRequest


def batch_request(body: Body, request_id: str) -> BatchRequest:
    """All answers that a body asks for: for each prompt as many as it has choices, in this order."""
    return BatchRequest(
        [_item(body, prompt, choice, request_id) for prompt in body.prompts for choice in range(body.choices)],
        all_or_nothing=True,
        choices=body.choices,
        model=body.model,
        busy_timeout_ms=body.busy_timeout_ms,
        request_id=request_id,
    )


def generation_request(body: Body, request_id: str) -> GenerationRequest:
    """The one answer that a body asks for."""
    (prompt,) = body.prompts
    return _item(body, prompt, 0, request_id)


def translated_request(body: Translated, request_id: str) -> GenerationRequest:
    """The answer that a body of another API asks for; for what that can't say the defaults hold."""
    form = body.form
    return GenerationRequest(
        prompt=body.prompt,
        prompt_field=body.prompt_field,
        model=body.model,
        max_tokens=body.limit,
        sampling=Sampling(**_present(body.sampling.items()), seed=fold_seed(None)),
        stops=body.stops,
        constraint=form[1] if form else None,
        constraint_field=form[0] if form else "constraint",
        busy_timeout_ms=body.busy_timeout_ms,
        request_id=request_id,
    )


def count_request(body: CountTokensRequest, request_id: str) -> GenerationRequest:
    """The prompt that a body asks to count."""
    return GenerationRequest(
        prompt=body.prompt, model=body.model, busy_timeout_ms=body.busy_timeout_ms, request_id=request_id
    )


def _item(body: Body, prompt: Prompt, choice: int, request_id: str) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        model=body.model,
        max_tokens=body.limit,
        sampling=_sampling(body, choice),
        stops=body.stops,
        ignore_eos=bool(body.ignore_eos),
        cache_prompt=body.cache_prompt is not False,
        logprobs=body.reported,
        constraint=body.form[1] if body.form else None,
        constraint_field=body.form[0] if body.form else "response_format",
        suffix=body.following,
        echo=body.echoed,
        busy_timeout_ms=body.busy_timeout_ms,
        request_id=request_id,
    )


def _sampling(body: Body, choice: int) -> Sampling:
    """The fields that were given, over the defaults of ``Sampling``. Each choice has random numbers of its own."""
    top_k, last_n = body.top_k, body.repeat_last_n
    given = {
        "temperature": body.temperature,
        "top_k": None if top_k is None else max(top_k, 0),
        "top_p": body.top_p,
        "min_p": body.min_p,
        "typical_p": body.typical_p,
        "top_n_sigma": body.top_n_sigma,
        "xtc_probability": body.xtc_probability,
        "xtc_threshold": body.xtc_threshold,
        "dynatemp_range": body.dynatemp_range,
        "dynatemp_exponent": body.dynatemp_exponent,
        "repeat_penalty": body.repeat_penalty,
        "repeat_last_n": 2**31 - 1 if last_n is not None and last_n < 0 else last_n,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": body.logit_bias,
    }
    mirostat = {"version": body.mirostat, "tau": body.mirostat_tau, "eta": body.mirostat_eta}
    breakers = body.dry_sequence_breakers
    dry = {
        "multiplier": body.dry_multiplier,
        "base": body.dry_base,
        "allowed_length": body.dry_allowed_length,
        "last_n": body.dry_penalty_last_n,
        "breakers": None if breakers is None else tuple(breakers),
    }
    seed = None if body.seed in (None, _RANDOM_SEED) else body.seed + choice
    return Sampling(
        **_present(given.items()),
        mirostat=Mirostat(**_present(mirostat.items())),
        dry=Dry(**_present(dry.items())),
        seed=fold_seed(seed),
    )


def _present(fields: Iterable[tuple[str, object]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}
