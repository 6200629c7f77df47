"""Answers that follow a grammar: which tokens may come next, from llguidance.

llguidance keeps a parser of the grammar and, for each step, walks it against a trie of all tokens. What it can't honour
of a JSON schema it says, instead of ignoring it. One tokenizer for it is made for each model, when it is first needed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt

from trioserve.engine.base import Constraint, ConstraintError, ConstraintKind
from trioserve.engine.llama.triggered import Triggered
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.schemas import enforceable

_COMPILED = 16  # grammars that are kept for the next request with the same one,
_COMPILED_CHARACTERS = (
    512 * 1024
)  # as long as they are no longer than this together: one takes a hundred times its source
_BITS = 32
# llguidance compiles by recursion, some kilobytes for each reference of a chain, and an overflow ends the process: room
# for a source of a megabyte that is nothing but such a chain. Only what is used of it takes memory.
_DEEP_STACK = 512 * 1024 * 1024
_LAYOUTS = {"whitespace_flexible": (True, False), "item_separator": (",", ", "), "key_separator": (":", ": ")}
_OWN_OPTIONS = "x-guidance"  # where a schema could tell llguidance to ignore what it can't honour
# Between the parts of JSON: enough to lay it out, too little to go on for ever, as small models do where they may.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"}
# Without \u: a name that is spelt with it would pass for one that the schema doesn't know.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# In our grammars each of these has a line of its own.
_INLINE_SCHEMA = re.compile("%json (.*)")
_MARK = re.compile(r'^(mark_\w+: )(".*")$', re.MULTILINE)
_deep_stack_lock = threading.Lock()
Result = TypeVar("Result")


class Matcher:
    """The state of one sequence's grammar.

    Arguments:
        matcher: llguidance's, at the beginning of the grammar; owned by this object.
        n_vocab: size of the vocabulary.
    """

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-n_vocab // _BITS), np.int32)
        self._n_vocab = n_vocab

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def restrict(self, logits: npt.NDArray[np.float32]) -> None:
        """Make impossible what may not come next.

        Arguments:
            logits: ``[n_vocab]``, changed in place.

        Raises:
            ConstraintError: the grammar has become too complex, or allows nothing.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        allowed = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        logits[allowed == 0] = -np.inf

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen.

        Raises:
            ConstraintError: the grammar has become too complex.
        """
        self._matcher.consume_token(token)
        self._check()

    def follow(self, tokens: Sequence[int]) -> bool:
        """Take note of tokens that were chosen already; False where they may not stand here, and all is lost."""
        return bool(self._matcher.try_consume_tokens(list(tokens)) == len(tokens))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _reason(self._matcher)


class Constraints:
    """Compiles grammars for one model. Safe from every thread.

    Arguments:
        vocabulary: of the model; outlives this object.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, constraint: Constraint) -> None:
        """See that a grammar can be followed, and keep it for a while: the next ``matcher`` for it costs nothing.

        Raises:
            ConstraintError: it is wrong, can't be followed, or is too large. ``str()`` says what of it.
        """
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return
        compiled = self._compile(constraint)
        # What allows nothing at all shows at its first step.
        self._start(compiled).restrict(np.zeros(self._vocabulary.size, np.float32))
        with self._lock:
            self._compiled[constraint] = compiled
            while len(self._compiled) > 1 and (
                len(self._compiled) > _COMPILED
                or sum(len(kept.source) for kept in self._compiled) > _COMPILED_CHARACTERS
            ):
                self._compiled.popitem(last=False)

    def matcher(self, constraint: Constraint) -> Matcher | Triggered:
        """Start over with a grammar; see ``check`` for the errors."""
        self.check(constraint)
        with self._lock:
            compiled = self._compiled.get(constraint)
        if compiled is None:  # so many others came in between
            compiled = self._compile(constraint)
        if not constraint.trigger:
            return self._start(compiled)
        trigger, vocabulary = constraint.trigger.encode(), self._vocabulary
        start = functools.partial(self._start, compiled)
        return Triggered(trigger, start, vocabulary.text_piece, self._tokenizer.tokenize_bytes)

    def _start(self, compiled: Any) -> Matcher:
        return Matcher(compiled.deep_copy(), self._vocabulary.size)

    def _compile(self, constraint: Constraint) -> Any:
        import llguidance  # heavy: only where a request needs it

        tokenizer = self._tokenizer
        try:
            matcher = _with_deep_stack(
                lambda: llguidance.LLMatcher(tokenizer, _grammar(constraint, self._vocabulary), log_level=0)
            )
        except Exception as error:
            raise ConstraintError(_first_line(str(error))) from None
        if matcher.is_error():
            raise _reason(matcher)
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        vocabulary = self._vocabulary
        # llguidance takes a token of no text, which no grammar can ask for, by this first byte.
        tokens = [
            (b"\xff" if vocabulary.is_control(token) else b"") + vocabulary.text_piece(token)
            for token in range(vocabulary.size)
        ]
        tokenize = ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
        # Each of these calls keeps all other threads waiting, so there are two of half the length.
        tokenizer = llguidance.LLTokenizer.from_llamacpp(
            tokens=tokens,
            vocab_ptr=vocabulary.pointer,
            tokenize_fptr=tokenize,
            eos_token=list(vocabulary.end_tokens) or None,
            slices=[],
        )
        return tokenizer.with_slices(tokenizer.general_slices())


