"""A GGUF file taken apart, changed anywhere, and put together again."""

from __future__ import annotations

import dataclasses
import math
import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
ALIGNMENT = 32


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def packed(kind, value):
    """A value's bytes in the file; of an array it is ``(kind of its items, items)``."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, items = value
        if item in _FORMS:
            return struct.pack(f"<IQ{len(items)}{_FORMS[item]}", item, len(items), *items)
        return struct.pack("<IQ", item, len(items)) + b"".join(packed(item, one) for one in items)
    return struct.pack("<" + _FORMS[kind], value)


def entry(key, kind, data):
    """A metadata entry of raw bytes."""
    return text(key) + struct.pack("<I", kind) + data


@dataclasses.dataclass
class TensorParts:
    """One tensor. ``offset`` None puts its data where it belongs."""

    name: str | bytes
    shape: tuple[int, ...]
    type: int
    data: bytes = b""
    offset: int | None = None

    def head(self, offset):
        dims = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return text(self.name) + dims + struct.pack("<IQ", self.type, offset)


class Parts:
    """All of a file.

    Attributes:
        values: kind and value by key, in the file's order.
        extra: raw entries after those.
        tensors: in the file's order.
    """

    def __init__(self, content):
        self._content, self._at = content, 4
        self.version, n_tensors, n_entries = self._take("<IQQ")
        self.values = {}
        for _ in range(n_entries):
            key = self._text().decode()
            (kind,) = self._take("<I")
            self.values[key] = (kind, self._value(kind))
        heads = [self._tensor() for _ in range(n_tensors)]
        self.extra = []
        self.alignment = self.values.get("general.alignment", (U32, ALIGNMENT))[1]
        start = -(-self._at // self.alignment) * self.alignment
        ends = [head.offset for head in heads[1:]] + [len(content) - start]
        for head, end in zip(heads, ends, strict=True):
            head.data, head.offset = content[start + head.offset : start + end], None
        self.tensors = heads

    def set(self, key, kind, value):
        self.values[key] = (kind, value)
        return self

    def drop(self, *keys):
        for key in keys:
            del self.values[key]
        return self

    def array(self, key):
        """The items of an array, as a list of its own."""
        return list(self.values[key][1][1])

    def tensor(self, name):
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def content(self, *, n_tensors=None, n_entries=None):
        """The file's bytes, with the counts that it claims where they aren't true."""
        entries = [entry(key, kind, packed(kind, value)) for key, (kind, value) in self.values.items()] + self.extra
        heads, data = [], b""
        for tensor in self.tensors:
            heads.append(tensor.head(len(data) if tensor.offset is None else tensor.offset))
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
        counts = (
            len(heads) if n_tensors is None else n_tensors,
            len(entries) if n_entries is None else n_entries,
        )
        front = b"GGUF" + struct.pack("<IQQ", self.version, *counts) + b"".join(entries + heads)
        return front + bytes(-len(front) % self.alignment) + data

    def _take(self, form):
        values = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return values

    def _text(self):
        (length,) = self._take("<Q")
        self._at += length
        return self._content[self._at - length : self._at]

    def _value(self, kind):
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            item, length = self._take("<IQ")
            if item in _FORMS:
                return item, self._take(f"<{length}{_FORMS[item]}")
            return item, [self._value(item) for _ in range(length)]
        return self._take("<" + _FORMS[kind])[0]

    def _tensor(self):
        name = self._text().decode()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return TensorParts(name, shape, kind, b"", offset)


def zeros(shape, kind, block, size):
    """Data of zeros for a tensor of a type with so many elements and bytes in a block."""
    return bytes(math.prod(shape) // block * size)
