"""Where the parts of a JSON Schema are, and what its references point at."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from trioserve.engine.base import ConstraintError

Path = tuple[str, ...]
_CHAIN = 32  # references that lead to references


class Document:
    """A whole schema.

    Arguments:
        root: of it.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._places: set[Path] = set()
        self._references: list[str] = []

    def note(self, schema: Mapping[str, object], path: Path, bases: tuple[int, ...]) -> None:
        """Take note of a part that is a schema.

        Arguments:
            schema: the part.
            path: of it, from the root.
            bases: how much of the path leads to the root, and to each schema around this one that has a name.
        """
        self._places.update(path[base:] for base in bases)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._references.append(reference)

    def check_references(self) -> None:
        """See that all references point at parts that were noted.

        Raises:
            ConstraintError: one points elsewhere.
        """
        for reference in self._references:
            fragment = reference.partition("#")[2]
            if fragment.startswith("/") and _path(fragment) not in self._places:
                raise ConstraintError(f"$ref: {reference} points at no schema")

    def resolved(self, schema: object) -> object:
        """A schema, or what it refers to if it does nothing else and that is in this document."""
        for _ in range(_CHAIN):
            if not (isinstance(schema, Mapping) and schema.keys() == {"$ref"}):
                return schema
            reference = schema["$ref"]
            if not (isinstance(reference, str) and reference.startswith("#/")):
                return schema
            found = self._root
            for step in _path(reference[1:]):
                if not (isinstance(found, Mapping) and step in found):
                    return schema
                found = found[step]
                if isinstance(found, Mapping) and "$id" in found:  # where "#" is another place
                    return schema
            schema = found
        return schema


def _path(fragment: str) -> Path:
    steps = unquote(fragment).split("/")[1:]
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
