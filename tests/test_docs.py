"""The documentation agrees with the code: headings, diagrams, links, snippets, examples, commands."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from trioserve import errors
from trioserve.config import Config, ModelConfig, load_config
from trioserve.engine.sampling import Sampling
from trioserve.http.app import create_app
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.management import UnloadAllRequest, UnloadModelsRequest, UnloadRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.schemas.tasks import BatchTaskRequest, parse_task
from trioserve.http.schemas.text import DetokenizeRequest, TokenizeRequest
from trioserve.scheduling.diagram import mermaid
from trioserve.scheduling.lifecycle import MODEL, PROCESS, REQUEST, ModelState, ProcessPhase, RequestPhase
from trioserve.service import open_service
from trioserve.testing import FakeEngine

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
PYTHON_EXAMPLES = sorted(EXAMPLES.glob("*.py"))
NOXFILE = ROOT / "noxfile.py"


def text_of(path):
    return path.read_text("utf-8")


def headings(path, level):
    return re.findall(rf"^{'#' * level} (.+)$", outside_of_code(text_of(path)), flags=re.MULTILINE)


def outside_of_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def snippets(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(path), flags=re.MULTILINE | re.DOTALL)


def section(path, heading):
    return re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text_of(path), re.MULTILINE | re.DOTALL)[1]


def table_fields(text):
    """The names in the first column of a section's tables, of those with several names each."""
    return [name for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(.+?)`", cell)]


# -- routes


async def test_every_route_has_a_heading_and_every_heading_a_route():
    async with open_service(Config(), engine=FakeEngine()) as service:
        rules = list(create_app(service)._app.url_map.iter_rules())
    routes = [
        f"{method} " + re.sub(r"<(?:.+:)?(.+)>", r"{\1}", rule.rule)
        for rule in rules
        for method in rule.methods - {"HEAD", "OPTIONS"}
    ]
    assert sorted(headings(DOCS / "routes.md", 3)) == sorted(routes)


def test_every_field_is_documented():
    common = table_fields(section(DOCS / "routes.md", "Common fields"))
    for route, schema in (("chat/completions", ChatCompletionRequest), ("completions", CompletionRequest)):
        own = table_fields(section(DOCS / "routes.md", f"POST /v1/{route}"))
        documented = {name.partition(".")[0] for name in (*common, *own)}
        assert documented == set(schema.model_fields), route


def test_every_field_of_embeddings_is_documented():
    documented = table_fields(section(DOCS / "routes.md", "POST /v1/embeddings"))
    assert set(documented) - {"float", "base64"} == set(EmbeddingsRequest.model_fields)


@pytest.mark.parametrize(("route", "schema"), [("responses", ResponsesRequest), ("messages", MessagesRequest)])
def test_every_field_of_the_other_apis_is_documented(route, schema):
    documented = table_fields(section(DOCS / "routes.md", f"POST /v1/{route}"))
    assert {name.partition(".")[0] for name in documented} == set(schema.model_fields)


SMALL_BODIES = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/models/unload": UnloadRequest,
    "/v1/tasks/unload_models": UnloadModelsRequest,
    "/v1/tasks/unload_all_models": UnloadAllRequest,
}


@pytest.mark.parametrize("route", SMALL_BODIES)
def test_every_field_of_small_bodies_is_documented(route):
    assert set(table_fields(section(DOCS / "routes.md", f"POST {route}"))) == set(SMALL_BODIES[route].model_fields)


def test_what_is_refused_is_documented():
    refused = set(table_fields(section(DOCS / "routes.md", "What is refused")))
    bodies = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    assert refused == {name for body in bodies for name in body.neutral}


def test_documented_defaults_are_those_of_sampling():
    rows = re.findall(r"^\| `(\w+)` \| .*? \| `(\S+)` \|", section(DOCS / "routes.md", "Common fields"), re.MULTILINE)
    documented = {name: float(value) for name, value in rows if hasattr(Sampling(), name) and name != "seed"}
    assert documented == {name: getattr(Sampling(), name) for name in documented}
    assert len(documented) == 10


# -- errors


def raised_in(tree):
    """Names that a module calls: an error class among them can reach somebody."""
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def client_errors():
    """The error classes that this version makes anywhere, without those that only the operator meets."""
    called = set()
    for path in (ROOT / "trioserve").rglob("*.py"):
        called |= raised_in(ast.parse(text_of(path)))
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in classes if kind.__name__ in called and kind is not errors.ConfigError]


def test_every_error_has_a_heading_with_its_status_and_type():
    kinds = {kind.code: kind for kind in client_errors()}
    page = DOCS / "errors.md"
    assert sorted(headings(page, 3)) == sorted(kinds)
    for code, kind in kinds.items():
        text = section(page, code)
        assert f"- Status: {kind.status}\n- Type: `{kind.type}`\n- When: " in text, code
        assert "\n- What to do: " in text, code


# -- diagrams


@pytest.mark.parametrize(
    ("heading", "table", "initial"),
    [
        ("The process", PROCESS, ProcessPhase.SERVING),
        ("A model", MODEL, ModelState.UNLOADED),
        ("A request", REQUEST, RequestPhase.QUEUED),
    ],
)
def test_diagrams_are_those_of_the_tables(heading, table, initial):
    assert f"```mermaid\n{mermaid(table, initial)}\n```\n" in section(DOCS / "design.md", heading)


# -- links and names


def anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_of_code(text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        if fragment:
            assert fragment in [anchor(heading) for level in range(1, 5) for heading in headings(found, level)], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    for name in re.findall(r"`((?:tests|trioserve|examples|docs)/[\w/.]+)`", text_of(page)):
        assert (ROOT / name).exists(), name


def test_modules_named_in_the_design_exist():
    for name in re.findall(r"`([a-z_]+/[\w/]+\.py)`", text_of(DOCS / "design.md")):
        assert (ROOT / "trioserve" / name).exists(), name


def test_every_page_is_linked_from_the_readme():
    linked = re.findall(r"\]\(docs/([^)#]+)", text_of(ROOT / "README.md"))
    assert {page.name for page in DOCS.glob("*.md")} <= set(linked)


# -- snippets and examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_parse(page):
    for snippet in snippets(page, "toml"):
        tomllib.loads(snippet)
    for snippet in snippets(page, "json"):
        json.loads(snippet)
    for snippet in snippets(page, "python"):
        compile(snippet, str(page), "exec")
    for snippet in snippets(page, "sh"):
        subprocess.run(["bash", "-n"], input=snippet, text=True, check=True)


def test_bodies_in_curl_snippets_are_accepted():
    parsers = {
        "/v1/chat/completions": ChatCompletionRequest.parse,
        "/v1/completions": CompletionRequest.parse,
        "/v1/chat/completions/input_tokens": ChatCompletionRequest.parse,
        "/apply-template": ChatCompletionRequest.parse,
        "/v1/responses": ResponsesRequest.parse,
        "/v1/messages": MessagesRequest.parse,
        "/v1/messages/count_tokens": CountTokensRequest.parse,
        "/v1/embeddings": EmbeddingsRequest.parse,
        "/v1/tasks/run": parse_task,
        "/v1/tasks/stream": parse_task,
        "/v1/tasks/batch": BatchTaskRequest.parse,
        **{route: schema.parse for route, schema in SMALL_BODIES.items()},
    }
    found = 0
    for page in PAGES:
        for snippet in snippets(page, "sh"):
            words = shlex.split(snippet) if snippet.startswith("curl ") else []
            for body in (after for word, after in itertools.pairwise(words) if word == "-d"):
                route = next(word for word in words if word.startswith("http")).partition(":8080")[2]
                if route == "/v1/models/load":  # of a registered model, whose path is known
                    ModelConfig(**{"path": Path("model.gguf"), **json.loads(body)})
                else:
                    parsers[route](json.loads(body))
                found += 1
    assert found >= 7


@pytest.mark.parametrize("example", PYTHON_EXAMPLES, ids=lambda path: path.name)
def test_python_examples_compile(example):
    compile(text_of(example), str(example), "exec")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_shell_examples_parse_and_are_executable(example):
    subprocess.run(["bash", "-n", example], check=True)
    assert os.access(example, os.X_OK)


def test_example_configuration_loads(tmp_path):
    text = text_of(EXAMPLES / "trioserve.toml")
    model = tmp_path / "model.gguf"
    as_it_is = tmp_path / "as_it_is.toml"
    as_it_is.write_text(text)
    assert load_config(as_it_is, {}, {"model": str(model)}).busy_timeout_ms == 60_000
    # With everything that is commented out; the files that are named have to be there.
    for name in ("server.crt", "server.key", "keys", "admin-keys"):
        (tmp_path / name).write_text("sk")
    everything = tmp_path / "everything.toml"
    everything.write_text(re.sub(r"^#(?=[\w\[])", "", text, flags=re.MULTILINE))
    assert [entry.id for entry in load_config(everything, {}, {}).models] == ["small", "large", "embedder"]


# -- commands


def sessions():
    """Names of the noxfile's sessions, and those that run by default."""
    tree = ast.parse(text_of(NOXFILE))
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "nox.session" for decorator in node.decorator_list)
    ]
    default = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "nox.options.sessions"
    )
    return names, default


def test_commands_of_the_readme_are_those_of_ci():
    prefix = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox"
    commands = [line for snippet in snippets(ROOT / "README.md", "sh") for line in snippet.splitlines()]
    assert f"{prefix} -s serve" in commands
    assert prefix in commands
    steps = [line for line in text_of(ROOT / ".ci" / "run").splitlines() if ".venv" in line]
    assert steps[0] == "python3 -m venv .venv"
    assert re.fullmatch(r"\.venv/bin/python -m pip install .*\bnox", steps[1])
    assert steps[2:] == ["exec .venv/bin/nox"]


def test_sessions_are_documented():
    names, default = sessions()
    page = DOCS / "development.md"
    assert sorted(table_fields(section(page, "Sessions"))) == sorted(names)
    assert "runs " + ", ".join(f"`{name}`" for name in default[:-1]) + f" and `{default[-1]}`" in text_of(page)
    for path in PAGES:
        for name in re.findall(r"nox -s (\w+)", text_of(path)):
            assert name in names, (path.name, name)
