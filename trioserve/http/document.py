"""The OpenAPI document, made from the operations that stand beside the handlers and from the schemas they name.

Source of the format: the OpenAPI Specification, version 3.1.1. That has no word for the events of a stream; their
schema stands as ``x-itemSchema``, which is what version 3.2 calls it, without the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from quart_trio import QuartTrio
from werkzeug.routing import Rule

import trioserve
from trioserve.errors import (
    AuthenticationError,
    EngineError,
    InvalidRequestError,
    MethodNotAllowedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RequestTimeoutError,
    TrioserveError,
    UnsupportedMediaTypeError,
)
from trioserve.http.auth import RouteKind, route_kind
from trioserve.http.dialect import ANTHROPIC, OPENAI, Dialect, anthropic_type, dialect_of
from trioserve.http.exchange import RETRY_AFTER
from trioserve.http.operation import Operation
from trioserve.http.schemas.answers_messages import MessagesError
from trioserve.http.schemas.responses import Error

Json = dict[str, Any]

_EVERY_ROUTE = (MethodNotAllowedError, EngineError)
_KEYS = {
    RouteKind.PUBLIC: (),
    RouteKind.ORDINARY: (AuthenticationError,),
    RouteKind.MANAGEMENT: (AuthenticationError, PermissionDeniedError),
}
_ERRORS = {OPENAI: Error, ANTHROPIC: MessagesError}
_EVERY_BODY = (InvalidRequestError, RequestTimeoutError, PayloadTooLargeError, UnsupportedMediaTypeError)
_DESCRIPTION = (
    "HEAD and OPTIONS are answered wherever GET is. While the server drains, every route but those of health and "
    "status answers 503 shutting_down."
)
_UNNAMED = "Events without names, each with one line of JSON, and then data: [DONE]; after an error there is none."
_NAMED = (
    "Events, each with one line of JSON whose type is also the event's name. An error is the last; one without a type "
    "has no name."
)
_HEADERS: Json = {
    "x-request-id": {
        "description": "The request's own x-request-id where that was usable, else a fresh one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    },
    "retry-after": {
        "description": "When it may be worth another try, in seconds.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    "www-authenticate": {"description": "How to send a key.", "required": True, "schema": {"const": "Bearer"}},
    "allow": {"description": "The methods of this path.", "required": True, "schema": {"type": "string"}},
}
_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": "A name for the request, in the log and in the response: 1 to 128 printable ASCII characters "
    "without spaces. Anything else is replaced.",
    "schema": {"type": "string"},
}
_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "One of api_keys or admin_keys."},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same keys."},
}
_VARYING = re.compile(r"<(?:[^:>]+:)?([^>]+)>")


def operations(app: QuartTrio) -> Iterator[tuple[Rule, str, Operation]]:
    """Every rule of an application with each of its methods and what its handler says of itself.

    Raises:
        LookupError: naming a route whose handler says nothing.
    """
    for rule in app.url_map.iter_rules():
        operation = Operation.of(app.view_functions[rule.endpoint])
        if operation is None:
            raise LookupError(f"the handler of {rule.rule} has no Operation")
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            yield rule, method.lower(), operation


def document(app: QuartTrio) -> Json:
    """Describe an application in the form of OpenAPI 3.1."""
    routes = list(operations(app))
    schemas = _Schemas([operation for _, _, operation in routes])
    paths: dict[str, Json] = {}
    for rule, method, operation in routes:
        path = _VARYING.sub(r"{\1}", rule.rule)
        paths.setdefault(path, {})[method] = {
            "operationId": "_".join([method, *re.findall(r"\w+", path)]),
            **_described(rule, operation, route_kind(method.upper(), path), schemas),
        }
    return {
        "openapi": "3.1.1",
        "info": {"title": "trioserve", "version": trioserve.__version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "headers": _HEADERS,
            "securitySchemes": _SECURITY,
            "parameters": {"request_id": _REQUEST_ID},
        },
    }


class _Schemas:
    """The schemas of all types that operations name, each defined once.

    Arguments:
        operations: of the whole document.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: set[tuple[Any, JsonSchemaMode]] = {(Error, "serialization"), (MessagesError, "serialization")}
        for operation in operations:
            kinds |= {(kind, "serialization") for kind in (*operation.answers.values(), operation.events) if kind}
            kinds |= {(kind, "validation") for kind in (operation.body,) if kind}
        inputs = [(kind, mode, TypeAdapter(kind)) for kind, mode in sorted(kinds, key=repr)]
        self._schemas, shared = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
        self.definitions: Json = shared["$defs"]

    def body(self, kind: Any) -> Json:
        """Schema of what a request may hold."""
        return self._schemas[kind, "validation"]

    def answer(self, kind: Any) -> Json:
        """Schema of what a response holds."""
        return self._schemas[kind, "serialization"]


