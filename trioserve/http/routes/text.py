"""Texts, tokens and prompts: what a model's tokenizer and chat template make of each other."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ChatTemplateError, ContextLengthError, WrongTaskError
from trioserve.http import render, text
from trioserve.http.body import read_as
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.responses import DetokenizedText, InputTokens, RenderedPrompt, Tokenized
from trioserve.http.schemas.text import DetokenizeRequest, ReadingFields, TokenizeRequest
from trioserve.service import Count, Detokenization, ReadingRequest, Rendering, Service, Tokenization

_ERRORS = tuple(error for error in GENERATES if error is not ContextLengthError)


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/tokenize")
    @Operation("The tokens of a text", body=TokenizeRequest, answers={200: Tokenized}, errors=_ERRORS)
    async def tokenize() -> Response:
        body, exchange = await read_as(request, TokenizeRequest.parse), Exchange.of(request.scope)
        question = Tokenization(body.content, bool(body.add_special), body.parse_special is not False)
        pieces = await service.read(question, _asking(body, exchange), exchange.resources)
        return await text.answer_tokens(pieces, with_pieces=bool(body.with_pieces))

    @app.post("/detokenize")
    @Operation("The text of tokens", body=DetokenizeRequest, answers={200: DetokenizedText}, errors=_ERRORS)
    async def detokenize() -> Response:
        body, exchange = await read_as(request, DetokenizeRequest.parse), Exchange.of(request.scope)
        content = await service.read(Detokenization(body.tokens), _asking(body, exchange), exchange.resources)
        return render.response({"content": content})

    @app.post("/apply-template")
    @Operation(
        "The prompt of a conversation",
        body=ChatCompletionRequest,
        answers={200: RenderedPrompt},
        errors=(WrongTaskError, ChatTemplateError, *_ERRORS),
    )
    async def apply_template() -> Response:
        body, exchange = await read_as(request, ChatCompletionRequest.parse), Exchange.of(request.scope)
        question = Rendering(body.prompts[0])
        prompt = await service.read(question, _asking(body, exchange), exchange.resources)
        return render.response({"prompt": prompt})

    @app.post("/v1/chat/completions/input_tokens")
    @Operation(
        "How many tokens the prompt of a conversation has",
        body=ChatCompletionRequest,
        answers={200: InputTokens},
        errors=(WrongTaskError, ChatTemplateError, *_ERRORS),
    )
    async def input_tokens() -> Response:
        body, exchange = await read_as(request, ChatCompletionRequest.parse), Exchange.of(request.scope)
        question = Count(body.prompts[0])
        count = await service.read(question, _asking(body, exchange), exchange.resources)
        return render.response({"object": "response.input_tokens", "input_tokens": count})


def _asking(body: ReadingFields | ChatCompletionRequest, exchange: Exchange) -> ReadingRequest:
    return ReadingRequest(body.model, body.busy_timeout_ms, exchange.request_id)
