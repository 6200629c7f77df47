"""Which web pages may use the server from a browser. Without configured origins: none, and nothing is said about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Cors"]

Header = tuple[bytes, bytes]

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,2000}")
_METHODS = b"GET, HEAD, POST"
_READABLE = b"x-request-id, retry-after, www-authenticate"
PREFLIGHT_SECONDS = 600


class Cors:
    """Headers of responses, after https://fetch.spec.whatwg.org/#http-cors-protocol.

    Arguments:
        origins: exactly as browsers send them, or ``*`` for all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def response_headers(self, headers: Sequence[Header]) -> list[Header]:
        """Return what is added to the response to a request with these headers."""
        if not self._origins:
            return []
        vary = [] if self._all else [(b"vary", b"origin")]
        allowed = self._allowed(headers)
        if allowed is None:
            return vary
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _READABLE), *vary]

    def preflight_headers(self, method: str, headers: Sequence[Header]) -> list[Header] | None:
        """Return what answers a preflight, beside the ``response_headers``; None where the request is none, or is that
        of a page which may not use the server.
        """
        asked = dict(headers)
        if method != "OPTIONS" or b"access-control-request-method" not in asked or self._allowed(headers) is None:
            return None
        found = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
        ]
        names = asked.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES.fullmatch(names):
            found.append((b"access-control-allow-headers", names))
        return found

    def _allowed(self, headers: Sequence[Header]) -> bytes | None:
        """The value that lets the page in which a request began read the answer."""
        origin = dict(headers).get(b"origin")
        if origin is None:
            return None
        if self._all:
            return b"*"
        return origin if origin in self._origins else None
