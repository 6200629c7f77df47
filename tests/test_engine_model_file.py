"""Files that would end the process are refused by their header, and files that work are not."""

import contextlib
import resource
import struct
import time
from pathlib import Path

import pytest
from gguf_parts import ARRAY, BOOL, F32, I32, STRING, U8, U16, U32, Parts, TensorParts, zeros
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import answer, asking, loaded, opened, smollm2, tiny_encoder, tiny_encoder_decoder, tiny_model

from trioserve.engine.base import LoadFailure, LoadOptions, SessionOptions, UnfitOptions, UnusableFile
from trioserve.engine.estimate import InspectedFile
from trioserve.engine.gguf import _BLOCKS, MAX_TOKENS, HeaderError
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.model_file import inspect_model

NAN, INFINITY = float("nan"), float("inf")
TOKENS, KINDS, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
TINY = tiny_model().read_bytes()
TEXTS, TOKEN_KINDS = Parts(TINY).array(TOKENS), Parts(TINY).array(KINDS)
NORMAL, BYTE = 1, 6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("models") / "model.gguf"


def changed(change, source=TINY):
    """A file's content after a change of its parts."""
    parts = Parts(source)
    change(parts)
    return parts.content()


def inspected(path, content):
    path.write_bytes(content)
    return inspect_model(path)


def number(key, value, kind=U32):
    return lambda parts: parts.set(f"llama.{key}", kind, value)


def numbers(**values):
    return lambda parts: [parts.set("llama." + key.replace("__", "."), U32, value) for key, value in values.items()]


def per_layer(key, *values):
    return number(key, (I32, values), ARRAY)


def family(name, **values):
    """The same model under another architecture's name, with numbers of its own."""

    def change(parts):
        for key in [key for key in parts.values if key.startswith("llama.")]:
            parts.values[key.replace("llama.", f"{name}.", 1)] = parts.values.pop(key)
        parts.set("general.architecture", STRING, name)
        for key, value in values.items():
            parts.set(f"{name}." + key.replace("__", "."), U32, value)

    return change


def typed(name, kind):
    """Give a tensor another type, and zeros for data."""

    def change(parts):
        tensor = parts.tensor(name)
        tensor.type, tensor.data = kind, zeros(tensor.shape, kind, *_BLOCKS[kind])

    return change


def added(name, shape, kind=0):
    return lambda parts: parts.tensors.append(TensorParts(name, shape, kind, zeros(shape, kind, *_BLOCKS[kind])))


def shaped(name, *shape):
    def change(parts):
        tensor = parts.tensor(name)
        tensor.shape, tensor.data = shape, zeros(shape, 0, 1, 4)

    return change


def texts(replace, model="llama"):
    """Give the vocabulary other texts, all of them normal tokens, and maybe another tokenizer."""

    def change(parts):
        parts.set("tokenizer.ggml.model", STRING, model)
        parts.set(TOKENS, ARRAY, (STRING, [replace(index, text) for index, text in enumerate(TEXTS)]))
        parts.set(KINDS, ARRAY, (I32, [NORMAL] * len(TEXTS)))

    return change


def aligned(alignment):
    def change(parts):
        parts.alignment = alignment
        parts.set("general.alignment", U32, alignment)
        parts.set("shift", STRING, "")
        if len(parts.content()) % 32 == 0:  # as the data's start is, since the data is a multiple of that
            parts.set("shift", STRING, "x" * alignment)

    return change


def no_byte_tokens(index, text):
    return b"x%d" % index if text.startswith(b"<0x") else text


def all_bytes_escaped(index, text):
    return repr(bytes([index]))[2:-1].encode() if index < 256 else b"ab%d" % index


