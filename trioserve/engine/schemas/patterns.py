"""Regular expressions of JSON Schemas, which are JavaScript's, in the dialect of the grammar engine, which is Rust's.

Validators read the same expression with the engines of their own languages, and these differ in what is white space, a
digit or a line. What is made here matches only texts that JavaScript, Python and Rust agree about.
"""

from __future__ import annotations

import re

from trioserve.engine.base import ConstraintError

# Space to all of them, and what at least one of them takes for space.
_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_SPACE_TO_SOME = _SPACE + r"\x{1c}-\x{1f}\x{85}\x{feff}"
_WORD_TO_SOME = r"\p{L}\p{N}\p{M}\p{Pc}\x{200c}\x{200d}"
# By the letter of an escape: the members of a class that all agree about, and those that some count in.
_MEMBERS = {"s": (_SPACE, _SPACE_TO_SOME), "d": ("0-9", r"\p{Nd}"), "w": ("0-9A-Za-z_", _WORD_TO_SOME)}
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"
_TOKEN = re.compile(rf"{_ESCAPE}|\[\^?|\(\?(?:P?<|[^:=!)]*[:)]|[=!])|[*+?]|\{{\d+(?:,\d*)?\}}|.", re.DOTALL)
_CLASS_TOKEN = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_GROUP = re.compile(r"\(\?(?:[is]*:|[is]+\)|[=!]|P?<)")
_REPETITION = re.compile(r"[*+?]|\{.+")
_OTHER_MEANINGS = "AGzZUabBcehHkKNQEXRxu"  # escapes that are anchors, or other characters, to some of them


def translated(pattern: str, keyword: str) -> str:
    """An expression that matches nothing but what a schema's does.

    Arguments:
        pattern: of the schema.
        keyword: where it stands, for errors.

    Raises:
        ConstraintError: it says different things to different engines.
    """
    out: list[str] = []
    place, repetitions = 0, 0
    while place < len(pattern):
        found = _TOKEN.match(pattern, place)
        assert found is not None, "any character is a token"
        token, place = found[0], found.end()
        repetitions = repetitions + 1 if _REPETITION.fullmatch(token) else 0
        if repetitions > 2 or (repetitions == 2 and token != "?"):
            raise ConstraintError(f"{keyword}: {token!r} after a repetition")
        if token.startswith("["):
            members, place = _members(pattern, place, keyword, negated=token == "[^")
            out.append(f"{token}{members}]")
        else:
            out.append(_outside(token, keyword))
    return "".join(out)


def without_text(character: str) -> bool:
    """Tell whether the grammar engine has no way to write a character in JSON; it would leave it out."""
    return (character < " " and character not in "\b\t\n\f\r") or character == "\x7f"


def _outside(token: str, keyword: str) -> str:
    """A token that stands in no class."""
    if token == ".":
        return _NO_LINE_END
    if token.startswith("(?") and not _GROUP.match(token):
        raise ConstraintError(f"{keyword}: {token!r} is not supported")
    if token[1:].lower() in _MEMBERS:
        certain, possible = _MEMBERS[token[1:].lower()]
        return f"[{certain}]" if token.islower() else f"[^{possible}]"
    return _character(token, keyword)


def _members(pattern: str, place: int, keyword: str, *, negated: bool) -> tuple[str, int]:
    """What stands in a class, and where the pattern goes on. Rust's classes can be nested and be calculated with."""
    tokens: list[str] = []
    for found in _CLASS_TOKEN.finditer(pattern, place):
        if found[0] == "]":
            if not tokens:
                raise ConstraintError(f"{keyword}: an empty class")
            return "".join(
                _member(tokens, index, keyword, negated=negated) for index in range(len(tokens))
            ), found.end()
        if found[0] == "-" and tokens[-1:] == ["-"]:
            raise ConstraintError(f"{keyword}: '--' in a class")
        tokens.append(found[0])
    raise ConstraintError(f"{keyword}: unclosed class")


def _member(tokens: list[str], index: int, keyword: str, *, negated: bool) -> str:
    token, before, after = tokens[index], tokens[index - 1 : index], tokens[index + 1 : index + 2]
    if token in "[&~":
        return "\\" + token
    if token == "\\b":
        return r"\x08"
    if token[1:].lower() in _MEMBERS:
        certain, possible = _MEMBERS[token[1:].lower()]
        if token.islower():
            return possible if negated else certain
        return f"[^{certain if negated else possible}]"
    if token == "-" and any(beside[1:].lower() in _MEMBERS for beside in (*before, *after)):
        return r"\-"  # beside a class it is itself, and not a range to or from what that is made of
    return _character(token, keyword, dropped=negated or "-" in (*before, *after))


def _character(token: str, keyword: str, *, dropped: bool = False) -> str:
    """A character or an escape of one.

    Arguments:
        dropped: it may be left out, being one of a range or of those that may not be.
    """
    escaped = token[1:] if token.startswith("\\") else ""
    if escaped in _OTHER_MEANINGS and escaped:
        raise ConstraintError(f"{keyword}: {token} is not supported")
    character = chr(int(escaped[1:], 16)) if len(escaped) > 1 else {"v": "\v", "0": "\0"}.get(escaped, token)
    if len(character) == 1 and without_text(character) and not dropped:
        raise ConstraintError(f"{keyword}: {character!r} can't be written")
    return escaped if escaped in ("<", ">") else token
