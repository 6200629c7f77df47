"""Who gets in: a pure decision from a request's headers, the keys of the server, and what the route asks for."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import sha256
from ipaddress import IPv6Address, ip_address

from trioserve.config import Config
from trioserve.errors import AuthenticationError, PermissionDeniedError

__all__ = ["MANAGEMENT_PATHS", "PUBLIC_PATHS", "Keyring", "RouteKind", "exposure", "route_kind"]

PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Open to everybody, whatever the keys."""

MANAGEMENT_PATHS = frozenset(
    {"/v1/models/load", "/v1/models/unload", "/v1/tasks/unload_models", "/v1/tasks/unload_all_models"}
)
"""For administrators, where the server has keys for them."""

_BEARER = re.compile(rb"bearer[ \t]+([!-~]+)", re.IGNORECASE)
_AUTHORIZATION, _API_KEY = b"authorization", b"x-api-key"


class RouteKind(Enum):
    """What a route asks of whoever calls it."""

    PUBLIC = "public"
    ORDINARY = "ordinary"
    MANAGEMENT = "management"


def route_kind(method: str, path: str) -> RouteKind:
    """Return the kind of a route, also where no such route is.

    Arguments:
        method: of the request. To look at, the names of two management routes are those of models.
        path: as it is routed. Slashes before and behind it make no difference to the router, nor here.
    """
    bare = "/" + path.strip("/")
    if bare in PUBLIC_PATHS:
        return RouteKind.PUBLIC
    if bare in MANAGEMENT_PATHS and method not in ("GET", "HEAD"):
        return RouteKind.MANAGEMENT
    return RouteKind.ORDINARY


class Keyring:
    """The keys of a server, as digests: a comparison tells neither a key nor its length by the time that it takes.

    Arguments:
        api_keys: open the ordinary routes, and management where there are no admin keys.
        admin_keys: open everything.
    """

    def __init__(self, api_keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._api = [_digest(key.encode()) for key in api_keys]
        self._admin = [_digest(key.encode()) for key in admin_keys]

    @classmethod
    def of(cls, config: Config) -> Keyring:
        """The keys that are configured."""
        return cls(*([key.get_secret_value() for key in keys] for keys in (config.api_keys, config.admin_keys)))

    def judge(
        self, headers: Sequence[tuple[bytes, bytes]], kind: RouteKind
    ) -> AuthenticationError | PermissionDeniedError | None:
        """Return what keeps a request out, None where nothing does.

        Arguments:
            headers: of the request. ``authorization`` and ``x-api-key`` each offer a key, and one right key is enough.
                A header that is given twice offers none.
            kind: of the route.
        """
        if self._is_open(kind):
            return None
        offered = [_digest(key) for key in _offered_keys(headers)]
        # Every key is compared with all that are offered, whatever came out before.
        is_admin = _count_matches(self._admin, offered) > 0
        is_client = _count_matches(self._api, offered) > 0
        if is_admin or (is_client and not (kind is RouteKind.MANAGEMENT and self._admin)):
            return None
        if is_client:
            return PermissionDeniedError("this key does not open management routes; they need an admin key")
        if offered:
            return AuthenticationError("the key is not one of this server's")
        return AuthenticationError("a key is needed: send it as Authorization: Bearer KEY, or as x-api-key: KEY")

    def _is_open(self, kind: RouteKind) -> bool:
        if kind is RouteKind.PUBLIC:
            return True
        return not self._api and not (kind is RouteKind.MANAGEMENT and self._admin)


def _offered_keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a request offers: two at most, none of them empty."""
    found = []
    for wanted in (_AUTHORIZATION, _API_KEY):
        values = [value.strip(b" \t") for name, value in headers if name.lower() == wanted]
        if len(values) != 1 or not values[0]:
            continue
        if wanted == _API_KEY:
            found.append(values[0])
        elif bearer := _BEARER.fullmatch(values[0]):
            found.append(bearer.group(1))
    return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _count_matches(keys: Sequence[bytes], offered: Sequence[bytes]) -> int:
    return sum(hmac.compare_digest(key, other) for key in keys for other in offered)


def exposure(config: Config, address: str | None) -> str | None:
    """Return what the operator is to be told of a server that others can reach and use; None where there is nothing.

    Arguments:
        config: of the server.
        address: IP address to which the server is bound; None for a Unix socket.
    """
    if address is None or config.api_keys or _is_loopback(address):
        return None
    if config.management and not config.admin_keys:
        return (
            f"DANGER: {address} can be reached from other machines, management is on, and there are no keys: whoever "
            "reaches it may load, replace and unload models; set admin_keys and api_keys"
        )
    return f"{address} can be reached from other machines and there are no api_keys: whoever reaches it may use it"


def _is_loopback(address: str) -> bool:
    ip = ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (mapped or ip).is_loopback
