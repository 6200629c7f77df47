"""The header reader: what real files say, and that nothing a file claims can hurt the reader."""

import struct
from pathlib import Path

import pytest
from gguf_parts import ARRAY, F32, F64, STRING, U32, U64, TensorParts, entry, text
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import smollm2, tiny_encoder, tiny_encoder_decoder, tiny_model

from trioserve.engine import gguf as reader
from trioserve.engine.base import LoadFailure, LoadOptions, SessionOptions
from trioserve.engine.estimate import InspectedFile
from trioserve.engine.gguf import HeaderError, read_header
from trioserve.engine.llama import LlamaEngine

import gguf  # isort: skip - brings numpy in, which has to come after llama_cpp


def array(kind, *items, claimed=None):
    return struct.pack("<IQ", kind, len(items) if claimed is None else claimed) + b"".join(items)


def tensor(name="t", shape=(32,), kind=0, offset=0):
    return TensorParts(name, shape, kind).head(offset)


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


TENSOR = tensor()


def header(*entries, tensors=(TENSOR,), version=3, n_tensors=None, n_entries=None, data=b"\0" * 512):
    """A whole file, with the counts that it claims where they aren't true."""
    entries = (ARCHITECTURE, *entries)
    counts = [len(tensors) if n_tensors is None else n_tensors, len(entries) if n_entries is None else n_entries]
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*entries, *tensors)) + data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("headers") / "model.gguf"


def read(path, content):
    path.write_bytes(content)
    return read_header(path)


# -- real files


def test_the_embedded_model():
    path = smollm2()
    found = read_header(path)
    assert (found.architecture, found.file_size) == ("llama", path.stat().st_size)
    assert (found.number("block_count"), found.number("context_length")) == (30, 8192)
    assert found.metadata["tokenizer.ggml.tokens"] == 49152, "of the vocabulary only the length is kept"
    weights = LlamaEngine().load(path, LoadOptions())
    assert found.weights_size == weights.size
    weights.close()


@pytest.mark.parametrize(
    "make", [tiny_model, lambda: tiny_model(quantised=True, layers=3), tiny_encoder, tiny_encoder_decoder]
)
def test_tiny_models(make):
    path = make()
    found, reference = read_header(path), gguf.GGUFReader(path)
    assert {item.name: (item.shape, item.nbytes) for item in found.tensors} == {
        item.name: (tuple(map(int, item.shape)), item.n_bytes) for item in reference.tensors
    }
    for name, field in reference.fields.items():
        if len(field.types) == 1 and not name.startswith("GGUF."):
            assert found.metadata[name] == pytest.approx(field.contents()), name


def test_sizes_of_types_are_those_of_ggml():
    known = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    del known[gguf.GGMLQuantizationType.Q8_1]  # of intermediate results; the package has its size of old
    assert {kind: size for kind, size in reader._BLOCKS.items() if kind in known} == {
        kind: known[kind] for kind in reader._BLOCKS if kind in known
    }
    assert set(known) <= set(reader._BLOCKS), "a type that models use is unknown"


# -- made files


def test_a_made_header_is_read(path):
    found = read(
        path,
        header(
            entry("llama.block_count", U32, struct.pack("<I", 7)),
            entry("llama.attention.head_count_kv", ARRAY, array(U32, *(struct.pack("<I", n) for n in (2, 8, 4)))),
            entry("llama.rope.scale", F32, struct.pack("<f", 0.5)),
            entry("tokens", ARRAY, array(STRING, text("a"), text("bc"))),
            entry("deep", ARRAY, array(ARRAY, array(U32, b"\1\0\0\0"), array(STRING, text("x")))),
            entry("floats", ARRAY, array(F32, *[struct.pack("<f", 1)] * 3)),
            tensors=(tensor("one", (32, 2), 8), tensor("two", (4,), 0, 96)),
        ),
    )
    assert found.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 7,
        "llama.attention.head_count_kv": (2, 8, 4),
        "llama.rope.scale": 0.5,
        "tokens": 2,
        "deep": 2,
        "floats": 3,
    }
    assert [(item.name, item.shape, item.nbytes) for item in found.tensors] == [("one", (32, 2), 68), ("two", (4,), 16)]
    assert found.weights_size == 84


