"""Text to tokens and tokens to bytes, for one loaded model. Read-only and safe from every thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from trioserve.engine.base import GapTokens
from trioserve.engine.llama.special import Cutter, Special

_PIECE_BYTES = 64
_LONG_BYTES = 8192  # of text; shorter ones can't have so many special tokens that it matters
_WORDPIECE = 3  # LLAMA_VOCAB_TYPE_WPM
_LOOKED_FOR = (
    llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
)


class Vocabulary:
    """The tokenizer of one model.

    Arguments:
        model: a ``llama_model`` pointer that outlives this object.

    Attributes:
        size: how many tokens there are.
        end_tokens: all tokens that end an answer, in rising order.
    """

    def __init__(self, model: Any) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        # Filled as pieces are met: a whole vocabulary would cost a tenth of a second at load for what is mostly unused.
        self._pieces: list[bytes | None] = [None] * self.size
        # At load: with the first request that asks for them, all others would wait.
        self.end_tokens: Sequence[int] = [token for token in range(self.size) if self.ends_generation(token)]

    @property
    def pointer(self) -> Any:
        """The ``llama_vocab`` pointer."""
        return self._vocab

    @property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, where the vocabulary has one."""
        return self._optional(llama_cpp.llama_vocab_bos(self._vocab))

    def special_text(self, token: int | None) -> str:
        """The text of a special token, empty for None."""
        return "" if token is None else self._render(token, special=True).decode("utf-8", "replace")

    @property
    def bos_text(self) -> str:
        """The beginning-of-sequence token as text."""
        return self.special_text(self.bos)

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token as text."""
        return self.special_text(self._optional(llama_cpp.llama_vocab_eos(self._vocab)))

    @property
    def gap(self) -> GapTokens | None:
        """The tokens for filling gaps, where the vocabulary has all of them."""
        asked = (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
        tokens = GapTokens(*(find(self._vocab) for find in asked))
        return tokens if min(tokens) >= 0 else None

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to an answer; none for control tokens."""
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._render(token, special=False)
        return piece

    def text_piece(self, token: int) -> bytes:
        """The bytes of a token, those of control tokens too."""
        return self._render(token, special=True)

    def is_control(self, token: int) -> bool:
        """Whether a token is a mark for the model and no text: by its type, or by its look where a user defined it."""
        attributes = llama_cpp.llama_vocab_get_attr(self._vocab, token)
        if attributes & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED:
            text = self.text_piece(token)
            return text.startswith(b"<") and text.endswith(b">")
        return bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)

    def ends_generation(self, token: int) -> bool:
        """Whether the model says with this token that its answer is complete."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @functools.cached_property
    def marks(self) -> Mapping[bytes, int]:
        """The tokens that are no text, by what they look like."""
        return {self.text_piece(token): token for token in range(self.size) if self.is_control(token)}

    @functools.cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token, special ones included; at least 1."""
        return max(1, *(len(self._render(token, special=True)) for token in range(self.size)))

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        """Turn text into token ids; see ``engine.base.Weights.tokenize``."""
        data = text.encode("utf-8")
        if len(data) < _LONG_BYTES:
            return self._tokenize(data, special=special, add_bos=add_bos)
        first, *others = self._cutter.parts(data, special=special)
        tokens = self._tokenize(first, special=special, add_bos=add_bos)
        end = [tokens.pop()] if others and add_bos and self._adds_end else []
        for part in others:
            tokens += self._tokenize(part, special=special, add_bos=False)
        return tokens + end

    def _tokenize(self, data: bytes, *, special: bool, add_bos: bool) -> list[int]:
        room = len(data) + 8
        for _ in range(2):
            tokens = (ctypes.c_int32 * room)()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, add_bos, special)
            if count >= 0:
                return tokens[:count]
            room = -count
        raise RuntimeError(f"the tokenizer changed its mind about {len(data)} bytes of text")

    @property
    def _adds_end(self) -> bool:
        """Whether a text that gets special tokens around it has one at its end."""
        wordpiece = llama_cpp.llama_vocab_type(self._vocab) == _WORDPIECE
        return bool(wordpiece or llama_cpp.llama_vocab_get_add_eos(self._vocab))

    @functools.cached_property
    def _cutter(self) -> Cutter:
        return Cutter([special for token in range(self.size) if (special := self._special(token)).text])

    def _special(self, token: int) -> Special:
        """A token as the tokenizer looks for it in texts; without a text where it does not."""
        attributes = llama_cpp.llama_vocab_get_attr(self._vocab, token)
        text = llama_cpp.llama_vocab_get_text(self._vocab, token) if attributes & _LOOKED_FOR else b""
        return Special(
            text,
            plain=not attributes & (_LOOKED_FOR & ~llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED),
            strips_left=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP),
            strips_right=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP),
        )

    def _render(self, token: int, *, special: bool) -> bytes:
        room = _PIECE_BYTES
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise RuntimeError(f"the vocabulary changed its mind about token {token}")

    @staticmethod
    def _optional(token: int) -> int | None:
        return None if token < 0 else token
