"""The tables of docs/api.md: columns that follow from the schemas, beside columns that people write.

``python -m tests.api_page`` (``nox -s api_page``) writes the page anew. What people wrote stays with its field; a new
field gets ``?`` in their columns, at which a test fails until somebody has looked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from trioserve.config import Config
from trioserve.http.app import create_app
from trioserve.http.document import document
from trioserve.http.schemas.base import GenerationFields
from trioserve.service import open_service
from trioserve.testing import FakeEngine

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
COMMON = "Fields of both"
UNWRITTEN = "?"
# Whose API a route follows; the others are this server's own, with nothing to compare.
UPSTREAM = {
    CHAT: "OpenAI",
    COMPLETIONS: "OpenAI",
    COMMON: "OpenAI or llama-server",
    "POST /v1/responses": "OpenAI",
    "POST /v1/embeddings": "OpenAI",
    "POST /v1/messages": "Anthropic",
    "POST /v1/messages/count_tokens": "Anthropic",
    "POST /tokenize": "llama-server",
    "POST /detokenize": "llama-server",
}

Json = Mapping[str, Any]
Row = tuple[str, ...]


# -- from the schemas


def described() -> Json:
    """The OpenAPI document of an application."""

    async def application() -> Json:
        async with open_service(Config(), engine=FakeEngine()) as service:
            return document(create_app(service)._app)

    return trio.run(application)


def tables(told: Json) -> dict[str, list[Row]]:
    """For each heading, the generated cells of its rows: field, type and range, default, meaning.

    Routes whose body another one has already are left out.

    Arguments:
        told: the OpenAPI document.
    """
    schemas = told["components"]["schemas"]
    names = {
        f"POST {path}": _named(item["post"]["requestBody"]["content"]["application/json"]["schema"])
        for path, item in told["paths"].items()
        if "requestBody" in item.get("post", {})
    }
    bodies = set(names.values()) - {""}
    found: dict[str, list[Row]] = {}
    for heading, name in sorted(names.items(), key=lambda pair: _place(pair[0])):
        if name in bodies:
            bodies.remove(name)
            found[heading] = list(_rows(schemas, name, {*names.values()}))
    shared = {*GenerationFields.model_fields, *GenerationFields.neutral, *GenerationFields.ignored}
    common = [row for row in found[CHAT] if row[0].partition(".")[0] in shared]
    for heading in (CHAT, COMPLETIONS):
        found[heading] = [row for row in found[heading] if row not in common]
    return {CHAT: found.pop(CHAT), COMPLETIONS: found.pop(COMPLETIONS), COMMON: common, **found}


def fields_of(told: Json, name: str) -> set[str]:
    """The names of all fields of a schema, those of schemas inside it included.

    Arguments:
        told: the OpenAPI document.
        name: of the schema.
    """
    return {field for field, *_ in _rows(told["components"]["schemas"], name, set())}


def _place(heading: str) -> int:
    """Those with something to compare first, in their order."""
    return [*UPSTREAM, heading].index(heading)


def _named(schema: Json) -> str:
    """The schema that another one refers to, or nothing."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _rows(schemas: Json, name: str, bodies: set[str], prefix: str = "") -> Iterator[Row]:
    """The rows of one schema, and of those inside it but for whole bodies."""
    described = schemas[name]
    for field, schema in described["properties"].items():
        default = schema.get("default")
        required = field in described.get("required", ())
        told = "required" if required else "none" if default is None else f"`{_json(default)}`"
        yield f"{prefix}{field}", type_of(schema), told, schema.get("description", "")
        for inner, mark in _inner(schema):
            if inner not in bodies:
                yield from _rows(schemas, inner, bodies, f"{prefix}{field}{mark}.")


def _inner(schema: Json) -> Iterator[tuple[str, str]]:
    """The schemas that a field holds one of, or a list of."""
    for one in schema.get("anyOf", [schema]):
        if "$ref" in one:
            yield _named(one), ""
        elif "$ref" in one.get("items", {}):
            yield _named(one["items"]), "[]"


