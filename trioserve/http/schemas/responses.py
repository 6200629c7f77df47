"""What answers hold. They validate nothing at run time: tests hold what ``render`` makes to them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
MODEL_STATES = Literal["unloaded", "loading", "ready", "reconfiguring", "unloading"]


class Answer(BaseModel):
    """Base of all answers: just the fields that are named, every one of them that has no default."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


# -- errors


class ErrorObject(Answer):
    """What went wrong."""

    message: str = Field(description="One sentence for a person.")
    type: str = Field(description="The kind of error.")
    param: str | None = Field(description="The field of the request that it is about.")
    code: str = Field(description="The error itself, more exact than its type.")


class Error(Answer):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorObject


# -- generations


class PromptDetails(Answer):
    """More on the prompt's tokens."""

    cached_tokens: int = Field(ge=0, description="That were there already, and not evaluated again.")


class Usage(Answer):
    """Tokens that were used."""

    prompt_tokens: int = Field(ge=0, description="Of the prompt, what the chat template adds included.")
    completion_tokens: int = Field(ge=0, description="Of the answer.")
    total_tokens: int = Field(ge=0, description="Of both.")
    prompt_tokens_details: PromptDetails


class Timings(Answer):
    """Where the time of an answer went. Rates are 0 where there is nothing to measure."""

    cache_n: int = Field(ge=0, description="Tokens of the prompt that were there already.")
    prompt_n: int = Field(ge=0, description="The others, which were evaluated.")
    prompt_ms: float = Field(ge=0, description="From the prompt's beginning to the first token.")
    prompt_per_token_ms: float = Field(ge=0, description="That by token.")
    prompt_per_second: float = Field(ge=0, description="Tokens by that.")
    predicted_n: int = Field(ge=0, description="Tokens of the answer.")
    predicted_ms: float = Field(ge=0, description="From the first token to the end.")
    predicted_per_token_ms: float = Field(ge=0, description="That by token after the first one.")
    predicted_per_second: float = Field(ge=0, description="Tokens after the first one by that.")


class Generated(Answer):
    """What whole answers and chunks have in common."""

    id: str = Field(description="Of the answer; all its chunks have the same.")
    created: int = Field(ge=0, description="When the answer began, in Unix seconds.")
    model: str = Field(description="Id of the model that answered.")
    system_fingerprint: None = Field(description="Always null.")
    timings: Timings | None = Field(
        default=None, description="Absent unless timings_per_token asks for it, and in chunks without a finish_reason."
    )


class Choice(Answer):
    """One answer."""

    index: int = Field(ge=0, description="Counts the answers to each prompt, prompt by prompt.")


class TokenLogprob(Answer):
    """A token and how likely it was."""

    token: str = Field(description="Its text.")
    logprob: float = Field(description="Natural logarithm of its probability.")
    bytes: list[int] = Field(description="Its text in UTF-8; a token may be a part of a character.")


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob] = Field(description="As many as were asked for.")


class ChatLogprobs(Answer):
    """How likely an answer was."""

    content: list[ChosenLogprob] = Field(description="Token by token.")
    refusal: None = Field(description="Always null.")


class CalledFunction(Answer):
    """A function that is called."""

    name: str = Field(description="Of the tool.")
    arguments: str = Field(description="JSON text of an object; whole unless the answer was cut off.")


class ToolCall(Answer):
    """A call of a tool."""

    id: str = Field(description="To be named by the message with the result.")
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="The text of the answer; null beside calls where there is none.")
    refusal: None = Field(description="Always null.")
    reasoning_content: str = Field(default="", description="What the model thought before; absent where there is none.")
    tool_calls: list[ToolCall] = Field(default=[], description="Calls of tools; absent where there are none.")


class ChatChoice(Choice):
    """The answer to a conversation."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = Field(description="Null unless asked for.")
    finish_reason: ChatFinishReason = Field(
        description="stop: the model or a stop string ended it; length: a limit did; tool_calls: it ended with calls."
    )


class ChatCompletion(Generated):
    """A whole answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice] = Field(min_length=1, description="As many as n says.")
    usage: Usage


class FunctionDelta(Answer):
    """More of a call."""

    name: str = Field(default="", description="Of the tool, in the first piece only.")
    arguments: str = Field(description="More of the arguments' JSON text.")


class ToolCallDelta(Answer):
    """More of a call."""

    index: int = Field(ge=0, description="Counts the calls of the answer.")
    id: str = Field(default="", description="Of the call, in its first piece only.")
    type: Literal["function"] = Field(default="function", description="In the first piece only.")
    function: FunctionDelta