# Each of these was seen to end the process, or to hang it, when llama.cpp was given such a file; some of them only with
# tensors whose shapes follow the number, or with a prompt of the right kind.
DEADLY = {
    "no layers": (number("block_count", 0), r"llama\.block_count is 0; allowed is 1 to 512"),
    "too many layers": (number("block_count", 513), r"block_count is 513"),
    "absurdly many layers": (number("block_count", 2**31), r"block_count is 2147483648"),
    "more predicted layers than layers": (number("nextn_predict_layers", 3), r"nextn_predict_layers is 3; .* 2 layers"),
    "too many experts": (number("expert_count", 1025), r"expert_count is 1025; allowed is 1024"),
    "experts of which none is used": (number("expert_count", 4), r"expert_used_count is 0; allowed is 1 to 4"),
    "experts used of none": (number("expert_used_count", 1), r"expert_used_count is 1; allowed is 0 at most"),
    "experts used by layer of none": (per_layer("expert_used_count", 0, -1), r"expert_used_count is 4294967295"),
    "groups of no experts": (number("expert_group_count", 2), r"expert_group_count is 2; allowed is 0"),
    "as many groups as experts": (
        numbers(expert_count=4, expert_used_count=2, expert_group_count=4),
        r"expert_group_count is 4; .* less than expert_count, 4",
    ),
    "uneven groups": (numbers(expert_count=4, expert_used_count=2, expert_group_count=3), "a divisor of 4 experts"),
    "no group used": (
        numbers(expert_count=4, expert_used_count=2, expert_group_count=2),
        "expert_group_used_count is 0; allowed is 1 to 1",
    ),
    "heads that don't share evenly": (number("attention.head_count_kv", 3), "head_count_kv is 3; .* divisor of the 4"),
    "more heads of keys": (number("attention.head_count_kv", 8), "head_count_kv is 8"),
    "uneven in one layer": (per_layer("attention.head_count_kv", 4, 3), "head_count_kv is 3"),
    "a layer without heads": (per_layer("attention.head_count", 4, 0), "head_count is 0 in a layer"),
    "a layer without heads of keys": (per_layer("attention.head_count_kv", 4, 0), "head_count_kv is 0 in a layer"),
    "heads of another size than turns": (family("qwen2", attention__head_count=2), "sizes 16, 32; qwen2 has one size"),
    "keys of another size than values": (family("qwen2", attention__key_length=32), "sizes 16, 32"),
    "more turns than a head has": (family("phi2", rope__dimension_count=64), "dimension_count is 64; .* size of 16"),
    "an odd number turns": (family("phi2", rope__dimension_count=7), "dimension_count is 7; allowed is an even number"),
    "nothing turns": (family("phi2", rope__dimension_count=0), "dimension_count is 0"),
    "a window that overflows": (family("gemma3", attention__sliding_window=2**31), "sliding_window is 2147483648"),
    "an unknown scaling": (number("rope.scaling.type", "dynamic", STRING), r"rope\.scaling\.type is 'dynamic'; .*yarn"),
    "an epsilon that is no number": (number("attention.layer_norm_rms_epsilon", NAN, F32), "epsilon is nan"),
    "a negative epsilon": (number("attention.layer_norm_rms_epsilon", -1.0, F32), r"epsilon is -1\.0"),
    "a vocabulary of nothing": (
        lambda parts: parts.set("tokenizer.ggml.model", STRING, "none").set("llama.vocab_size", U32, 2**32 - 1),
        f"vocab_size is 4294967295; allowed is {MAX_TOKENS}",
    ),
    "the same token twice": (texts(lambda index, text: TEXTS[max(index, 1)]), "b'<s>' twice"),
    "no tokens of bytes": (texts(no_byte_tokens), "no token for the byte 0x00"),
    "one byte without a token": (texts(lambda _, text: b"xx" if text == b"<0xED>" else text), "the byte 0xED"),
    "an rwkv tokenizer without bytes": (texts(lambda _, text: text, "rwkv"), "the byte 0x00"),
    "bytes for a bert tokenizer": (
        lambda parts: parts.set("tokenizer.ggml.model", STRING, "bert"),
        "marks tokens as bytes",
    ),
    "no elements": (shaped("blk.0.ffn_gate.weight", 64, 0), r"'blk\.0\.ffn_gate\.weight' has no elements"),
    "data that can't be mapped": (aligned(16), "is not aligned to 32 bytes"),
    "a matrix of integers": (typed("blk.1.attn_q.weight", 26), r"'blk\.1\.attn_q\.weight' is of type I32"),
    "a matrix of doubles": (typed("output.weight", 28), "is of type F64"),
    "a matrix of intermediate results": (typed("blk.0.ffn_up.weight", 9), "is of type Q8_1"),
    "a norm of halves": (typed("blk.0.attn_norm.weight", 1), r"'blk\.0\.attn_norm\.weight' is of type 1, .* F32"),
    "a quantised norm": (typed("output_norm.weight", 8), "is of type 8, and has to be of type F32"),
    "a bias of halves": (added("blk.0.attn_q.bias", (64,), 1), r"'blk\.0\.attn_q\.bias' is of type 1"),
    "frequencies of halves": (added("rope_freqs.weight", (8,), 1), r"'rope_freqs\.weight' is of type 1"),
}


