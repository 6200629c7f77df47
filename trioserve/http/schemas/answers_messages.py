"""What answers of ``/v1/messages`` hold; see ``schemas.responses``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trioserve.http.schemas.responses import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesErrorObject(Answer):
    """What went wrong."""

    type: str = Field(description="The kind of error.")
    message: str = Field(description="One sentence for a person.")


class MessagesError(Answer):
    """The body of every error of these routes, and the last event of a stream that failed."""

    type: Literal["error"]
    error: MessagesErrorObject


class TextBlock(Answer):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""] = Field(description="Always empty.")


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str = Field(description="To be named by the block with the result.")
    name: str = Field(description="Of the tool.")
    input: dict[str, Any] = Field(description="The arguments; empty where they were cut off, and where a block begins.")


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Answer):
    """Tokens that were used."""

    input_tokens: int = Field(ge=0, description="Of the prompt, without those that were there already.")
    cache_creation_input_tokens: Literal[0] = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(ge=0, description="Of the prompt, those that were there already.")
    output_tokens: int = Field(ge=0, description="Of the answer.")


class MessageBase(Answer):
    """Which message it is."""

    id: str = Field(description="Of the answer.")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str = Field(description="Id of the model that answered.")
    usage: MessageUsage


class MessageEnd(Answer):
    """Why an answer ended."""

    stop_reason: StopReason = Field(
        description="end_turn: the model ended it; tool_use: it did, with calls; max_tokens: a limit did."
    )
    stop_sequence: str | None = Field(description="The stop string that ended it, where one did.")


class MessageObject(MessageBase, MessageEnd):
    """A whole answer."""

    content: list[MessageBlock] = Field(min_length=1)


class BegunMessage(MessageBase):
    """An answer before there is any of it."""

    content: list[MessageBlock] = Field(max_length=0)
    stop_reason: None
    stop_sequence: None


class MessageStart(Answer):
    """The first event."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockEvent(Answer):
    """What concerns one block."""

    index: int = Field(ge=0, description="Of the block.")


class BlockStart(BlockEvent):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    content_block: MessageBlock


class TextPiece(Answer):
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingPiece(Answer):
    """More thoughts."""

    type: Literal["thinking_delta"]
    thinking: str


class InputPiece(Answer):
    """More of the arguments of a call."""

    type: Literal["input_json_delta"]
    partial_json: str = Field(description="All of a block together are the JSON text of an object.")


class BlockDelta(BlockEvent):
    """A block goes on."""

    type: Literal["content_block_delta"]
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(BlockEvent):
    """A block is complete."""

    type: Literal["content_block_stop"]


class MessageDelta(Answer):
    """Why the answer ended, and what it cost."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Answer):
    """The last event."""

    type: Literal["message_stop"]


class Ping(Answer):
    """The stream is alive."""

    type: Literal["ping"]


MessageEvent = MessageStart | BlockStart | Ping | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Answer):
    """Tokens of a conversation."""

    input_tokens: int = Field(ge=0, description="What the chat template adds included.")