class ChatDelta(Answer):
    """More of the assistant's message."""

    role: Literal["assistant"] = Field(default="assistant", description="In the first chunk only.")
    content: str = Field(default="", description="More text. Absent where the chunk tells something else.")
    reasoning_content: str = Field(default="", description="More of what the model thinks before it answers.")
    tool_calls: list[ToolCallDelta] = Field(default=[], description="More of one call.")


class ChatChunkChoice(Choice):
    """More of the answer to a conversation."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = Field(description="Of this piece; null unless asked for.")
    finish_reason: ChatFinishReason | None = Field(description="Null until the last piece.")


class Chunk(Generated):
    """What chunks have in common."""

    usage: Usage | None = Field(
        default=None,
        description="Absent, unless the request asked for it: then null, and in one more chunk without choices the "
        "usage.",
    )


class ChatCompletionChunk(Chunk):
    """One event of a streamed answer to a conversation."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)


class TextLogprobs(Answer):
    """How likely a continuation was, in lists of one item for each token."""

    tokens: list[str] = Field(description="Their texts.")
    token_logprobs: list[float] = Field(description="Natural logarithms of their probabilities.")
    top_logprobs: list[dict[str, float]] = Field(description="The most likely ones in their places.")
    text_offset: list[int] = Field(description="Where they begin in the text, in characters.")


class TextChoice(Choice):
    """The continuation of a text."""

    text: str = Field(description="What follows the prompt.")
    logprobs: TextLogprobs | None = Field(description="Null unless asked for.")
    finish_reason: FinishReason = Field(description="stop: the model or a stop string ended it; length: a limit did.")


class TextCompletion(Generated):
    """The whole continuation of a text."""

    object: Literal["text_completion"]
    choices: list[TextChoice] = Field(min_length=1, description="As many for each prompt as n says, prompt by prompt.")
    usage: Usage


class TextChunkChoice(Choice):
    """More of the continuation of a text."""

    text: str = Field(description="More text.")
    logprobs: TextLogprobs | None = Field(description="Of this piece; null unless asked for.")
    finish_reason: FinishReason | None = Field(description="Null until the last piece.")


class TextCompletionChunk(Chunk):
    """One event of a streamed continuation of a text."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice] = Field(max_length=1)


# -- tasks


class Metadata(Answer):
    """How an answer was made."""

    slot: int = Field(ge=0, description="The slot that worked on it.")
    queue_ms: float = Field(ge=0, description="From the request's arrival until its prompt was begun.")
    prefill_ms: float = Field(ge=0, description="From there to the first token.")
    decode_ms: float = Field(ge=0, description="From there to the end.")
    prompt_tokens: int = Field(ge=0, description="As in the usage.")
    completion_tokens: int = Field(ge=0, description="As in the usage.")


class TaskEnd(Answer):
    """What there is to say of an answer that has ended."""

    finish_reason: FinishReason = Field(description="stop: the model or a stop string ended it; length: a limit did.")
    usage: Usage
    metadata: Metadata


class TaskResult(TaskEnd):
    """One answer of a batch."""

    text: str = Field(description="The whole answer.")
    logprobs: list[ChosenLogprob] = Field(default=[], description="Token by token; absent unless asked for.")


class TaskEnvelope(Answer):
    """Which task it is."""

    id: str = Field(description="Of the task; all its events have the same.")
    created: int = Field(ge=0, description="When it began, in Unix seconds.")
    model: str = Field(description="Id of the model that answered.")


class Task(TaskEnvelope, TaskResult):
    """One answer with its metadata."""

    object: Literal["task"]


class TaskDelta(Answer):
    """More of an answer."""

    type: Literal["task.delta"]
    id: str = Field(description="Of the task.")
    text: str = Field(description="More text.")
    logprobs: list[ChosenLogprob] = Field(default=[], description="Of this piece; absent unless asked for.")


class TaskDone(TaskEnvelope, TaskEnd):
    """The end of an answer."""

    type: Literal["task.done"]


class BatchItem(Answer):
    """The end of one request of a batch, well or not."""

    type: Literal["task.batch.item"]
    id: str = Field(description="Of the batch.")
    index: int = Field(ge=0, description="Of the request.")


class BatchResult(BatchItem):
    """A request of a batch that was answered."""

    result: TaskResult


class BatchFailure(BatchItem):
    """A request of a batch that was not."""

    error: ErrorObject


class BatchDone(TaskEnvelope):
    """The end of a batch."""

    type: Literal["task.batch.done"]
    succeeded: int = Field(ge=0, description="Requests that were answered.")
    failed: int = Field(ge=0, description="Requests that were not.")


TaskEvent = TaskDelta | TaskDone
BatchEvent = BatchResult | BatchFailure | BatchDone


# -- embeddings


class EmbeddedText(Answer):
    """One input as a vector."""

    object: Literal["embedding"]
    index: int = Field(ge=0, description="Of the input.")
    embedding: list[float] | str = Field(
        description="Numbers, or with encoding_format base64 their 32-bit floats, little-endian, in base64."
    )


class EmbeddingUsage(Answer):
    """Tokens that were used."""

    prompt_tokens: int = Field(ge=0, description="Of all inputs.")
    total_tokens: int = Field(ge=0, description="The same.")


class EmbeddingList(Answer):
    """Vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddedText]
    model: str = Field(description="Id of the model that answered.")
    usage: EmbeddingUsage