@pytest.mark.parametrize("damage", DEADLY)
def test_what_would_end_the_process_is_refused_with_the_key_and_the_limit(path, damage):
    change, said = DEADLY[damage]
    with pytest.raises(HeaderError, match=said):
        inspected(path, changed(change))
    with pytest.raises(UnusableFile, match=said):
        LlamaEngine().inspect(path)


# Unusual, and fine: llama.cpp loads and runs each of them.
HARMLESS = {
    "as it is": lambda parts: None,
    "unknown keys": lambda parts: parts.set("llama.new", U32, 2**32 - 1).set("x.y", ARRAY, (STRING, ["a"])),
    "no experts, said": numbers(expert_count=0, expert_used_count=0, expert_group_count=0),
    "one number for each layer": per_layer("attention.head_count_kv", 4, 4),
    "a scaling that is known": number("rope.scaling.type", "yarn", STRING),
    "an epsilon of nothing": number("attention.layer_norm_rms_epsilon", 0.0, F32),
    "no context length of its own": number("context_length", 0),
    "a base that is no number": number("rope.freq_base", NAN, F32),
    "empty tokens": texts(lambda index, text: b"" if index > len(TEXTS) - 3 else text),
    "tokens that are no text": texts(lambda index, text: b"\xff\xfe" if index == len(TEXTS) - 1 else text),
    "special tokens out of range": lambda parts: parts.set("tokenizer.ggml.bos_token_id", U32, 2**31),
    "no kinds of tokens": lambda parts: parts.drop(KINDS),
    "scores that are no numbers": lambda parts: parts.set(SCORES, ARRAY, (F32, [NAN] * len(TEXTS))),
    "an rwkv tokenizer with bytes": texts(all_bytes_escaped, "rwkv"),
    "a template that is a number": lambda parts: parts.set("tokenizer.chat_template", U32, 5),
    "a template of megabytes": lambda parts: parts.set("tokenizer.chat_template", STRING, "x" * 3_000_000),
    "halves": typed("blk.0.attn_q.weight", 1),
    "a quantised matrix": typed("blk.0.ffn_down.weight", 39),
    "the newest quantisation": typed("blk.0.ffn_down.weight", 42),
    "weights that are no numbers": lambda parts: [
        setattr(tensor, "data", struct.pack("<f", NAN) * (len(tensor.data) // 4)) for tensor in parts.tensors
    ],
    "a tensor with all its dimensions": lambda parts: setattr(parts.tensors[0], "shape", (64, len(TEXTS), 1, 1)),
    "no output of its own": lambda parts: parts.tensors.remove(parts.tensor("output.weight")),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_llama_cpp_survives_is_let_through(path, change):
    assert inspected(path, changed(change)).tensors
    with loaded(path) as weights, opened(weights, n_ctx=256) as session:
        prompt = weights.tokenize("the 漢 é\x01", special=True, add_bos=True)
        assert answer(session, asking(prompt, 2)).end is not None


# Left to llama.cpp, which refuses them by itself; no second attempt can help.
REFUSED = {
    "an unknown architecture": (family("lama"), "unknown model architecture: 'lama'"),
    "a family without a head count": (lambda parts: parts.drop("llama.attention.head_count"), "check_tensor_dims"),
    "no context length": (lambda parts: parts.drop("llama.context_length"), "context_length"),
    "a number that is text": (number("context_length", "long", STRING), "wrong type"),
    "a vocabulary that is too short": (
        lambda parts: parts.set(TOKENS, ARRAY, (STRING, TEXTS[:-5])),
        "token_embd.weight' has wrong shape",
    ),
    "an empty vocabulary": (lambda parts: parts.set(TOKENS, ARRAY, (STRING, [])), "wrong shape"),
    "too few scores": (lambda parts: parts.set(SCORES, ARRAY, (F32, [0.0])), "out of array bounds for scores"),
    "too few kinds": (lambda parts: parts.set(KINDS, ARRAY, (I32, [1])), "out of array bounds for toktypes"),
    "no merges": (lambda parts: parts.set("tokenizer.ggml.model", STRING, "gpt2"), "merges"),
    "an unknown tokenizer": (lambda parts: parts.set("tokenizer.ggml.model", STRING, "own"), "unknown tokenizer"),
    "a missing tensor": (lambda parts: parts.tensors.remove(parts.tensor("blk.0.attn_q.weight")), "attn_q.weight' not"),
    "a tensor of a wrong shape": (shaped("blk.0.attn_q.weight", 32, 3), "attn_q.weight' has wrong shape"),
    "a tensor that nobody needs": (added("extra.weight", (32,)), "wrong number of tensors"),
    "overlapping tensors": (lambda parts: setattr(parts.tensors[3], "offset", 0), "read tensor data"),
    "nested arrays": (lambda parts: parts.set("x", ARRAY, (ARRAY, [(U8, [1])])), "key-value"),
    "a projector": (lambda parts: parts.set("general.architecture", STRING, "clip"), "CLIP"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_llama_cpp_refuses_is_the_files_fault(path, damage):
    change, said = REFUSED[damage]
    inspected(path, changed(change))
    with pytest.raises(UnusableFile, match=said):
        LlamaEngine().load(path, LoadOptions())


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda: tiny_model(vocabulary=False), "no vocabulary"), (tiny_encoder_decoder, "encoder")],
)
def test_what_cannot_be_served_is_the_files_fault(make, said):
    inspect_model(make())
    with pytest.raises(UnusableFile, match=said):
        LlamaEngine().load(make(), LoadOptions())


def test_a_model_that_only_embeds_is_sound():
    inspect_model(tiny_encoder())
    with loaded(tiny_encoder()) as weights, pytest.raises(UnfitOptions, match='task = "embed"'):
        weights.open_session(SessionOptions(n_ctx=128))


@pytest.mark.parametrize(
    ("name", "added_by"),
    [("beginning-of-sequence", None), ("end-of-sequence", "add_eos_token")],
)
def test_a_tokenizer_that_lacks_a_token_it_adds_is_refused(path, name, added_by):
    def change(parts):
        parts.set("tokenizer.ggml.model", STRING, "gemma4").set("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"]))
        if added_by is None:
            parts.drop("tokenizer.ggml.bos_token_id")
        else:
            parts.drop("tokenizer.ggml.eos_token_id").set(f"tokenizer.ggml.{added_by}", BOOL, True)

    inspected(path, changed(change))
    with pytest.raises(UnusableFile, match=f"puts a {name} token into every prompt, but has none"):
        LlamaEngine().load(path, LoadOptions())


