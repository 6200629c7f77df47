"""Reading a request's JSON body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from quart import Request

from trioserve.errors import InvalidRequestError, UnsupportedMediaTypeError
from trioserve.workers import Workers

Parsed = TypeVar("Parsed")

_INLINE_BYTES = 256 * 1024  # larger bodies are decoded in a thread, so that they don't hold up the event loop
_large_bodies = Workers("large_bodies", 2)  # decoded, one takes many times its size: few at a time


async def read_as(request: Request, parse: Callable[[dict[str, object]], Parsed], *, optional: bool = False) -> Parsed:
    """Return the body as what ``parse`` makes of a JSON object. Large bodies are decoded and parsed in a thread.

    Arguments:
        request: its body was not read yet.
        parse: raises InvalidRequestError where the object is wrong.
        optional: take no body at all for an empty object.

    Raises:
        UnsupportedMediaTypeError: it is declared as something else.
        InvalidRequestError: it is no JSON object, or not the right one.
    """
    _check_media_type(request)
    data: bytes = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    if optional and not data:
        return parse({})

    def decode_and_parse() -> Parsed:
        return parse(decode_object(data))

    return decode_and_parse() if len(data) <= _INLINE_BYTES else await _large_bodies.run(decode_and_parse)


def decode_object(data: bytes) -> dict[str, object]:
    """Decode a JSON object strictly: UTF-8, no NaN or Infinity, no bottomless nesting.

    Raises:
        InvalidRequestError: saying where it is wrong.
    """
    try:
        decoded = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: invalid byte at position {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidRequestError(f"the body is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        # Integers of more digits than Python converts come with advice that is not for clients.
        what = "an integer has too many digits" if "set_int_max_str_digits" in str(error) else str(error)
        raise InvalidRequestError(f"the body is not valid JSON: {what}") from None
    if not isinstance(decoded, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return decoded


def _check_media_type(request: Request) -> None:
    declared = (request.mimetype or "").lower()
    if declared and declared != "application/json" and not declared.endswith("+json"):
        raise UnsupportedMediaTypeError(f"the body is declared as {declared[:100]}; send application/json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
