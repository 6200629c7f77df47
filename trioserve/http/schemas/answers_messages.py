"""What answers of ``/v1/messages`` hold; see ``schemas.responses``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trioserve.http.schemas.responses import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


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


class MessageUsage(Answer):
    """Tokens that were used."""

    input_tokens: int = Field(ge=0, description="Of the prompt, without those that the slot had kept.")
    cache_creation_input_tokens: Literal[0] = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(ge=0, description="Of the prompt, those that the slot had kept.")
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

    stop_reason: StopReason = Field(description="end_turn: the model ended it; max_tokens: a limit did.")
    stop_sequence: str | None = Field(description="The stop string that ended it, where one did.")


class MessageObject(MessageBase, MessageEnd):
    """A whole answer."""

    content: list[TextBlock] = Field(min_length=1, max_length=1)


class BegunMessage(MessageBase):
    """An answer before there is any of it."""

    content: list[TextBlock] = Field(max_length=0)
    stop_reason: None
    stop_sequence: None


class MessageStart(Answer):
    """The first event."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockEvent(Answer):
    """What concerns one block."""

    index: Literal[0] = Field(description="Of the block; there is one.")


class BlockStart(BlockEvent):
    """The text begins."""

    type: Literal["content_block_start"]
    content_block: TextBlock


class TextPiece(Answer):
    """More text."""

    type: Literal["text_delta"]
    text: str


class BlockDelta(BlockEvent):
    """The text goes on."""

    type: Literal["content_block_delta"]
    delta: TextPiece


class BlockStop(BlockEvent):
    """The text is complete."""

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