def _described(rule: Rule, operation: Operation, kind: RouteKind, schemas: _Schemas) -> Json:
    described: Json = {
        "summary": operation.summary,
        "parameters": [
            {"$ref": "#/components/parameters/request_id"},
            *(_path_parameter(name, operation.parameters[name]) for name in sorted(rule.arguments)),
        ],
        # Whether there are keys is up to the operator.
        "security": [] if kind is RouteKind.PUBLIC else [{}, *({name: []} for name in _SECURITY)],
        "responses": _responses(operation, kind, dialect_of(rule.rule), schemas),
    }
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.body(operation.body)}}
        described["requestBody"] = {"required": not operation.body_optional, "content": content}
    return described


def _path_parameter(name: str, description: str) -> Json:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def _responses(operation: Operation, kind: RouteKind, dialect: Dialect, schemas: _Schemas) -> Json:
    """What an operation answers, by status."""
    told: dict[int, Json] = {
        status: _response(HTTPStatus(status).phrase, {"application/json": {"schema": schemas.answer(told_as)}})
        for status, told_as in operation.answers.items()
    }
    if operation.text is not None:
        told[200] = _response("OK", {operation.text: {"schema": {"type": "string"}}})
    if operation.events is not None:
        told.setdefault(200, _response("OK", {}))["content"]["text/event-stream"] = _stream(operation, dialect, schemas)
    for status, errors in _errors(operation, kind).items():
        told[status] = _error_response(errors, dialect, schemas)
    return {str(status): told[status] for status in sorted(told)}


def _response(description: str, content: Json, *headers: str) -> Json:
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *headers)}
    return {"description": description, "headers": references, "content": content}


def _stream(operation: Operation, dialect: Dialect, schemas: _Schemas) -> Json:
    told = _NAMED if operation.named_events else _UNNAMED
    items = {"anyOf": [schemas.answer(operation.events), schemas.answer(_ERRORS[dialect])]}
    return {"schema": {"description": told}, "x-itemSchema": items}


def _errors(operation: Operation, kind: RouteKind) -> Mapping[int, list[type[TrioserveError]]]:
    """The errors that an operation can answer with, by status."""
    found: dict[int, list[type[TrioserveError]]] = {}
    for error in (*_EVERY_ROUTE, *_KEYS[kind], *(_EVERY_BODY if operation.body is not None else ()), *operation.errors):
        found.setdefault(error.status, []).append(error)
    return found


def _error_response(errors: list[type[TrioserveError]], dialect: Dialect, schemas: _Schemas) -> Json:
    if dialect is ANTHROPIC:
        codes = {"type": {"enum": [anthropic_type(errors[0].status)]}}
    else:
        codes = {"code": {"enum": [error.code for error in errors]}, "type": {"enum": sorted({e.type for e in errors})}}
    schema = {**schemas.answer(_ERRORS[dialect]), "properties": {"error": {"properties": codes}}}
    described = " ".join(f"{error.code}: {_meaning(error)}" for error in errors)
    headers = [
        *(["www-authenticate"] if AuthenticationError in errors else []),
        *(["allow"] if MethodNotAllowedError in errors else []),
        *(["retry-after"] if all(error.code in RETRY_AFTER for error in errors) else []),
    ]
    return _response(described, {"application/json": {"schema": schema}}, *headers)


def _meaning(error: type[TrioserveError]) -> str:
    """One sentence on an error."""
    if error is EngineError:  # here it stands for whatever else fails, too
        return "Something failed inside the server, whose log tells it by the request id."
    return (error.__doc__ or "").splitlines()[0]
