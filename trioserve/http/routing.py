"""The name of a request's route, told before the application routes it."""

from __future__ import annotations

import re

from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map

UNMATCHED = "unmatched"
"""The name of everything that no route takes, so that clients can't make names."""

_PARAMETER = re.compile(r"<(?:[^:>]+:)?([^>]+)>")


class RouteNames:
    """Names requests by the rules of the application's routes.

    Arguments:
        rules: of the application; routes may still be added to it.
    """

    def __init__(self, rules: Map) -> None:
        self._rules = rules.bind("")

    def __call__(self, method: str, path: str) -> str:
        """Return the name of a route, such as ``/v1/models/{model_id}``."""
        try:
            rule, _ = self._rules.match(path, method, return_rule=True)
        except HTTPException:
            return UNMATCHED
        return route_name(rule.rule)


def route_name(rule: str) -> str:
    """A rule as it is documented."""
    return _PARAMETER.sub(r"{\1}", rule)