@pytest.mark.parametrize(
    ("kind", "data", "number"),
    [
        (U32, struct.pack("<I", 5), 5),
        (U64, struct.pack("<Q", 2**64 - 1), 2**64 - 1),
        (5, struct.pack("<i", -5), 99),
        (F64, struct.pack("<d", 1e308), 99),
        (F32, struct.pack("<f", float("nan")), 99),
        (STRING, text("5"), 99),
        (ARRAY, array(U32, struct.pack("<I", 3), struct.pack("<I", 4)), 4),
        (ARRAY, array(U32), 99),
        (ARRAY, array(5, struct.pack("<i", -1)), 99),
    ],
)
def test_numbers_are_integers_that_are_not_negative(path, kind, data, number):
    assert read(path, header(entry("llama.x", kind, data))).number("x", 99) == number


def test_an_unknown_number_is_its_default(path):
    assert read(path, header()).number("nothing", 3) == 3


@pytest.mark.parametrize("version", [2, 3])
def test_known_versions(path, version):
    assert read(path, header(version=version)).architecture == "llama"


def test_every_truncation_is_refused(path):
    whole = header(
        entry("n", U32, b"\1\0\0\0"),
        entry("s", STRING, text("word")),
        entry("a", ARRAY, array(STRING, text("a"), text("b"))),
        entry("i", ARRAY, array(U32, b"\1\0\0\0", b"\2\0\0\0")),
        entry("f", ARRAY, array(F32, b"\0\0\0\0")),
        data=b"\0" * 160,
    )
    head = len(whole) - 160
    needed = -(-head // 32) * 32 + 128
    assert read(path, whole[:needed]).tensors
    for length in range(needed):
        with pytest.raises(HeaderError):
            read(path, whole[:length])


HUGE = (2**20 + 1, 2**31, 2**40, 2**63, 2**64 - 1)


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize(
    "claim",
    [
        lambda n: header(n_tensors=n),
        lambda n: header(n_entries=n),
        lambda n: b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, n) + b"key",
        lambda n: header(entry("s", STRING, struct.pack("<Q", n) + b"short")),
        lambda n: header(entry("a", ARRAY, array(U32, claimed=n))),
        lambda n: header(entry("a", ARRAY, array(F32, claimed=n))),
        lambda n: header(entry("a", ARRAY, array(STRING, claimed=n))),
        lambda n: header(entry("a", ARRAY, array(STRING, struct.pack("<Q", n)))),
        lambda n: header(entry("a", ARRAY, array(ARRAY, array(U32, claimed=n)))),
        lambda n: header(tensors=(tensor(shape=(n - n % 32, 1)),)),
        lambda n: header(tensors=(tensor(shape=(2**62, 2**62, 2**62, n)),)),
        lambda n: header(tensors=(tensor(offset=n),)),
        lambda n: header(tensors=(struct.pack("<Q", n),)),
    ],
)
def test_absurd_claims_are_refused(path, huge, claim):
    with pytest.raises(HeaderError):
        read(path, claim(huge))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "header"),
        (b"GGU", "header"),
        (b"ggml" + bytes(64), "begin with GGUF"),
        (header(version=1), "version is 1"),
        (header(version=4), "version is 4"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version is 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture"),
        (header(ARCHITECTURE), "'general.architecture' twice"),
        (header(entry("x", U32, b"\1\0\0\0"), entry("x", STRING, text(""))), "'x' twice"),
        (header(entry("a\0b", U32, b"\1\0\0\0")), "a key with a NUL"),
        (header(tensors=(tensor("a\0b"),)), "a tensor with a NUL"),
        (header(entry("split.no", U32, b"\1\0\0\0")), "split.no is not an unsigned number of 16"),
        (header(entry("tokenizer.ggml.tokens", ARRAY, array(STRING, text("a"), text("a")))), "b'a' twice"),
        (header(entry("tokenizer.ggml.tokens", ARRAY, array(STRING, text("a"), text("a\0b")))), "b'a' twice"),
        (header(entry("tokenizer.ggml.tokens", ARRAY, array(STRING, text("[EMPTY_1]"), text("")))), "EMPTY_1.* twice"),
        (header(entry("x", 13, b"")), "unknown type 13"),
        (header(entry("x", 2**32 - 1, b"")), "unknown type"),
        (header(entry("x", ARRAY, array(13, b"\0"))), "unknown type 13"),
        (header(tensors=(tensor(shape=(1,) * 5),)), "5 dimensions"),
        (header(tensors=(tensor(kind=4),)), "unknown type 4"),
        (header(tensors=(tensor(kind=2**32 - 1),)), "unknown type"),
        (header(tensors=(tensor(shape=(33,), kind=8),)), "33 elements"),
        (header(tensors=(tensor(shape=(1024,)),)), "lies beyond its end"),
        (header(entry("general.alignment", U32, struct.pack("<I", 0))), "alignment is 0"),
        (header(entry("general.alignment", U32, struct.pack("<I", 48))), "alignment is 48"),
        (header(entry("general.alignment", F32, struct.pack("<f", 32))), "alignment is 32.0"),
        (header(entry("general.alignment", STRING, text("x"))), "alignment is 'x'"),
    ],
)
def test_what_is_wrong_is_said(path, content, said):
    with pytest.raises(HeaderError, match=said):
        read(path, content)


