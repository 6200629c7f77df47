"""The header of a GGUF file, read without llama.cpp.

What a file says about itself can be checked before anything live is touched: its architecture, its context length, and
the types and sizes of its tensors. Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
Long arrays (the vocabulary) are skipped, so a header costs milliseconds whatever the size of the model.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Bounds on what a header may claim; a damaged or hostile file must not make us allocate.
MAX_ENTRIES = 1 << 20
MAX_TEXT = 1 << 26  # bytes of all texts that are kept
MAX_SKIPPED = 1 << 22  # texts and arrays inside of arrays, all together
MAX_KEPT = 1 << 12  # numbers of an array that is kept
MAX_DIMENSIONS = 4
MAX_NESTING = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
_STRING, _ARRAY = 8, 9

# Of each ggml type: elements in a block, bytes of a block.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
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
class Header:
    """What a GGUF file says about itself.

    Attributes:
        metadata: numbers, texts and short arrays of integers by key; of any other array, its length.
        tensors: in file order.
        file_size: bytes of the whole file.
    """

    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    file_size: int

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


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file.

    Raises:
        OSError: the file can't be read.
        HeaderError: it is no GGUF, damaged, truncated, or claims the impossible.
    """
    with path.open("rb") as file:
        return _Reader(file, os.fstat(file.fileno()).st_size).header()


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._text_left = MAX_TEXT
        self._skipped = 0

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise HeaderError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise HeaderError(f"its version is {version}; versions 2 and 3 are known")
        n_tensors, n_entries = self._count("tensors"), self._count("metadata entries")
        metadata: dict[str, Value] = {}
        for _ in range(n_entries):
            key = self._text()
            metadata[key] = self._value(self._number("<I"))
        if not isinstance(metadata.get("general.architecture"), str):
            raise HeaderError("it does not name its architecture")
        tensors = tuple(self._tensor() for _ in range(n_tensors))
        self._check_extent(metadata, tensors)
        return Header(metadata, tensors, self._size)

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

    def _text(self) -> str:
        length = self._number("<Q")
        if length > min(self._text_left, self._size):
            raise HeaderError(f"it claims a text of {length} bytes")
        self._text_left -= length
        return self._take(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        form = _SCALARS.get(kind)
        if form is None:
            raise HeaderError(f"it has a metadata value of the unknown type {kind}")
        value: Value = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _array(self) -> Value:
        kind, length = self._array_head(0)
        if kind in _INTEGERS and length <= MAX_KEPT:
            form = f"<{length}{_SCALARS[kind][1]}"
            return struct.unpack(form, self._take(struct.calcsize(form)))
        self._skip_array(kind, length, 0)
        return length

    def _array_head(self, depth: int) -> tuple[int, int]:
        kind, length = self._number("<I"), self._number("<Q")
        if length > self._size or depth >= MAX_NESTING:
            raise HeaderError(f"it claims an array of {length} values, {depth} arrays deep")
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
        for _ in range(length):
            if kind == _STRING:
                self._skip(self._number("<Q"))
            else:
                self._skip_array(*self._array_head(depth + 1), depth + 1)

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise HeaderError("it ends inside its header")
        self._file.seek(count, os.SEEK_CUR)

    def _tensor(self) -> Tensor:
        name = self._text()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise HeaderError(f"its tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in _BLOCKS:
            raise HeaderError(f"its tensor {name!r} has the unknown type {kind}")
        if shape[0] % _BLOCKS[kind][0]:
            raise HeaderError(f"a row of its tensor {name!r} has {shape[0]} elements, which its type can't hold")
        return Tensor(name, shape, kind, offset)

    def _check_extent(self, metadata: Mapping[str, Value], tensors: tuple[Tensor, ...]) -> None:
        """Every tensor's data must lie inside the file."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise HeaderError(f"its alignment is {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        for tensor in tensors:
            if start + tensor.offset + tensor.nbytes > self._size:
                raise HeaderError(f"it is truncated: the data of tensor {tensor.name!r} lies beyond its end")
