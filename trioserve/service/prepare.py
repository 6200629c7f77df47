"""From a request to token ids that fit, before a slot is taken."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import trio

from trioserve.chat import ChatTemplate, Expected, default_template, normalise_messages, render_chat
from trioserve.config import ModelConfig
from trioserve.engine.base import (
    Constraint,
    EmbeddingInput,
    SequenceRequest,
    Task,
    Weights,
    Work,
)
from trioserve.engine.sampling import Sampling
from trioserve.errors import ContextLengthError, InvalidRequestError, TrioserveError, WrongTaskError
from trioserve.runtime.pool import Pool
from trioserve.service.events import Failure
from trioserve.service.forms import constraint_of
from trioserve.service.requests import (
    BatchRequest,
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
    prompts_of,
)

_INLINE_CHARACTERS = 4096  # shorter prompts are prepared faster than a thread is woken
_PREPARATIONS = 4
_COMPILATIONS = 2  # of grammars: some take many seconds, and prompts without one shall not wait behind them
_FORMS_CHARACTERS = 64 * 1024
_TOKENISED_CHARACTERS = 256 * 1024  # a longer text is only tokenised where it could fit: that takes a second a megabyte


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the engine takes it.

    Attributes:
        pool: whose tokenizer and limits it was made with.
        sequences: what can be honoured, by its place in the request.
        refused: the others.
        echoes: texts of the prompts that are to be told before their answers, by place.
        expected: how to read the answers to conversations, by their place in the request.
    """

    pool: Pool
    sequences: Mapping[int, Work]
    refused: Sequence[Failure]
    echoes: Mapping[int, str] = field(default_factory=dict)
    expected: Mapping[int, Expected] = field(default_factory=dict)

    @property
    def reused_prompt(self) -> Sequence[int]:
        """The prompt that a slot may have kept a part of; a batch and what is to be embedded have none."""
        (sequence, *others) = self.sequences.values()
        reuses = isinstance(sequence, SequenceRequest) and sequence.reuse and not others
        return sequence.prompt if reuses else ()