def test_texts_that_are_no_utf8_are_read_all_the_same(path):
    found = read(path, header(entry(b"\xff", STRING, text(b"\xc3\x28"))))
    assert found.metadata["�"] == "�("


def nested(depth):
    value = array(U32, b"\0\0\0\0")
    for _ in range(depth):
        value = array(ARRAY, value)
    return header(entry("deep", ARRAY, value))


def test_nesting_has_an_end(path):
    assert read(path, nested(reader.MAX_NESTING - 1)).metadata["deep"] == 1
    for depth in (reader.MAX_NESTING, 10_000):
        with pytest.raises(HeaderError, match="arrays deep"):
            read(path, nested(depth))


def test_a_file_that_was_cut_off_early_is_told_so_and_not_that_it_nests(path):
    whole = header(entry("numbers", ARRAY, array(U32, *[b"\0\0\0\0"] * 500)))
    with pytest.raises(HeaderError, match=r"^it claims an array of 500 values, and has 200 bytes$"):
        read(path, whole[:200])


def test_work_and_memory_are_bounded_also_where_the_file_is_large(path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_SKIPPED", 100)
    monkeypatch.setattr(reader, "MAX_TEXT", 100)
    empty = text("")
    assert read(path, header(entry("a", ARRAY, array(STRING, *[empty] * 100))))
    halves = [entry(name, ARRAY, array(STRING, *[empty] * 51)) for name in ("a", "b")]
    with pytest.raises(HeaderError, match="102 texts"):
        read(path, header(*halves))
    with pytest.raises(HeaderError, match="a text of 60 bytes"):
        read(path, header(entry("a", STRING, text("x" * 60)), entry("b", STRING, text("x" * 60))))


def test_a_directory_and_a_missing_file_are_errors_of_the_system(tmp_path):
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none.gguf", FileNotFoundError)):
        with pytest.raises(kind):
            read_header(path)
        with pytest.raises(LoadFailure):
            LlamaEngine().inspect(path)


# -- whatever the bytes


def inspected(path, content):
    """Read a file; it is whole or refused, and a whole one can be estimated."""
    path.write_bytes(content)
    try:
        file = InspectedFile(read_header(path))
    except HeaderError:
        return None
    assert file.n_ctx_train >= 0
    assert file.memory(SessionOptions(), 16).host >= 0
    return file


WHOLE = header(
    entry("llama.context_length", U32, struct.pack("<I", 2048)),
    entry("llama.embedding_length", U32, struct.pack("<I", 64)),
    entry("llama.attention.head_count", U32, struct.pack("<I", 4)),
    entry("llama.attention.head_count_kv", ARRAY, array(U32, struct.pack("<I", 4))),
    entry("general.alignment", U32, struct.pack("<I", 32)),
    entry("tokens", ARRAY, array(STRING, text("a"), text("b"))),
)


def test_the_unchanged_file_is_accepted(path):
    assert inspected(path, WHOLE) is not None


@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic(path, data):
    inspected(path, b"GGUF" + data)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_mutated_bytes(path, changes):
    content = bytearray(WHOLE)
    for place, data in changes:
        content[place : place + len(data)] = data
    inspected(path, bytes(content))


@given(st.integers(0, len(WHOLE)), st.binary(max_size=40), st.integers(0, 40))
def test_inserted_and_removed_bytes(path, place, data, gone):
    inspected(path, WHOLE[:place] + data + WHOLE[place + gone :])


@given(st.data())
def test_mutated_headers_of_a_real_model(path, data):
    content = bytearray(Path(tiny_model()).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 4000))
        content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    inspected(path, bytes(content))
