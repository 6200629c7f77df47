"""Keys of clients: where they come from, what may be one, and that nothing ever prints them."""

from __future__ import annotations

import json
import traceback

import pytest
from pydantic import ValidationError
from tiny_models import tiny_model

from trioserve import cli
from trioserve.config import Config, load_config
from trioserve.errors import ConfigError

SECRET = "sk-Tru3-S3cret"
BOTH = pytest.mark.parametrize("name", ["api_keys", "admin_keys"])


def revealed(keys):
    return [key.get_secret_value() for key in keys]


def write(folder, text, name="c.toml"):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def refusal(file=None, environ=None, **flags):
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ or {}, flags)
    assert caught.value.message.isprintable()
    return caught.value.message


# Sources


def test_without_any_the_server_is_open():
    assert Config().api_keys == Config().admin_keys == ()
    assert Config(api_keys=[]).api_keys == ()


@BOTH
@pytest.mark.parametrize("name_of_file", ["c.toml", "c.json"])
def test_a_file_has_a_list(tmp_path, name, name_of_file):
    models = [{"path": "m.gguf"}]
    text = json.dumps({name: ["one", "two"], "models": models})
    file = write(tmp_path, text if name_of_file == "c.json" else f"{name} = ['one', 'two']\n", name_of_file)
    assert revealed(getattr(load_config(file, {}, {}), name)) == ["one", "two"]


@BOTH
def test_environment_and_flags_are_separated_by_commas_and_later_ones_win(tmp_path, name):
    file = write(tmp_path, f"{name} = ['of-the-file']\n")
    environ = {f"TRIOSERVE_{name.upper()}": "one, two"}
    assert revealed(getattr(load_config(file, environ, {}), name)) == ["one", "two"]
    assert revealed(getattr(load_config(file, environ, {name: "three"}), name)) == ["three"]


def test_a_key_file_has_one_on_each_line(tmp_path):
    write(tmp_path, "# of the team\n\n  one\t\r\ntwo,and#more\n   # none\nthree", "keys")
    file = write(tmp_path, "api_keys = ['zero', '@keys']\n")
    expected = ["one", "two,and#more", "three"]
    assert revealed(load_config(file, {}, {}).api_keys) == ["zero", *expected]
    assert revealed(load_config(None, {"TRIOSERVE_API_KEYS": f"@{tmp_path}/keys,four"}, {}).api_keys) == [
        *expected,
        "four",
    ]
    assert revealed(load_config(None, {}, {"admin_keys": f"@{tmp_path}/keys"}).admin_keys) == expected


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path):
    write(tmp_path, "\ufeffone", "keys")
    assert revealed(load_config(None, {}, {"api_keys": f"@{tmp_path}/keys"}).api_keys) == ["one"]


def test_files_are_read_for_the_operators_sources_only(tmp_path):
    with pytest.raises(ValidationError, match="operator's configuration only"):
        Config(api_keys=(f"@{write(tmp_path, SECRET, 'keys')}",))


# What may be a key


@pytest.mark.parametrize("key", ["x", "!~", "a" * 5000, "quote\"'\\", "a,b"])
def test_any_printable_ascii_is_a_key(key):
    assert revealed(Config(api_keys=(key,)).api_keys) == [key]


@BOTH
@pytest.mark.parametrize(
    "key", ["", " ", "sk ", "s k", "sk\n", "sk\t", "sk\0", "sk\x7f", "schlüssel", "\N{KEY}", "\udcff", 7, None, b"sk"]
)
def test_anything_else_is_none(name, key):
    for value in ((key,), ("good", key)):
        with pytest.raises(ValidationError) as caught:
            Config(**{name: value})
        assert caught.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize("value", ["sk", {"sk"}, {"sk": 1}, 7, None])
def test_only_a_list_is_one(value):
    with pytest.raises(ValidationError):
        Config(api_keys=value)


@pytest.mark.parametrize("text", ["", " ", ",", "sk,", "sk,,other"])
def test_a_variable_that_was_left_empty_does_not_open_the_server(text):
    assert "is empty (environment variable TRIOSERVE_API_KEYS)" in refusal(None, {"TRIOSERVE_API_KEYS": text})
    assert "is empty (flag --admin-keys)" in refusal(admin_keys=text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key"),
        (b"\n# sk\n\n", "holds no key"),
        (b"sk\nS k\n", "line 2 of 'KEYS' is not of printable ASCII"),
        (b"sk\n@other\n", "line 2 of 'KEYS' begins with '@'"),
        (b"sk\xff", "is not UTF-8"),
        ("schlüssel".encode(), "line 1 of 'KEYS' is not of printable ASCII"),
        (b"s" * (2**20 + 1), "is larger than 1048576 bytes"),
        (None, "No such file"),
    ],
    ids=str,
)
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path, content, said):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    message = refusal(api_keys=f"@{path}")
    assert message.startswith("api_keys: ")
    assert said in message.replace(str(path), "KEYS")
    assert message.endswith("(flag --api-keys)")


# Nothing prints them


def test_no_form_of_a_configuration_shows_keys():
    config = Config(api_keys=(SECRET,), admin_keys=(SECRET + "2",))
    shown = [repr(config), str(config), repr(config.model_dump()), config.model_dump_json(), f"{config.api_keys}"]
    assert not [text for text in shown if SECRET in text]
    assert Config(**config.model_dump()) == config


@pytest.mark.parametrize("toml", [f"'{SECRET}'", f"['{SECRET} ']", f"['good', '{SECRET}ü']", f"[['{SECRET}']]"])
def test_errors_name_the_setting_and_no_key(tmp_path, toml):
    message = refusal(write(tmp_path, f"api_keys = {toml}\n"))
    assert message.startswith("api_keys: ")
    assert SECRET not in message


@pytest.mark.parametrize("value", [SECRET, (f"{SECRET} ",), {SECRET: 1}, ((SECRET,),)])
def test_errors_of_the_validation_itself_hold_no_key(value):
    with pytest.raises(ValidationError) as caught:
        Config(api_keys=value)
    assert SECRET not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_errors_of_other_settings_hold_no_key():
    with pytest.raises(ValidationError) as caught:
        Config(api_keys=(SECRET,), port=-1, keyfile="k.pem")
    assert SECRET not in str(caught.value)


def test_the_command_line_does_not_show_them(monkeypatch, capsys):
    model_file = tiny_model()
    monkeypatch.setenv("TRIOSERVE_API_KEYS", SECRET)
    assert cli.main(["validate", str(model_file)]) == 0
    monkeypatch.setenv("TRIOSERVE_API_KEYS", f"{SECRET} ,{SECRET}ü")
    assert cli.main(["validate", str(model_file), "--admin-keys", f"{SECRET} x"]) == 2
    out, err = capsys.readouterr()
    assert "api_keys: key 2 is not of printable ASCII" in err
    assert SECRET not in out + err