class Preparer:
    """Prepares requests, long ones in worker threads of their own so that decodes can't keep them waiting."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_PREPARATIONS)
        self._grammar_limiter = trio.CapacityLimiter(_COMPILATIONS)
        self._compiled_for: weakref.WeakSet[Pool] = weakref.WeakSet()

    async def prepare(self, pool: Pool, request: Request) -> Prepared:
        """Render, tokenise and check the prompts of a request.

        Raises:
            WrongTaskError: the model is for something else.
            InvalidRequestError: one can't be honoured, and the request is for all or nothing.
        """
        check_task(pool.config, request.task)
        has_chat = any(isinstance(prompt, ChatPrompt) for prompt in prompts_of(request))
        # Compiling a large template takes too long for the event loop.
        if _is_short(request) and (not has_chat or pool in self._compiled_for):
            return _prepare(pool, request, lambda: None)
        limiter = self._grammar_limiter if _has_constraint(request) else self._limiter
        with pool.reading():
            # A client that leaves is noticed between two prompts.
            check_cancelled = trio.from_thread.check_cancelled
            prepared = await trio.to_thread.run_sync(_prepare, pool, request, check_cancelled, limiter=limiter)
        if has_chat:
            self._compiled_for.add(pool)
        return prepared

    async def count(self, pool: Pool, request: GenerationRequest) -> int:
        """Count the tokens of a prompt, whether or not it fits.

        Raises:
            InvalidRequestError: it can't be turned into tokens, or is far too long to be.
        """
        with pool.reading():
            return await trio.to_thread.run_sync(_count, pool, request, limiter=self._limiter)


def check_task(config: ModelConfig, task: Task) -> None:
    """See that a model is for what a request asks for.

    Raises:
        WrongTaskError: it isn't.
    """
    if config.task != task:
        raise WrongTaskError(
            f"the model {config.id!r} has task = {config.task!r}, but this is a request to {task}",
            param="model",
        )


def _prepare(pool: Pool, request: Request, check_cancelled: Callable[[], None]) -> Prepared:
    """See ``Preparer.prepare``."""
    if isinstance(request, EmbeddingRequest):
        return _prepare_inputs(pool, request, check_cancelled)
    return _prepare_all(pool, request, check_cancelled)


def _prepare_all(pool: Pool, request: BatchRequest, check_cancelled: Callable[[], None]) -> Prepared:
    """See ``Preparer.prepare``."""
    sequences: dict[int, SequenceRequest] = {}
    echoes: dict[int, str] = {}
    expected: dict[int, Expected] = {}
    refused: list[Failure] = []
    forms = _Forms()
    before: GenerationRequest | None = None
    reading: Expected | None = None
    echo = ""
    for index, item in enumerate(request.items):
        check_cancelled()
        try:
            if isinstance(item, TrioserveError):
                raise item
            forms.add(item)
            if before is not None and item.prompt is before.prompt:  # another choice of the same prompt
                sequences[index] = replace(sequences[index - 1], sampling=item.sampling)
            else:
                sequences[index], reading = prepare(pool, item)
                echo = _text(pool, item.prompt) if item.echo else ""
                before = item
            expected |= {} if reading is None else {index: reading}
            echoes |= {index: echo} if echo else {}
        except TrioserveError as error:
            before = None
            if request.all_or_nothing:
                raise _placed(error, index // request.choices, len(request.items) // request.choices) from None
            refused.append(Failure(error, index))
    if len(sequences) > 1:
        sequences = {index: replace(sequence, reuse=False) for index, sequence in sequences.items()}
    return Prepared(pool, sequences, refused, echoes, expected)


class _Forms:
    """Bounds what the forms of a batch take together; each of them is compiled once."""

    def __init__(self) -> None:
        self._seen: set[Constraint] = set()
        self._characters = 0

    def add(self, item: GenerationRequest) -> None:
        if item.constraint is None or item.constraint in self._seen:
            return
        self._seen.add(item.constraint)
        self._characters += len(item.constraint.source)
        if self._characters > _FORMS_CHARACTERS:
            raise InvalidRequestError(
                f"{item.constraint_field}: the forms of a batch may have {_FORMS_CHARACTERS} characters together",
                param=item.constraint_field,
            )


def _placed(error: TrioserveError, index: int, prompts: int) -> TrioserveError:
    """Say which of several prompts an error is about, where it is about a prompt."""
    if prompts == 1 or error.param != "prompt":
        return error
    return type(error)(f"prompt[{index}]: {error.message}", param=error.param)


def _prepare_inputs(pool: Pool, request: EmbeddingRequest, check_cancelled: Callable[[], None]) -> Prepared:
    """Tokenise and check the inputs of a request for vectors; one that can't be honoured refuses it."""
    limit = pool.weights.n_embd
    if request.dimensions is not None and request.dimensions > limit:
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}, but this model's vectors have {limit}", param="dimensions"
        )
    names = ["input"] if len(request.inputs) == 1 else [f"input[{index}]" for index in range(len(request.inputs))]
    tokens = []
    for prompt, name in zip(request.inputs, names, strict=True):
        check_cancelled()
        tokens.append(_input_tokens(pool, prompt, name))
    return Prepared(pool, {index: EmbeddingInput(each, request.dimensions) for index, each in enumerate(tokens)}, ())


def _input_tokens(pool: Pool, prompt: TextPrompt | TokenPrompt, name: str) -> list[int]:
    _check_input(_least_tokens(pool, prompt), pool, name, at_least=isinstance(prompt, TextPrompt))
    if isinstance(prompt, TokenPrompt):
        return checked_tokens(prompt, pool.weights.vocab_size, name)
    tokens = pool.weights.tokenize(prompt.text, special=True, add_bos=True)
    _check_input(len(tokens), pool, name)
    if not tokens:
        raise InvalidRequestError(f"{name} has no tokens", param="input")
    return tokens


def _check_input(tokens: int, pool: Pool, name: str, *, at_least: bool = False) -> None:
    if tokens > pool.n_ctx:
        count = f"at least {tokens}" if at_least else str(tokens)
        raise ContextLengthError(
            f"{name} has {count} tokens, but a slot's context holds {pool.n_ctx} (n_ctx)", param="input"
        )


