"""The header of a GGUF file, read without llama.cpp.

What a file says about itself can be checked before anything live is touched: its architecture, its context length, and
the types and sizes of its tensors. Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
Long arrays are skipped, so a header costs milliseconds whatever the size of the model. Only whether the header can be
read at all is seen here; ``engine.model_file`` sees whether llama.cpp survives what it says.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Bounds on what a header may claim; a damaged or hostile file must not make us allocate.
MAX_ENTRIES = 1 << 20
MAX_TEXT = 1 << 26  # bytes of all texts that are kept, of the vocabulary, and of any text inside of an array
MAX_TOKENS = 1 << 20  # of the vocabulary
MAX_SKIPPED = 1 << 22  # texts and arrays inside of arrays, all together
MAX_KEPT = 1 << 12  # numbers of an array that is kept
MAX_DIMENSIONS = 4
MAX_NESTING = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
_UINT16, _INT32, _FLOAT32, _STRING, _ARRAY = 2, 5, 6, 8, 9
_BYTE_TOKEN = 6  # of the kinds of tokens
_WINDOW = 1 << 18  # bytes that are read at once of an array of texts
_LENGTH = struct.Struct("<Q")

# Of each ggml type: elements in a block, bytes of a block.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip

Value = int | float | bool | str | tuple[int, ...]


class HeaderError(ValueError):
    """The file is not a GGUF that could be loaded. ``str()`` says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's entry: its name, shape, ggml type, and where its data lies after the header."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        block, size = _BLOCKS[self.type]
        return math.prod(self.shape) // block * size


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What of a vocabulary can hurt a tokenizer.

    Attributes:
        tokens: their texts, as llama.cpp reads them: up to the first NUL, and a placeholder for an empty one.
        has_byte_tokens: some tokens are marked as standing for a byte.
    """

    tokens: frozenset[bytes] = frozenset()
    has_byte_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself.

    Attributes:
        metadata: numbers, texts and short arrays of integers by key; of any other array, its length.
        tensors: in file order.
        file_size: bytes of the whole file.
        data_start: where in the file the tensors' data begins.
        vocabulary: of a file with ``tokenizer.ggml.tokens``.
    """

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    file_size: int
    data_start: int = 0
    vocabulary: Vocabulary = Vocabulary()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return str(self.metadata["general.architecture"])

    @property
    def weights_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def number(self, key: str, default: int = 0) -> int:
        """An integer of the architecture's own, by its key without the architecture's prefix.

        Of one that is given for each layer, the largest. What is no integer, or negative, counts as not given.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            value = max(value, default=default)
        return value if isinstance(value, int) and value >= 0 else default


def read_header(path: Path, *, named: bool = True) -> Header:
    """Read and check the header of a GGUF file.

    Arguments:
        path: of the file.
        named: it has to name its architecture; the later files of a split model don't.

    Raises:
        OSError: the file can't be read.
        HeaderError: it is no GGUF, damaged, truncated, or claims the impossible.
    """
    with path.open("rb") as file:
        header = _Reader(file, os.fstat(file.fileno()).st_size).header()
    if named and not isinstance(header.metadata.get("general.architecture"), str):
        raise HeaderError("it does not name its architecture")
    return header


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._text_left = MAX_TEXT
        self._skipped = 0
        self._tokens: frozenset[bytes] = frozenset()
        self._has_byte_tokens = False

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise HeaderError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise HeaderError(f"its version is {version}; versions 2 and 3 are known")
        n_tensors, n_entries = self._count("tensors"), self._count("metadata entries")
        metadata: dict[str, Value] = {}
        for _ in range(n_entries):
            key = self._name("key")
            if key in metadata:
                raise HeaderError(f"it has the key {key!r} twice")
            metadata[key] = self._value(key, self._number("<I"))
        tensors = tuple(self._tensor() for _ in range(n_tensors))
        start = self._data_start(metadata)
        self._check_extent(start, tensors)
        return Header(metadata, tensors, self._size, start, Vocabulary(self._tokens, self._has_byte_tokens))

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise HeaderError("it ends inside its header")
        return data

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _count(self, what: str) -> int:
        count = self._number("<Q")
        if count > MAX_ENTRIES:
            raise HeaderError(f"it claims {count} {what}")
        return count

    def _name(self, what: str) -> str:
        """A key or a tensor's name. One with a NUL is another name to llama.cpp, which would slip past every check."""
        name = self._text()
        if "\0" in name:
            raise HeaderError(f"it has a {what} with a NUL: {name!r}")
        return name

    def _text(self) -> str:
        length = self._number("<Q")
        if length > min(self._text_left, self._size):
            raise HeaderError(f"it claims a text of {length} bytes")
        self._text_left -= length
        return self._take(length).decode("utf-8", "replace")

    def _value(self, key: str, kind: int) -> Value:
        if key == "split.no" and kind != _UINT16:
            raise HeaderError("its split.no is not an unsigned number of 16 bits")
        if key == "adapter.lora.alpha" and kind != _FLOAT32:
            raise HeaderError("its adapter.lora.alpha is not a number of 32 bits with a fraction")
        if kind == _STRING:
            return self._text().partition("\0")[0]  # what follows, llama.cpp doesn't see
        if kind == _ARRAY:
            return self._array(key)
        form = _SCALARS.get(kind)
        if form is None:
            raise HeaderError(f"it has a metadata value of the unknown type {kind}")
        value: Value = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _array(self, key: str) -> Value:
        kind, length = self._array_head(0)
        if key == "tokenizer.ggml.tokens" and kind == _STRING:
            self._tokens = self._vocabulary(length)
            return length
        if key == "tokenizer.ggml.token_type" and kind == _INT32 and length <= MAX_TOKENS:
            kinds = memoryview(self._take(length * 4)).cast("i")
            self._has_byte_tokens = _BYTE_TOKEN in kinds
            return length
        if kind in _INTEGERS and length <= MAX_KEPT:
            form = f"<{length}{_SCALARS[kind][1]}"
            return struct.unpack(form, self._take(struct.calcsize(form)))
        self._skip_array(kind, length, 0)
        return length

    def _array_head(self, depth: int) -> tuple[int, int]:
        kind, length = self._number("<I"), self._number("<Q")
        if depth >= MAX_NESTING:
            raise HeaderError(f"it claims an array that is {depth} arrays deep")
        if length > self._size:
            raise HeaderError(f"it claims an array of {length} values, and has {self._size} bytes")
        return kind, length

    def _skip_array(self, kind: int, length: int, depth: int) -> None:
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[kind]))
            return
        if kind not in (_STRING, _ARRAY):
            raise HeaderError(f"it has an array of the unknown type {kind}")
        self._skipped += length
        if self._skipped > MAX_SKIPPED:
            raise HeaderError(f"it claims arrays of {self._skipped} texts")
        if kind == _STRING:
            deque(self._texts(length), maxlen=0)
            return
        for _ in range(length):
            self._skip_array(*self._array_head(depth + 1), depth + 1)

    def _vocabulary(self, length: int) -> frozenset[bytes]:
        if length > MAX_TOKENS:
            raise HeaderError(f"its tokenizer.ggml.tokens claims {length} tokens; {MAX_TOKENS} can be loaded")
        tokens = set()
        for index, text in enumerate(self._texts(length)):
            self._text_left -= len(text)
            token = text.partition(b"\0")[0] or b"[EMPTY_%d]" % index
            if token in tokens:
                raise HeaderError(f"its tokenizer.ggml.tokens has {token[:100]!r} twice")
            tokens.add(token)
        if self._text_left < 0:
            raise HeaderError(f"its vocabulary and its texts are longer than {MAX_TEXT} bytes")
        return frozenset(tokens)

    def _texts(self, count: int) -> Iterator[bytes]:
        """Read the texts of an array, a window of the file at a time: the fastest way past a vocabulary."""
        window, at, end = b"", 0, 0
        for _ in range(count):
            start = at + 8
            if start > end:
                window, start = self._refilled(window[at:], 8), 8
                end = len(window)
            (length,) = _LENGTH.unpack_from(window, start - 8)
            at = start + length
            if at > end:
                window, start, at = self._refilled(window[start:], length), 0, length
                end = len(window)
            yield window[start:at]
        self._file.seek(at - end, os.SEEK_CUR)

    def _refilled(self, window: bytes, needed: int) -> bytes:
        if needed > min(MAX_TEXT, self._size):
            raise HeaderError(f"it claims a text of {needed} bytes")
        window += self._file.read(max(_WINDOW, needed - len(window)))
        if len(window) < needed:
            raise HeaderError("it ends inside its header")
        return window

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise HeaderError("it ends inside its header")
        self._file.seek(count, os.SEEK_CUR)

    def _tensor(self) -> Tensor:
        name = self._name("tensor")
        dimensions = self._number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise HeaderError(f"its tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in _BLOCKS:
            raise HeaderError(f"its tensor {name!r} has the unknown type {kind}")
        row = shape[0] if shape else 1
        if row % _BLOCKS[kind][0]:
            raise HeaderError(f"a row of its tensor {name!r} has {row} elements, which its type can't hold")
        return Tensor(name, shape, kind, offset)

    def _data_start(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise HeaderError(f"its general.alignment is {alignment!r}, which is no power of 2")
        return -(-self._file.tell() // alignment) * alignment

    def _check_extent(self, start: int, tensors: tuple[Tensor, ...]) -> None:
        """Every tensor's data must lie inside the file."""
        for tensor in tensors:
            if start + tensor.offset + tensor.nbytes > self._size:
                raise HeaderError(f"it is truncated: the data of tensor {tensor.name!r} lies beyond its end")