def test_a_load_that_is_given_up_is_not_the_files_fault():
    with pytest.raises(LoadFailure) as caught:
        LlamaEngine().load(tiny_model(), LoadOptions(mmap=False), lambda _: False)
    assert not isinstance(caught.value, UnusableFile)


def test_a_name_cut_by_a_nul_does_not_hide_the_numbers(path):
    def change(parts):
        parts.set("general.architecture", STRING, "llama\0x").set("llama.block_count", U32, 0)

    with pytest.raises(HeaderError, match=r"llama\.block_count is 0"):
        inspected(path, changed(change))


# -- split models


@pytest.fixture
def split(tmp_path):
    """Write a model as two files, after a change of the second one; returns the first one's path."""

    def write(change=lambda second: None, *, name="big-{:05}-of-00002.gguf"):
        first, second = Parts(TINY), Parts(TINY)
        second.values.clear()
        first.tensors, second.tensors = first.tensors[:5], second.tensors[5:]
        for number, parts in enumerate((first, second)):
            parts.set("split.no", U16, number).set("split.count", U16, 2)
            parts.set("split.tensors.count", I32, len(first.tensors) + len(second.tensors))
        change(second)
        paths = [tmp_path / name.format(number) for number in (1, 2)]
        for path, parts in zip(paths, (first, second), strict=True):
            path.write_bytes(parts.content())
        return paths[0]

    return write


