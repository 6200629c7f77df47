"""The command line; the server itself is replaced by a fake module."""

import importlib.metadata
import os
import signal
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
from gguf_parts import STRING, entry, text

from trioserve import cli
from trioserve.config import settings, settings_by_flag
from trioserve.errors import ConfigError, InvalidModelError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def signals():
    """The signal handlers of the test run, as they were when the test is over: serving installs its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TRIOSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch):
    """The configurations that were handed to the fake server, which returns 7."""
    found = []
    module = types.ModuleType("trioserve.serve")
    module.serve = lambda config: found.append(config) or 7
    monkeypatch.setitem(sys.modules, "trioserve.serve", module)
    return found


@pytest.fixture
def gguf(tmp_path):
    file = tmp_path / "tiny.gguf"
    architecture = entry("general.architecture", STRING, text("llama"))
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + architecture)
    return file


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_serve_hands_over_the_configuration_and_returns_its_code(served, gguf):
    assert cli.main(["serve", str(gguf), "--slots", "4", "--n-ctx=2048", "--port", "0", "--no-mmap", "--lazy"]) == 7
    (config,) = served
    (model,) = config.models
    assert config.port == 0
    assert (model.id, model.path, model.slots, model.n_ctx) == ("tiny", gguf, 4, 2048)
    assert (model.mmap, model.lazy, model.mlock) == (False, True, False)


@pytest.mark.parametrize("order", ["first", "middle", "last"])
def test_model_may_stand_anywhere(served, order):
    parts = {
        "first": ["m.gguf", "--slots", "2", "--gpu-layers", "-1"],
        "middle": ["--slots", "2", "m.gguf", "--gpu-layers", "-1"],
        "last": ["--slots", "2", "--gpu-layers", "-1", "m.gguf"],
    }
    assert cli.main(["serve", *parts[order]]) == 7
    (model,) = served[0].models
    assert (str(model.path), model.slots, model.gpu_layers) == ("m.gguf", 2, -1)


def test_file_environment_and_flags_meet(served, tmp_path, monkeypatch):
    file = tmp_path / "c.toml"
    file.write_text("port = 1\nlog_level = 'error'\n[[models]]\npath = 'm.gguf'")
    monkeypatch.setenv("TRIOSERVE_LOG_LEVEL", "debug")
    monkeypatch.setenv("TRIOSERVE_PORT", "2")
    assert cli.main(["serve", "--config", str(file), "--port", "3"]) == 7
    (config,) = served
    assert (config.port, config.log_level, config.models[0].path) == (3, "debug", tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "m.gguf", "--slots", "17"], "slots: 17 is not an integer 1..16 (flag --slots)"),
        (["validate", "m.gguf", "--port", "x"], "port: 'x' is not an integer 0..65535 (flag --port)"),
        (["serve", "m.gguf", "--slot", "4"], "unknown argument '--slot'; did you mean --slots?"),
        (["serve", "m.gguf", "--n-ctxx=4"], "unknown argument '--n-ctxx'; did you mean --n-ctx?"),
        (["serve", "m.gguf", "other.gguf"], "unknown argument 'other.gguf'"),
        (["serve", "--config", "c.yaml"], "configuration file 'c.yaml' must end in .toml or .json (flag --config)"),
        (["serve", ""], "path: the path is empty (model argument)"),
    ],
)
def test_mistakes_are_one_line_and_code_2(served, capsys, arguments, expected):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"trioserve: {expected}\n"
    assert served == []


@pytest.mark.parametrize("error", [ConfigError("port 80 is\ntaken"), InvalidModelError("no GGUF")])
def test_errors_of_the_server_start_are_one_line_and_code_2(monkeypatch, capsys, error):
    def serve(_):
        raise error

    module = types.ModuleType("trioserve.serve")
    module.serve = serve
    monkeypatch.setitem(sys.modules, "trioserve.serve", module)
    assert cli.main(["serve", "m.gguf"]) == 2
    expected = error.message.replace("\n", "\\n")
    assert capsys.readouterr() == ("", f"trioserve: {expected}\n")


def test_other_errors_are_not_hidden(monkeypatch):
    module = types.ModuleType("trioserve.serve")
    module.serve = lambda _: {}["bug"]
    monkeypatch.setitem(sys.modules, "trioserve.serve", module)
    with pytest.raises(KeyError):
        cli.main(["serve", "m.gguf"])


def test_validate_prints_the_models(served, capsys, gguf, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[[models]]\npath='tiny.gguf'\n[[models]]\npath='tiny.gguf'\nid='two'\nslots=3")
    assert cli.main(["validate", "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"tiny {gguf} slots=1\ntwo {gguf} slots=3\nconfiguration is valid\n"
    assert served == []


def test_validate_looks_at_every_file(capsys, gguf, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[[models]]\npath='a.gguf'\n[[models]]\npath='tiny.gguf'\n[[models]]\npath='b.gguf'")
    assert cli.main(["validate", "--config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == f"tiny {gguf} slots=1\n"
    assert [line.split(" cannot")[0] for line in err.splitlines()] == [
        f"trioserve: model 'a': model file '{tmp_path}/a.gguf'",
        f"trioserve: model 'b': model file '{tmp_path}/b.gguf'",
    ]


@pytest.mark.parametrize("command", ["serve", "validate"])
def test_help_names_every_setting(capsys, command):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for info in settings_by_flag().values():
        assert f" {info.flag}" in text
        # argparse may break a line after a dash, which joins with a blank.
        assert info.description.replace("- ", "-") in text.replace("- ", "-")
    assert " --no-lazy" in text
    assert "(default: 8080)" in text


def test_every_setting_has_its_flag():
    assert {info.flag for info in settings()} == {info.flag for info in settings_by_flag().values()}
    assert settings_by_flag()["n_ctx"].flag == "--n-ctx"


@pytest.mark.parametrize("arguments", [[], ["sirve"], ["serve", "--slots"]])
def test_wrong_usage_is_code_2(served, capsys, arguments):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert "usage: trioserve" in capsys.readouterr().err


@pytest.mark.parametrize(("installed", "expected"), [("1.2.3", "trioserve 1.2.3\n"), (None, "trioserve 0+unknown\n")])
def test_version(monkeypatch, capsys, installed, expected):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return {"trioserve": installed}[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == expected


# What takes long to import, and the rooms that only one command needs.
HEAVY = {
    *(
        "trio",
        "quart",
        "hypercorn",
        "h2",
        "llama_cpp",
        "llguidance",
        "numpy",
        "jinja2",
        "prometheus_client",
        "pydantic",
    ),
    *("asyncio", "multiprocessing", "httpx", "trioserve.config", "trioserve.bench", "trioserve.service"),
}
CONFIGURATION = {"pydantic", "trioserve.config"}


def heavy_after(code):
    """What of all that is imported once some code has run in a new process."""
    done = run_python(f"import sys\n{code}\nprint(' '.join(sys.modules))")
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stdout.splitlines()[-1].split())


def after(arguments):
    call = f"main({arguments!r})"
    return f"from trioserve.cli import main\ntry:\n    {call}\nexcept SystemExit as left:\n    assert not left.code"


def test_the_package_itself_imports_nothing_heavy():
    assert heavy_after("import trioserve; trioserve.app") == set()


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--version"], set()),
        (["--help"], set()),
        (["serve", "--help"], CONFIGURATION),
        (["validate", "--help"], CONFIGURATION),
        (["bench", "--help"], {"trioserve.bench"}),
    ],
)
def test_help_and_version_import_nothing_heavy(arguments, needed):
    assert heavy_after(after(arguments)) == needed


def test_validation_imports_no_server(gguf):
    assert heavy_after(after(["validate", str(gguf)])) == CONFIGURATION


def test_the_server_imports_no_engine_before_a_model_is_loaded():
    engine = {"llama_cpp", "llguidance", "numpy"}
    others = {"httpx", "trioserve.bench"}
    assert heavy_after("import trioserve.serve") & (engine | others) == set()


def test_a_mistake_of_bench_needs_no_configuration():
    assert heavy_after(after(["bench", "nowhere"])) == {"trioserve.bench"}


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "trioserve", "validate", "none.gguf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "trioserve: model 'none': model file 'none.gguf' cannot be read: No such file or directory\n"


def test_validate_tells_of_a_template_that_is_none(tmp_path, capsys):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    assert cli.main(["validate", str(path), "--chat-template", "{% if"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("trioserve: chat_template of model 'tiny':")
    assert complaint.count("tiny") == complaint.count("\n") == 1


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_without_a_stem_is_refused_as_a_folder(folder, capsys):
    assert cli.main(["validate", folder]) == 2
    assert capsys.readouterr().err == f"trioserve: model '{folder}': model file '{folder}' is a directory\n"


def test_validate_looks_at_the_whole_header(gguf, capsys):
    gguf.write_bytes(gguf.read_bytes()[:-1])
    assert cli.main(["validate", str(gguf)]) == 2
    assert capsys.readouterr().err == (
        f"trioserve: model 'tiny': model file '{gguf}' can't be used: it ends inside its header\n"
    )


def test_the_program_ends_with_the_code_and_what_was_said(gguf):
    command = [sys.executable, "-m", "trioserve", "validate", str(gguf)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1], ended.stderr) == (0, "configuration is valid", "")
    ended = subprocess.run([*command[:-1], "none.gguf"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "none.gguf" in ended.stderr