def type_of(schema: Json) -> str:
    """What a field may hold, in words; that null is the same as leaving it out goes without saying."""
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"] if value is not None) or "nothing"
    match schema.get("type"):
        case "integer" | "number" as kind:
            return ", ".join([kind, *_range(schema)])
        case "string":
            return ", ".join(["text", *_count(schema, "minLength", "maxLength", " characters")])
        case "array":
            count = "".join(f" of {many}" for many in _count(schema, "minItems", "maxItems", ""))
            item = type_of(schema["items"]) if "items" in schema else ""
            return f"list{count}" + (f": ({item})" if " or " in item else f": {item}" if item else "")
        case "object":
            return ", ".join(["object", *_count(schema, "", "maxProperties", " entries")])
        case "boolean":
            return "boolean"
    return "anything"


def _range(schema: Json) -> Iterator[str]:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    start = f"above {_number(above)}" if above is not None else "" if low is None else _number(low)
    end = f"below {_number(below)}" if below is not None else "" if high is None else _number(high)
    if start and end:
        yield f"{start} to {end}"
    elif start:
        yield f"{start} or more" if above is None else start
    elif end:
        yield f"{end} or less" if below is None else end


def _number(value: float) -> str:
    power = int(abs(value)).bit_length() - 1
    if power >= 31 and abs(value) == 2**power:
        return f"{'-' if value < 0 else ''}2^{power}"
    return _json(value)


def _count(schema: Json, least: str, most: str, what: str) -> Iterator[str]:
    low, high = schema.get(least), schema.get(most)
    if low is not None and high is not None:
        yield f"{low}{what}" if low == high else f"{low} to {high}{what}"
    elif low is not None or high is not None:
        yield f"{low} or more{what}" if high is None else f"up to {high}{what}"


def _json(value: object) -> str:
    """As JSON, without the fraction that a whole number needs in Python."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, ensure_ascii=False)


# -- the page


def written(page: str) -> dict[str, dict[str, Row]]:
    """What people wrote, by heading and field: the cells behind the fourth."""
    found: dict[str, dict[str, Row]] = {}
    for heading, text in _sections(page):
        rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
        found[heading] = {field: tuple(re.split(r"(?<!\\) \| ", rest)[3:]) for field, rest in rows}
    return found


def rewritten(page: str, told: Json) -> str:
    """The page with its tables made anew.

    Arguments:
        page: as it is.
        told: the OpenAPI document.
    """
    by_hand = written(page)
    for heading, rows in tables(told).items():
        table = _table(heading, rows, by_hand.get(heading, {}))
        if heading not in by_hand:
            page = f"{page.rstrip()}\n\n### {heading}\n\n{table}"
            continue
        before, text = re.split(rf"(?<=^### {re.escape(heading)}\n)", page, maxsplit=1, flags=re.MULTILINE)
        page = before + re.sub(r"(^\|.*\n)+", lambda _, table=table: table, text, count=1, flags=re.MULTILINE)
    return page


def _table(heading: str, rows: list[Row], by_hand: Mapping[str, Row]) -> str:
    columns = ["field", "type, range", "default", "here"]
    if heading in UPSTREAM:
        columns += [UPSTREAM[heading], "difference"]
    extra = len(columns) - 4
    lines = [_line(columns), "|---" * len(columns) + "|"]
    for field, *cells in rows:
        own = (*by_hand.get(field, ()), *[UNWRITTEN] * extra)[:extra]
        lines.append(_line([f"`{field}`", *(cell.replace("|", r"\|") for cell in cells), *own]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _sections(page: str) -> Iterator[tuple[str, str]]:
    _, *parts = re.split(r"^### (.+)$", page, flags=re.MULTILINE)
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        yield heading, text.partition("\n## ")[0]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8"), described()), "utf-8")