# -- texts and tokens


class TokenPiece(Answer):
    """One token with its text."""

    id: int = Field(ge=0, description="Of the token.")
    piece: str | list[int] = Field(description="Its text; its bytes where they are no whole characters.")


class Tokenized(Answer):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece] = Field(description="Ids, or with with_pieces ids and texts.")


class DetokenizedText(Answer):
    """The text of tokens."""

    content: str = Field(description="Special tokens included.")


class RenderedPrompt(Answer):
    """The prompt of a conversation."""

    prompt: str = Field(description="What the model's chat template makes of the messages.")


class InputTokens(Answer):
    """How long a prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(ge=0, description="Tokens of the prompt.")


# -- models


class ModelState(Answer):
    """What became of a model."""

    id: str = Field(description="Id of the model.")
    state: MODEL_STATES
    loaded: bool = Field(description="Whether a request is answered without a load.")
    slots: int = Field(ge=1, le=16, description="As configured.")


class Model(ModelState):
    """One model and how it is."""

    object: Literal["model"]
    created: int = Field(ge=0, description="When the server made the model known, in Unix seconds.")
    owned_by: Literal["trioserve"]
    task: Literal["generate", "embed"] = Field(description="What the model is configured for.")
    active_slots: int = Field(ge=0, description="Slots that are leased.")
    queued_requests: int = Field(ge=0, description="Requests that wait for a slot.")
    queued_operations: int = Field(ge=0, description="Loads and unloads that wait for their turn.")
    max_parallel_slots: int | None = Field(
        ge=1, description="The most slots the loaded model could have; null while it is unloaded."
    )
    n_ctx: int | None = Field(ge=1, description="Tokens of context of each slot; null while it is unloaded.")
    stalled_slots: int = Field(ge=0, description="Slots that can't serve: stalled or broken.")


class ModelList(Answer):
    """All models, in the order of their registration."""

    object: Literal["list"]
    data: list[Model]


class Slot(Answer):
    """What one slot is doing."""

    model: str = Field(description="Id of its model.")
    slot: int = Field(ge=0, description="Its number in that model.")
    state: Literal["idle", "busy", "clearing", "stalled", "broken"] = Field(
        description="clearing: its request has ended and its session is not clean yet. stalled: its thread does not "
        "come back. broken: it has no session."
    )
    request_id: str | None = Field(description="Of the request that has it, where there is one.")
    phase: str | None = Field(description="Of that request: loading, prefill, decode, or how it ended.")
    age_ms: float | None = Field(ge=0, description="For how long the slot has been leased; null while idle.")
    prompt_tokens: int | None = Field(ge=0, description="Of that request.")
    completion_tokens: int | None = Field(ge=0, description="Of that request so far.")


class SlotList(Answer):
    """All slots of all models, at one moment."""

    object: Literal["list"]
    data: list[Slot]


# -- management


class Unloaded(Answer):
    """What an unload of everything did."""

    unloaded: list[str] = Field(description="Ids of the models that are unloaded now.")


class SomeUnloaded(Unloaded):
    """What a bulk unload did."""

    not_found: list[str] = Field(description="Ids of no registered model.")


# -- the server


class Health(Answer):
    """How the server is."""

    status: Literal["ok", "loading", "stalled", "draining", "stopped"]
    models: list[str] = Field(
        default=[], description="Where it is stalled: ids of the models of which no slot can serve."
    )


class Document(BaseModel):
    """A description of the routes in the form of OpenAPI 3.1."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    openapi: str = Field(pattern=r"^3\.1\.\d+$", description="Version of the form.")
    info: dict[str, Any] = Field(description="Name and version of the server.")
    paths: dict[str, Any] = Field(description="The routes.")
    components: dict[str, Any] = Field(description="What they share.")