def prepare(pool: Pool, request: GenerationRequest) -> tuple[SequenceRequest, Expected | None]:
    """Render, tokenise and check a prompt. Reads the pool's weights only.

    Returns:
        What the engine takes, and how to read the answer to a conversation.

    Raises:
        ContextLengthError: it does not fit.
        ChatTemplateError: the model's template refused it.
        InvalidRequestError: it is empty or has impossible tokens.
    """
    least = _least_tokens(pool, request.prompt)
    if request.suffix:
        least += _least_tokens(pool, TextPrompt(request.suffix))
    _check_length(least, pool, request, at_least=True)
    prompt, expected = (_with_suffix(pool, request), None) if request.suffix else _tokens(pool, request)
    _check_length(len(prompt), pool, request)
    _check_biases(request.sampling, pool.weights.vocab_size)
    constraint = constraint_of(request, expected, pool.weights, lambda: _template(pool).source)
    may_reuse = request.cache_prompt and pool.config.cache_prompt
    sequence = SequenceRequest(
        prompt=prompt,
        max_tokens=request.max_tokens or pool.n_ctx,
        sampling=request.sampling,
        stops=request.stops,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        constraint=constraint,
        reuse=may_reuse,
        share=may_reuse,
    )
    return sequence, expected


def _count(pool: Pool, request: GenerationRequest) -> int:
    """See ``Preparer.count``. A text that takes long to tokenise has to fit: counts are for prompts that are meant."""
    if _size(request.prompt) > _TOKENISED_CHARACTERS:
        _check_length(_least_tokens(pool, request.prompt), pool, request, at_least=True)
    return len(_tokens(pool, request)[0])


def _least_tokens(pool: Pool, prompt: Prompt) -> int:
    """How many tokens a prompt has at the least, told without a tokenizer: those of megabytes take it minutes."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else ()
    # Without those of tools, which have a bound of their own.
    characters = sum(len(str(message.get("content"))) + _argument_characters(message) for message in messages)
    if isinstance(prompt, TextPrompt):
        characters = len(prompt.text)
    if characters <= _TOKENISED_CHARACTERS:
        return len(messages)
    return max(len(messages), characters // pool.weights.longest_piece)


def _argument_characters(message: Mapping[str, object]) -> int:
    """How long the arguments of earlier calls are, where they are texts as they should be."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    arguments = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return sum(len(text) for text in arguments if isinstance(text, str))


def _check_length(tokens: int, pool: Pool, request: GenerationRequest, *, at_least: bool = False) -> None:
    if tokens >= pool.n_ctx:
        count = f"at least {tokens}" if at_least and not isinstance(request.prompt, TokenPrompt) else str(tokens)
        raise ContextLengthError(
            f"the prompt has {count} tokens, but a slot's context holds {pool.n_ctx} (n_ctx) and one of them is "
            "needed for the answer",
            param=_field(request),
        )


def _tokens(pool: Pool, request: GenerationRequest) -> tuple[list[int], Expected | None]:
    weights, prompt, expected = pool.weights, request.prompt, None
    if isinstance(prompt, TokenPrompt):
        tokens = checked_tokens(prompt, weights.vocab_size, "prompt")
    elif isinstance(prompt, ChatPrompt):
        text, expected = conversation(pool, prompt)
        tokens = tokenize_conversation(pool, text)
    else:
        tokens = weights.tokenize(prompt.text, special=True, add_bos=True)
    return tokens or _empty_prompt(weights, request), expected


def _with_suffix(pool: Pool, request: GenerationRequest) -> list[int]:
    """The prompt for an answer that stands between two texts. What looks like a special token in them is none."""
    weights, prompt = pool.weights, request.prompt
    if weights.gap is None:
        raise InvalidRequestError(
            "suffix: this model has no tokens for filling a gap, so no text can follow its answer", param="suffix"
        )
    if isinstance(prompt, TokenPrompt):
        before = checked_tokens(prompt, weights.vocab_size, "prompt")
    else:
        assert isinstance(prompt, TextPrompt), "conversations have no suffix"
        before = weights.tokenize(prompt.text, special=False, add_bos=False)
    after = weights.tokenize(request.suffix, special=False, add_bos=False)
    first = [token for token in weights.tokenize("", special=False, add_bos=True) if token == weights.bos][:1]
    return [*first, weights.gap.prefix, *before, weights.gap.suffix, *after, weights.gap.middle]


