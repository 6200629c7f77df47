"""Everything that can go wrong, in one tree, named by whose fault it is.

    TrioserveError
    ├── ConfigError                    the operator: a setting, a file, a port            (start-up only, exit code 2)
    ├── InvalidRequestError            the client: a field is wrong                       400
    │   ├── WrongTaskError             the model is for something else                    400
    │   ├── ContextLengthError         the prompt does not fit                            400
    │   ├── ChatTemplateError          the model's template refused the messages          400
    │   └── InvalidModelError          the model file or its options are wrong            400
    ├── AuthenticationError            the client: no key, or a wrong one                 401
    ├── PermissionDeniedError          the client: a key that does not open this route    403
    ├── ManagementDisabledError        the operator keeps management off                  403
    ├── ModelNotFoundError             the client: unknown model id                       404
    ├── RouteNotFoundError             the client: unknown route                          404
    ├── MethodNotAllowedError          the client: known route, wrong method              405
    ├── RequestTimeoutError            the client: the body came too slowly               408
    ├── PayloadTooLargeError           the client: body beyond the limit                  413
    ├── UnsupportedMediaTypeError      the client: not JSON                               415
    ├── ServerBusyError                nobody: no slot within the wait that was allowed   503
    ├── ShuttingDownError              the operator stops the server                      503
    ├── ModelLoadError                 the model could not be loaded                      503
    ├── InsufficientMemoryError        a load would leave too little memory               503
    └── EngineError                    us, or llama.cpp                                   500

Each class carries the HTTP status and OpenAI's ``type`` and ``code``. This module imports nothing of the project.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class TrioserveError(Exception):
    """Base of all errors that this package raises on purpose.

    Arguments:
        message: one sentence for the person who caused it; names the field and the limit where there is one.
        param: the request field it is about, or None.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def reason(self) -> str:
        """Why, in a word, for counts: the code, or more precisely than that."""
        return self.code


class ConfigError(TrioserveError):
    """A setting, file or port that the operator named cannot be used."""

    code = "invalid_configuration"


class InvalidRequestError(TrioserveError):
    """A field of the request has the wrong type, is out of range or contradicts another one."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class WrongTaskError(InvalidRequestError):
    """The model is configured for another task than the request asks for."""

    code = "wrong_task"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an answer in the context of one slot, or an input does not fit into it."""

    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    """The model's chat template refused the messages, or could not be rendered within its bounds."""

    code = "chat_template_error"


class InvalidModelError(InvalidRequestError):
    """The model file is missing or unreadable, is no GGUF, or its options cannot be honoured."""

    code = "invalid_model"


class AuthenticationError(TrioserveError):
    """The request carries no key, or one that opens nothing."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(TrioserveError):
    """The request's key is one of the server's, and not one that opens this route."""

    status = 403
    type = "permission_denied"
    code = "permission_denied"


class ManagementDisabledError(TrioserveError):
    """Management routes are off in the configuration."""

    status = 403
    type = "management_disabled"
    code = "management_disabled"


class ModelNotFoundError(TrioserveError):
    """No model with that id is registered."""

    status = 404
    type = "model_not_found"
    code = "model_not_found"


class RouteNotFoundError(TrioserveError):
    """No such route."""

    status = 404
    type = "invalid_request_error"
    code = "route_not_found"


class MethodNotAllowedError(TrioserveError):
    """The route exists, but not with this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(TrioserveError):
    """The request's body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLargeError(TrioserveError):
    """The request's body is larger than ``max_request_body_bytes``."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(TrioserveError):
    """The request's body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class BusyReason(StrEnum):
    """What stood in the way of a caller who was turned away as one too many."""

    BUSY_TIMEOUT = "busy_timeout"
    NO_WAIT = "no_wait"
    OVERDUE = "overdue"
    QUEUE_FULL = "queue_full"
    LOADED_MODELS = "loaded_models"
    OUT_OF_ORDER = "out_of_order"


class ServerBusyError(TrioserveError):
    """No slot came free within the wait that was allowed; nothing was started.

    Arguments:
        message: as for all.
        busy: what stood in the way.
    """

    status = 503
    type = "server_busy"
    code = "server_busy"

    def __init__(self, message: str, busy: BusyReason = BusyReason.BUSY_TIMEOUT) -> None:
        super().__init__(message)
        self.busy = busy

    @property
    def reason(self) -> str:
        """What stood in the way."""
        return self.busy.value


class ShuttingDownError(TrioserveError):
    """The server drains and takes no new work, or cut this work off at the end of the drain."""

    status = 503
    type = "shutting_down"
    code = "shutting_down"


class ModelLoadError(TrioserveError):
    """The model could not be loaded; it stays registered and the next request tries again."""

    status = 503
    type = "model_load_failed"
    code = "model_load_failed"


class InsufficientMemoryError(TrioserveError):
    """Loading would leave less free memory than ``min_free_memory_mb``."""

    status = 503
    type = "insufficient_memory"
    code = "insufficient_memory"


class EngineError(TrioserveError):
    """Inference failed. The details are in the server's log, not in the message."""
