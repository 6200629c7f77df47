"""What it costs that answers keep to a form: CPU time for each token, and for compiling the form.

Prints a table in Markdown. Rounds of the forms alternate. Decodes run on one thread, and only its own CPU time counts.
The share of the form in that is measured by itself, over the tokens of the answer: from run to run a decode differs by
more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from trioserve.engine.base import (
    Constraint,
    ConstraintKind,
    Finished,
    LoadOptions,
    SequenceRequest,
    Session,
    SessionOptions,
    Token,
    Weights,
)
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.llama.weights import LlamaWeights
from trioserve.engine.sampling import Sampling

import numpy as np  # isort: skip - after llama_cpp

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 400},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}},
    },
    "required": ["name", "age", "friends"],
    "$defs": {"friend": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
_DATES = {"type": "array", "items": {"type": "string", "format": "date-time"}, "minItems": 100}
_CALL = 'start: "a"\n'
FORMS = {
    "none": None,
    "`json_schema`: texts": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_PERSON)),
    "`json_schema`: date-times": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_DATES)),
    "`regex`": Constraint(ConstraintKind.REGEX, r"([A-Z][a-z]+( [a-z]+){3,9}\. ){50}"),
    "`grammar`": Constraint(ConstraintKind.GBNF, 'root ::= line{100}\nline ::= [a-z]+ ": " [0-9]+ "\\n"\n'),
    "calls, not begun": Constraint(ConstraintKind.LARK, _CALL, trigger="<tool_call>"),
}
PROMPT = "Describe a person in JSON:\n"


def spent(function: Callable[[], object]) -> float:
    """Seconds of CPU time of this thread."""
    before = time.thread_time()
    function()
    return time.thread_time() - before


def decode(
    session: Session, prompt: list[int], constraint: Constraint | None, tokens: int, seed: int
) -> tuple[float, list[int]]:
    """Seconds of CPU time for each token of one answer, and its tokens."""
    sampling = Sampling(temperature=1.0, seed=seed)
    number = session.add(SequenceRequest(prompt, tokens, sampling, constraint=constraint, reuse=False))
    told: list[int] = []
    began, ended = 0.0, False
    while not ended:
        for event in session.step(1):
            ended = ended or isinstance(event, Finished)
            if isinstance(event, Token):
                told.append(event.token)
                began = began or time.thread_time()  # after the prompt
    spent_on_each = (time.thread_time() - began) / max(1, len(told) - 1)
    session.remove(number)
    return spent_on_each, told


def following(weights: LlamaWeights, constraint: Constraint, tokens: list[int]) -> float:
    """Seconds of CPU time for each token that a form alone takes."""
    matcher = weights._constraints.matcher(constraint)
    logits = np.zeros(weights.vocab_size, np.float32)
    began = time.thread_time()
    for token in tokens:
        matcher.restrict(logits)
        matcher.accept(token)
    return (time.thread_time() - began) / len(tokens)


def compiling(weights: Weights, constraint: Constraint, number: int) -> float:
    """Seconds for a form that was not met before."""
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        source = json.dumps({**json.loads(source), "title": str(number)})
    elif constraint.kind is ConstraintKind.REGEX:
        source += f"{number}"
    else:
        source += "\n" * (number + 1)
    before = time.perf_counter()  # the work is done by another thread
    weights.check_constraint(Constraint(constraint.kind, source, constraint.trigger))
    return time.perf_counter() - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    weights = LlamaEngine().load(Path(options.model), LoadOptions())
    session = weights.open_session(SessionOptions(n_ctx=1024))
    prompt = weights.tokenize(PROMPT, special=False, add_bos=True)
    first = spent(lambda: weights.check_constraint(Constraint(ConstraintKind.REGEX, "first")))
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    shares: dict[str, list[float]] = {name: [] for name in FORMS}
    compiled: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(options.rounds):
        for name, constraint in FORMS.items():
            if constraint is not None:
                compiled[name].append(compiling(weights, constraint, number))
            time_of_each, told = decode(session, prompt, constraint, options.tokens, number)
            times[name].append(time_of_each)
            shares[name].append(0.0 if constraint is None else following(weights, constraint, told))
    print("| form | tokens/s of CPU time | ms of it for the form, each token | ms to compile |\n|---|---|---|---|")
    for name, found in times.items():
        compile_ms = f"{statistics.median(compiled[name]) * 1000:.0f}" if compiled[name] else ""
        share = statistics.median(shares[name]) * 1000
        print(f"| {name} | {1 / statistics.median(found):.1f} | {share:.2f} | {compile_ms} |")
    print(f"\nThe first form after a load: {first * 1000:.0f} ms for {weights.vocab_size} tokens.")
    session.close()
    weights.close()


if __name__ == "__main__":
    main()
