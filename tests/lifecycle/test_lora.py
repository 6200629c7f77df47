"""LoRA adapters under a running server, with the real model and made adapters."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_adapters import tiny_adapter
from tiny_models import tiny_model

from trioserve.config.model_files import embedded_model_path

from .client import ask, assert_error, exactly, http
from .daemon import run_to_end, trioserve, well_behaved

LOAD = "/v1/models/load"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A root with an adapter for the real model, and one for another."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copy(tiny_adapter(embedded_model_path(), ("attn_q.weight",), rank=4), folder / "style.gguf")
    shutil.copy(tiny_adapter(tiny_model()), folder / "other.gguf")
    return folder


@pytest.fixture(scope="module")
def registrations(folder):
    """A server with three registrations of one file: without an adapter, with one, and with one that has no part."""
    entries = {"base": "[]", "tuned": '["style.gguf"]', "silent": '[{ path = "style.gguf", scale = 0 }]'}
    file = folder / "trioserve.toml"
    file.write_text(
        "\n".join(
            ["management = true", f'model_roots = ["{folder}"]']
            + [
                f'[[models]]\nid = "{name}"\npath = "{embedded_model_path()}"\nn_ctx = 512\nslots = 2\nlora = {lora}'
                for name, lora in entries.items()
            ]
        )
    )
    with well_behaved("--config", str(file)) as daemon:
        yield daemon


@pytest.fixture
def client(registrations):
    with http(registrations.url) as client:
        yield client


def test_registrations_with_and_without_an_adapter_share_a_file_and_answer_side_by_side_as_alone(registrations, client):
    names = ("base", "tuned", "silent")
    alone = {name: ask(client, exactly(8, model=name)).text for name in names}
    assert alone["tuned"] != alone["base"] == alone["silent"]

    def ask_again(name):
        with http(registrations.url) as own:
            return name, {ask(own, exactly(8, model=name)).text for _ in range(2)}

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask_again, names * 2)) == [(name, {alone[name]}) for name in names * 2]
    maps = Path(f"/proc/{registrations.pid}/maps").read_text()
    assert maps.count(os.path.realpath(embedded_model_path())) == 1


def test_prompts_of_a_batch_have_the_adapter_too(client):
    alone = ask(client, exactly(6, model="tuned")).text
    response = client.post("/v1/completions", json={**exactly(6, model="tuned"), "prompt": [exactly(6)["prompt"]] * 3})
    assert [choice["text"] for choice in response.json()["choices"]] == [alone] * 3


def test_an_adapter_comes_and_goes_with_a_load(client, folder, tmp_path):
    base, tuned = (ask(client, exactly(8, model=name)).text for name in ("base", "tuned"))
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"GGUF")
    response = client.post(LOAD, json={"id": "silent", "lora": [str(outside)]})
    error = assert_error(response, 400, "invalid_request_error")
    assert (error["param"], "model_roots" in error["message"]) == ("lora", True)
    for lora, text in ((["style.gguf"], tuned), (["style.gguf:0.0"], base), ([], base)):
        named = [str(folder / item) for item in lora]
        assert client.post(LOAD, json={"id": "silent", "lora": named}).status_code == 200
        assert ask(client, exactly(8, model="silent")).text == text


def test_a_load_with_an_adapter_of_another_model_is_refused_and_changes_nothing(client, folder):
    named = folder / "other.gguf"
    before = ask(client, exactly(8, model="tuned")).text
    error = assert_error(client.post(LOAD, json={"id": "tuned", "lora": [str(named)]}), 400, "invalid_request_error")
    assert error["param"] == "lora"
    assert str(named) in error["message"]
    assert "would fit the model" in error["message"]
    assert ask(client, exactly(8, model="tuned")).text == before
    assert ask(client, exactly(8, model="base")).text != before


# -- starts that fail


def test_a_start_with_an_adapter_that_is_not_there_or_no_gguf_is_one_line(tmp_path):
    notes = tmp_path / "notes.gguf"
    notes.write_text("not an adapter")
    for path, words in ((tmp_path / "none.gguf", "No such file"), (notes, "is not a GGUF file")):
        code, said = run_to_end(trioserve("serve", str(tiny_model()), "--lora", f"{path}:0.5"))
        assert code == 2
        (line,) = said.splitlines()
        assert line.startswith(f"trioserve: lora: adapter file {str(path)!r}")
        assert words in line


def test_a_start_with_a_damaged_adapter_ends_and_says_so_in_one_line(tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_adapter(tiny_model()).read_bytes()[:-100])
    code, said = run_to_end(trioserve("serve", str(tiny_model()), "--lora", str(cut)))
    assert code == 1
    (line,) = [line for line in said.splitlines() if " error " in line]
    assert f"lora: adapter file {str(cut)!r} can't be used: it is truncated" in line
    code, said = run_to_end(trioserve("validate", str(tiny_model()), "--lora", str(cut)))
    assert code == 2
    assert f"lora: adapter file {str(cut)!r} can't be used" in said
