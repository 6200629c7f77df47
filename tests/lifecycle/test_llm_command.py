"""A program that knows no more of this server than its address: ``llm``, set up as its users do it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .client import ask, chat, completion, http
from .daemon import environment

RUN_SECONDS = 180
MODELS = """
- {{model_id: local, model_name: smollm2, api_base: "{url}/v1", supports_schema: true}}
- {{model_id: local-text, model_name: smollm2, api_base: "{url}/v1", completion: true}}
- {{model_id: other, model_name: nobody, api_base: "{url}/v1"}}
"""


@pytest.fixture
def llm(shared, tmp_path):
    """Runs the command with a folder of its own, which names the server as its users do."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=shared.url))
    env = environment({"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"})

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llm", *args],
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=RUN_SECONDS,
            check=False,
        )

    return run


def said(done):
    """What the command printed, which has a line's end more than the answer."""
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_prompts_and_what_follows_them(llm, shared):
    """Streamed and whole; a conversation that goes on from the log; and tokens as that log counts them."""
    greedy = ("-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "8")
    question = {"role": "user", "content": "Say hello."}
    with http(shared.url) as client:
        first = ask(client, chat(cache_prompt=False))
        turns = [question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
        second = ask(client, {**chat(cache_prompt=False), "messages": turns})
        text = ask(client, completion())
    assert said(llm(*greedy, "Say hello.")) == first.text
    assert said(llm("-c", *greedy[2:], "Go on.")) == second.text
    assert said(llm(*greedy, "--no-stream", "Say hello.")) == first.text
    assert said(llm("-m", "local-text", *greedy[2:], "Once upon a time")) == text.text
    *_, chatted, _, _ = json.loads(said(llm("logs", "-n", "4", "--json")))
    assert (chatted["input_tokens"], chatted["output_tokens"]) == (
        second.usage["prompt_tokens"],
        second.usage["completion_tokens"],
    )


def test_a_schema(llm):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    done = llm("-m", "local", "-o", "temperature", "0", "--schema", json.dumps(schema), "Name a city.")
    assert json.loads(said(done))["city"] in {"Rome", "Paris"}


def test_an_error_is_told_to_the_user(llm):
    done = llm("-m", "other", "Say hello.")
    assert done.returncode == 1
    assert "the model 'nobody' does not exist" in done.stderr