def _grammar(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """A constraint in llguidance's own form.

    Arguments:
        constraint: in its own language.
        vocabulary: of the model.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(_plain(constraint.source), defaults=_JSON_OPTIONS))
    if constraint.kind is ConstraintKind.REGEX:
        return str(LLMatcher.grammar_from_regex(constraint.source))
    if constraint.kind is ConstraintKind.GBNF:
        return str(LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.source)))
    source = _INLINE_SCHEMA.sub(lambda found: f"%json {_plain(found[1])}", constraint.source)
    return str(LLMatcher.grammar_from_lark(_MARK.sub(lambda found: found[0] + _or_token(found[2], vocabulary), source)))


def _or_token(literal: str, vocabulary: Vocabulary) -> str:
    token = vocabulary.marks.get(json.loads(literal).encode())
    return "" if token is None else f" | <[{token}]>"


def _plain(source: str) -> str:
    """A schema as llguidance takes it: an object, with no options of llguidance's own but those of layout."""
    schema = json.loads(source)
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"enum": []}
    options = schema.pop(_OWN_OPTIONS, {})
    if not (isinstance(options, dict) and all(value in _LAYOUTS.get(name, ()) for name, value in options.items())):
        raise ConstraintError(f"Unimplemented keys: {_OWN_OPTIONS}")
    made = enforceable(schema)
    assert isinstance(made, dict), "what goes in as an object comes out as one"
    return json.dumps({**made, _OWN_OPTIONS: {**options, **_ESCAPES}})


def _with_deep_stack(function: Callable[[], Result]) -> Result:
    """Call a function in a thread with a stack that no grammar overflows, and wait for it."""
    outcome: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _deep_stack_lock:
        usual = threading.stack_size(_DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def _reason(matcher: Any) -> ConstraintError:
    """Why a matcher can't go on."""
    message = str(matcher.get_error())
    # Its word for a step at which no token is allowed, not even the end.
    if message.startswith("NoExtensionBias"):
        return ConstraintError("it allows no answer")
    return ConstraintError(_first_line(message))


def _first_line(message: str) -> str:
    """The part of a message that says what is wrong, without the source it was found in."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")] or lines[:1] or ["it can't be followed"]
    if "panic" in told[0] or "recursion" in told[0]:
        return "it is too large, or nested too deeply"
    return told[0].removeprefix("error:").strip()[:300]