def _text(pool: Pool, prompt: Prompt) -> str:
    """A prompt that could be prepared, as text."""
    if isinstance(prompt, TokenPrompt):
        return text_of(pool.weights, prompt.tokens)
    return prompt.text if isinstance(prompt, TextPrompt) else ""


def text_of(weights: Weights, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included. What is no UTF-8 is replaced."""
    pieces = {token: weights.piece(token) for token in set(tokens)}
    return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")


def conversation(pool: Pool, prompt: ChatPrompt) -> tuple[str, Expected]:
    """The text that the model's chat template makes of a conversation, and how to read the answer to it.

    Raises:
        ChatTemplateError: it refused the messages.
    """
    return render_chat(_template(pool), normalise_messages(prompt.messages), prompt.tools)


def tokenize_conversation(pool: Pool, text: str) -> list[int]:
    """The tokens of the text of a conversation."""
    # Templates often begin with the beginning-of-sequence token themselves; the model shall see it once.
    bos_text = pool.weights.bos_text
    return pool.weights.tokenize(text, special=True, add_bos=not (bos_text and text.startswith(bos_text)))


def _empty_prompt(weights: Weights, request: GenerationRequest) -> list[int]:
    """An empty prompt is the start of a text, where the model has a token for that."""
    if weights.bos is None:
        raise InvalidRequestError(
            "the prompt is empty, and this model has no beginning-of-sequence token to start from",
            param=_field(request),
        )
    return [weights.bos]


def checked_tokens(prompt: TokenPrompt, vocab_size: int, name: str) -> list[int]:
    """The tokens of a prompt that the model has; ``name`` is the field that they come from.

    Raises:
        InvalidRequestError: one of them it has not.
    """
    for index, token in enumerate(prompt.tokens):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{name}[{index}] is {token}, but this model's tokens go from 0 to {vocab_size - 1}",
                param=name.partition("[")[0],
            )
    return list(prompt.tokens)


def _check_biases(sampling: Sampling, vocab_size: int) -> None:
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias: token {token} is none of this model's, which go from 0 to {vocab_size - 1}",
                param="logit_bias",
            )


def _template(pool: Pool) -> ChatTemplate:
    weights = pool.weights
    source = pool.config.chat_template or weights.chat_template
    return _compiled(default_template(source), weights.bos_text, weights.eos_text)


@functools.lru_cache(maxsize=64)
def _compiled(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


def _field(request: GenerationRequest) -> str:
    return request.prompt_field or ("messages" if isinstance(request.prompt, ChatPrompt) else "prompt")


def _is_short(request: Request) -> bool:
    # To compile a grammar may take a second.
    suffixes = sum(len(item.suffix) for item in _items(request))
    return not _has_constraint(request) and sum(map(_size, prompts_of(request))) + suffixes < _INLINE_CHARACTERS


def _has_constraint(request: Request) -> bool:
    return any(item.constraint is not None or _has_tools(item.prompt) for item in _items(request))


def _items(request: Request) -> Sequence[GenerationRequest]:
    """What of a request is to be answered and could be read."""
    items = request.items if isinstance(request, BatchRequest) else ()
    return [item for item in items if isinstance(item, GenerationRequest)]


def _has_tools(prompt: Prompt) -> bool:
    return isinstance(prompt, ChatPrompt) and prompt.tools is not None


def _size(prompt: Prompt) -> int:
    """How much work a prompt is, roughly, in characters."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    if isinstance(prompt, ChatPrompt):
        # With all that a template may show, such as earlier calls. Tools always go to a thread; see _has_constraint.
        return sum(len(str(message)) for message in prompt.messages)
    return len(prompt.text)
