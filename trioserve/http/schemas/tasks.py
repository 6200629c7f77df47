"""``POST /v1/tasks/run``, ``/v1/tasks/stream`` and ``/v1/tasks/batch``"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import Schema, Text
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest

MAX_BATCH = 2048

TaskBody = ChatCompletionRequest | CompletionRequest


class _Described:
    """Documents requests of a batch as what they should be. Each is only checked in its turn, for its own error."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(TaskBody).core_schema)


class BatchTaskRequest(Schema):
    """Body of a batch."""

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    requests: Annotated[
        list[Annotated[Any, _Described]],
        Field(
            min_length=1,
            max_length=MAX_BATCH,
            description="Bodies of chat or text completions. Each gets its answer, or its own error.",
        ),
    ]
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for a slot, in milliseconds; may only shorten the server's."
    )

    @property
    def shared_model(self) -> str | None:
        """The model of the whole batch: its own, or else the first one that a request of it names."""
        if self.model is not None:
            return self.model
        named = (item.get("model") for item in self.requests if isinstance(item, dict))
        return next((model for model in named if isinstance(model, str)), None)


def parse_task(body: Mapping[str, object]) -> TaskBody:
    """Read the body of a chat completion, or of a text completion with one prompt, whichever it is.

    Raises:
        InvalidRequestError: it is neither, or a field of it is wrong.
    """
    is_chat, is_text = (body.get(name) is not None for name in ("messages", "prompt"))
    if is_chat and is_text:
        raise InvalidRequestError("messages and prompt are both given: a task has one of them", param="prompt")
    if not (is_chat or is_text):
        raise InvalidRequestError("messages: is required, unless there is a prompt", param="messages")
    task = ChatCompletionRequest.parse(body) if is_chat else CompletionRequest.parse(body)
    if len(task.prompts) > 1:
        raise InvalidRequestError(
            f"prompt: holds {len(task.prompts)} prompts, a task has one; send them as a batch", param="prompt"
        )
    if task.choices > 1:
        raise InvalidRequestError(f"n: is {task.choices}, a task gives one answer; send a batch", param="n")
    return task


def parse_item(item: object, model: str | None) -> TaskBody:
    """Read one request of a batch.

    Arguments:
        item: what stands in ``requests``.
        model: of the batch.

    Raises:
        InvalidRequestError: as for ``parse_task``; or it asks for another model than the batch.
    """
    if not isinstance(item, dict):
        raise InvalidRequestError("each of the requests must be an object", param="requests")
    task = parse_task(item)
    if task.model is not None and task.model != model:
        raise InvalidRequestError(
            f"model: {task.model[:100]!r} is not the model of the batch, which all of its requests share", param="model"
        )
    return task
