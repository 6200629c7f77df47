"""What answers of ``/v1/responses`` hold; see ``schemas.responses``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trioserve.http.schemas.responses import Answer, ErrorObject

ResponseStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """A text as a part of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0, description="Always empty.")
    logprobs: list[Any] = Field(max_length=0, description="Always empty.")


class OutputMessage(Answer):
    """A message of an answer."""

    id: str
    type: Literal["message"]
    status: ResponseStatus
    role: Literal["assistant"]
    content: list[OutputText] = Field(max_length=1)


class OutputCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: ResponseStatus
    call_id: str = Field(description="To be named by the item with the result.")
    name: str = Field(description="Of the tool.")
    arguments: str = Field(description="JSON text of an object; whole unless the answer was cut off.")


class ReasoningText(Answer):
    """What the model thought before it answered."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    """The thoughts of an answer."""

    id: str
    type: Literal["reasoning"]
    status: ResponseStatus
    summary: list[Any] = Field(max_length=0, description="Always empty.")
    content: list[ReasoningText] = Field(max_length=1)


OutputItem = OutputReasoning | OutputMessage | OutputCall


class IncompleteDetails(Answer):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputDetails(Answer):
    """More on the prompt's tokens."""

    cached_tokens: int = Field(ge=0, description="That were there already, and not evaluated again.")
    cache_write_tokens: Literal[0] = Field(description="Always 0.")


class OutputDetails(Answer):
    """More on the answer's tokens."""

    reasoning_tokens: Literal[0] = Field(description="Always 0: thoughts are counted with the rest.")


class ResponseUsage(Answer):
    """Tokens that were used."""

    input_tokens: int = Field(ge=0, description="Of the prompt, what the chat template adds included.")
    input_tokens_details: InputDetails
    output_tokens: int = Field(ge=0, description="Of the answer.")
    output_tokens_details: OutputDetails
    total_tokens: int = Field(ge=0, description="Of both.")


class TextFormat(Answer):
    """How the answer looks."""

    format: dict[str, Any] = Field(description="As it was asked for.")


class FunctionTool(Answer):
    """A function that the answer may call, as it was given."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class FunctionChoice(Answer):
    """The one tool that is to be called."""

    type: Literal["function"]
    name: str


class ResponseObject(Answer):
    """A response, as it stands."""

    id: str = Field(description="Of the response. It is not stored.")
    object: Literal["response"]
    created_at: int = Field(ge=0, description="When the answer began, in Unix seconds.")
    model: str = Field(description="Id of the model that answered.")
    status: ResponseStatus = Field(description="incomplete: a limit ended it.")
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem] = Field(description="The answer, where there is one: thoughts, messages and calls.")
    usage: ResponseUsage | None = Field(description="Null until the end.")
    background: Literal[False]
    error: None
    instructions: str | None = Field(description="As they were given.")
    max_output_tokens: int | None = Field(description="As it was given.")
    metadata: dict[str, str] = Field(description="As they were given.")
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: TextFormat
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[FunctionTool]
    top_p: float
    truncation: Literal["disabled"]


class NumberedEvent(Answer):
    """What all events have in common."""

    sequence_number: int = Field(ge=0, description="Counts the events of a stream.")


class ResponseState(NumberedEvent):
    """The response as it stands: first twice, and last."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]
    response: ResponseObject


class ItemState(NumberedEvent):
    """An item as it stands: before its content and after it."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int = Field(ge=0, description="Of the item.")
    item: OutputItem


class ItemEvent(NumberedEvent):
    """What concerns the content of an item."""

    item_id: str
    output_index: int = Field(ge=0, description="Of the item.")


class PartEvent(ItemEvent):
    """What concerns the text of a message or of thoughts."""

    content_index: Literal[0]


class PartState(PartEvent):
    """The text as it stands: empty, and complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class ResponseTextDelta(PartEvent):
    """More text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any] = Field(max_length=0, description="Always empty.")


class ResponseTextDone(PartEvent):
    """All of the text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any] = Field(max_length=0, description="Always empty.")


class ReasoningDelta(PartEvent):
    """More thoughts."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(PartEvent):
    """All of the thoughts."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(ItemEvent):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(ItemEvent):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str = Field(description="Of the tool.")
    arguments: str = Field(description="JSON text of an object; whole unless the answer was cut off.")


class ResponseFailure(NumberedEvent):
    """The last event of a stream that failed."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None
    error: ErrorObject


ResponseEvent = (
    ResponseState
    | ItemState
    | PartState
    | ResponseTextDelta
    | ResponseTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ResponseFailure
)