def test_a_split_model_is_seen_whole_and_loads(split):
    path, whole = split(), tiny_model()
    assert inspect_model(path).weights_size == inspect_model(whole).weights_size
    assert InspectedFile(inspect_model(path)).memory(SessionOptions(), 1) == InspectedFile(inspect_model(whole)).memory(
        SessionOptions(), 1
    )
    with loaded(path) as weights, opened(weights) as session:
        assert answer(session, asking([300, 301], 2)).end is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # llama.cpp would end the process.
        (
            lambda second: second.set("split.no", U32, 1),
            "further file 'big-00002-of-00002.gguf' can't be used: .*split",
        ),
        (typed("blk.1.attn_norm.weight", 1), "type F32"),
        (lambda second: setattr(second.tensors[-1], "offset", 2**40), "beyond its end"),
    ],
)
def test_the_further_files_are_checked_as_well(split, change, said):
    with pytest.raises(HeaderError, match=said):
        inspect_model(split(change))


def test_a_further_file_that_is_missing_is_named(split):
    path = split()
    path.with_name("big-00002-of-00002.gguf").unlink()
    with pytest.raises(UnusableFile, match="big-00002-of-00002"):
        LlamaEngine().inspect(path)


def test_only_the_first_file_can_be_loaded_and_under_its_name(split):
    with pytest.raises(HeaderError, match="does not name its architecture"):
        inspect_model(split().with_name("big-00002-of-00002.gguf"))
    with pytest.raises(HeaderError, match="not named NAME-00001-of-00002"):
        inspect_model(split(name="big.{}.gguf"))


# -- whatever the bytes


@given(st.data())
def test_mutations_of_a_model_are_seen_whole_or_refused(path, data):
    content = bytearray(TINY)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 9000))
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        header = inspected(path, bytes(content))
    except HeaderError:
        return
    assert InspectedFile(header).memory(SessionOptions(), 16).host >= 0


@given(st.data())
def test_any_numbers_are_accepted_or_refused(path, data):
    parts = Parts(TINY)
    keys = [key for key, (kind, _) in parts.values.items() if kind == U32]
    extra = ["llama." + key for key in ("attention.head_count_kv", "expert_count", "expert_used_count", "split.count")]
    for key in data.draw(st.lists(st.sampled_from([*keys, *extra]), min_size=1, max_size=4)):
        parts.set(key, U32, data.draw(st.sampled_from([0, 1, 2, 3, 7, 512, 2**31, 2**32 - 1])))
    with contextlib.suppress(HeaderError):
        inspected(path, parts.content())


def test_the_embedded_model_is_in_order_and_quickly_seen():
    path = smollm2()
    inspect_model(path)
    spent = []
    for _ in range(3):
        before = time.process_time()
        header = inspect_model(path)
        spent.append(time.process_time() - before)
    assert not header.vocabulary.tokens, "the vocabulary is let go"
    assert min(spent) < 0.3, "seconds of the processor, on a machine that may be slow"


def test_a_vocabulary_has_an_end(path, monkeypatch):
    monkeypatch.setattr("trioserve.engine.gguf.MAX_TOKENS", len(TEXTS) - 1)
    with pytest.raises(HeaderError, match=f"tokens claims {len(TEXTS)} tokens; {len(TEXTS) - 1} can be loaded"):
        inspected(path, TINY)


def test_the_texts_of_a_vocabulary_have_an_end(path, monkeypatch):
    monkeypatch.setattr("trioserve.engine.gguf.MAX_TEXT", 1500)
    with pytest.raises(HeaderError, match="longer than 1500 bytes"):
        inspected(path, TINY)


def test_a_huge_text_that_is_claimed_takes_no_memory(tmp_path):
    path = tmp_path / "huge.gguf"
    claim = struct.pack("<IQ", STRING, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 1 << 40)
    key = struct.pack("<Q", len(TOKENS)) + TOKENS.encode()
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", ARRAY) + claim)
        file.truncate(1 << 41)  # of holes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HeaderError, match="a text of 1099511627776 bytes"):
        inspect_model(Path(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
