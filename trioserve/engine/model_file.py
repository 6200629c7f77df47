"""Whether llama.cpp would survive a model file.

Where the numbers of a header contradict each other, llama.cpp in places doesn't refuse the file but ends the process:
an assertion at the load, or at the first token, or at a prompt of the right kind. What is known to do so is refused
here first, and nothing else: what llama.cpp refuses by itself is left to it, with its own words. The limits are those
of llama.cpp; each check names the key or the tensor and the limit.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from trioserve.engine.gguf import MAX_TOKENS, Header, HeaderError, Tensor, Vocabulary, read_header

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_SPLITS = 0xFFFF
MAX_WINDOW = 1 << 30  # tokens of attention that slides; about twice as much overflows
MAPPED_ALIGNMENT = 32  # of tensors in memory that is mapped from the file

_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_UNIFORM_HEADS = {  # of the most common families that assert it; none of them has layers without attention
    "baichuan", "granite", "granitemoe", "internlm2", "llama", "mistral3", "olmo", "olmo2", "olmoe", "qwen2",
    "qwen2moe", "qwen3", "qwen3moe", "smollm3", "starcoder2", "xverse",
}  # fmt: skip
_F32 = 0
_INTEGERS = {24: "I8", 25: "I16", 26: "I32", 27: "I64"}
_NEVER_STORED = {9: "Q8_1", 15: "Q8_K", 28: "F64"}
_EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon")
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def inspect_model(path: Path) -> Header:
    """Read the header of a model file, and of the further files of a split one, and check all of it.

    Arguments:
        path: of the file, or of the first one of a split model.

    Returns:
        The header, with the tensors of all files and without the vocabulary.

    Raises:
        OSError: a file can't be read.
        HeaderError: it can't be loaded, or not without danger to the process.
    """
    header = read_header(path)
    _check_hyperparameters(header)
    _check_tokenizer(header)
    _check_tensors(header)
    tensors, size = header.tensors, header.file_size
    for further in _further_files(path, header):
        part = _read_part(further)
        _check_tensors(part)
        tensors, size = tensors + part.tensors, size + part.file_size
    return dataclasses.replace(header, tensors=tensors, file_size=size, vocabulary=Vocabulary())


# -- files of a split model


def _further_files(path: Path, header: Header) -> list[Path]:
    """The other files of a split model, named as llama.cpp names them."""
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return []
    if header.metadata.get("split.no") != 0:
        raise HeaderError(f"it is not the first of the {count} files of a split model (split.no)")
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name["number"]) != 1 or int(name["count"]) != count or count > MAX_SPLITS:
        raise HeaderError(f"it is the first of {count} files (split.count) and not named NAME-00001-of-{count:05}.gguf")
    return [path.with_name(f"{name['prefix']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]


def _read_part(path: Path) -> Header:
    try:
        return read_header(path, named=False)
    except HeaderError as error:
        raise HeaderError(f"its further file {path.name!r} can't be used: {error}") from None


# -- hyperparameters


def _check_hyperparameters(header: Header) -> None:
    for layers in _numbers(header, "block_count"):
        _demand(0 < layers <= MAX_LAYERS, header, "block_count", f"is {layers}", f"1 to {MAX_LAYERS}")
        for extra in _numbers(header, "nextn_predict_layers"):
            _demand(extra <= layers, header, "nextn_predict_layers", f"is {extra}", f"{layers} layers at most")
    _check_experts(header)
    _check_heads(header)
    _check_head_size(header)
    for window in _numbers(header, "attention.sliding_window"):
        _demand(window <= MAX_WINDOW, header, "attention.sliding_window", f"is {window}", f"{MAX_WINDOW} at most")
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if isinstance(scaling, str):
        _demand(scaling in _ROPE_SCALINGS, header, "rope.scaling.type", f"is {scaling!r}", ", ".join(_ROPE_SCALINGS))
    for key in _EPSILONS:
        epsilon = header.metadata.get(f"{header.architecture}.{key}", 0.0)
        if isinstance(epsilon, float):  # which NaN is too, and is not at least 0
            _demand(epsilon >= 0, header, key, f"is {epsilon}", "0 or more")


def _check_experts(header: Header) -> None:
    count = max(_numbers(header, "expert_count"), default=0)
    used = max(_numbers(header, "expert_used_count"), default=0)
    if header.architecture in ("hunyuan-dense", "hunyuan_vl") and count <= 1:
        count = used = 0  # these say 1 for none
    groups = max(_numbers(header, "expert_group_count"), default=0)
    chosen = max(_numbers(header, "expert_group_used_count"), default=0)
    _demand(count <= MAX_EXPERTS, header, "expert_count", f"is {count}", f"{MAX_EXPERTS} at most")
    _demand(used <= count, header, "expert_used_count", f"is {used}", f"{count} at most, which is expert_count")
    if count:
        _demand(used > 0, header, "expert_used_count", f"is {used}", f"1 to {count}")
        _demand(groups < count, header, "expert_group_count", f"is {groups}", f"less than expert_count, {count}")
    else:
        _demand(groups == 0, header, "expert_group_count", f"is {groups}", "0 where there are no experts")
    if groups > 1:
        _demand(count % groups == 0, header, "expert_group_count", f"is {groups}", f"a divisor of {count} experts")
        _demand(0 < chosen < groups, header, "expert_group_used_count", f"is {chosen}", f"1 to {groups - 1}")


def _check_heads(header: Header) -> None:
    """Each head of keys and values serves the same number of heads."""
    heads, kv_heads = _numbers(header, "attention.head_count"), _numbers(header, "attention.head_count_kv")
    for layer in range(max(len(heads), len(kv_heads)) if heads and kv_heads else 0):
        queries, keys = heads[layer % len(heads)], kv_heads[layer % len(kv_heads)]
        if queries and keys:
            fits = queries % keys == 0
            _demand(fits, header, "attention.head_count_kv", f"is {keys}", f"a divisor of the {queries} heads")


def _check_head_size(header: Header) -> None:
    """A head turns by pairs of its elements, and in some families all of it turns."""
    heads = next(iter(_numbers(header, "attention.head_count")), 0)
    if not heads:  # without attention in its first layer a model has no head size of its own
        return
    size = header.number("embedding_length") // heads
    keys, values = header.number("attention.key_length", size), header.number("attention.value_length", size)
    for turning in _numbers(header, "rope.dimension_count"):
        possible = 0 < turning <= keys and turning % 2 == 0
        _demand(
            possible, header, "rope.dimension_count", f"is {turning}", f"an even number, 2 to the head size of {keys}"
        )
    if header.architecture in _UNIFORM_HEADS:
        sizes = sorted({keys, values, *_numbers(header, "rope.dimension_count")})
        if len(sizes) > 1:
            found = ", ".join(map(str, sizes))
            said_by = "attention.head_count, attention.key_length, attention.value_length and rope.dimension_count"
            raise HeaderError(f"its heads are of the sizes {found}; {header.architecture} has one size ({said_by})")
        for key in ("attention.head_count", "attention.head_count_kv"):
            _demand(0 not in _numbers(header, key), header, key, "is 0 in a layer", "1 or more in this architecture")


def _numbers(header: Header, key: str) -> tuple[int, ...]:
    """A number of the architecture's own, or one for each layer, as llama.cpp reads them; none where it refuses."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, tuple):
        return tuple(number & 0xFFFFFFFF for number in value)
    return (value,) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else ()


def _demand(holds: bool, header: Header, key: str, found: str, allowed: str) -> None:
    if not holds:
        raise HeaderError(f"its {header.architecture}.{key} {found}; allowed is {allowed}")


# -- tokenizer


def _check_tokenizer(header: Header) -> None:
    kind, tokens = header.metadata.get("tokenizer.ggml.model"), header.vocabulary.tokens
    if kind in ("none", "no_vocab"):
        for size in _numbers(header, "vocab_size"):  # so many empty tokens are made of it
            _demand(size <= MAX_TOKENS, header, "vocab_size", f"is {size}", f"{MAX_TOKENS} at most")
    if kind == "bert" and header.vocabulary.has_byte_tokens:
        raise HeaderError("its tokenizer.ggml.token_type marks tokens as bytes, which a bert tokenizer doesn't have")
    if kind in _BYTE_TEXTS and tokens:
        lacking = next((byte for byte, texts in _BYTE_TEXTS[kind] if tokens.isdisjoint(texts)), None)
        if lacking is not None:
            # Without it some prompts end the process, and with "rwkv" others never come to an end.
            raise HeaderError(f"its tokenizer.ggml.tokens has no token for the byte 0x{lacking:02X}")


def _texts_of_bytes() -> dict[object, list[tuple[int, tuple[bytes, ...]]]]:
    """For tokenizers that have to know every byte of a text: each byte, with the texts that a token of it may have."""
    in_utf8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
    return {
        "llama": [(byte, (b"<0x%02X>" % byte, bytes([byte]))) for byte in in_utf8],
        "rwkv": [(byte, _rwkv_escapes(byte)) for byte in range(256)],
    }


def _rwkv_escapes(byte: int) -> tuple[bytes, ...]:
    r"""The ways to write a byte in an RWKV vocabulary: as itself, as ``\xff``, or as ``\n``."""
    hexadecimal = (b"\\x%02x" % byte, b"\\x%02X" % byte)
    plain = bytes([byte])
    short = {b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\\": b"\\\\", b"'": b"\\'", b'"': b'\\"'}.get(plain)
    return (*hexadecimal, *([short] if short else []), *([plain] if plain not in b"\0\\" else []))


_BYTE_TEXTS = _texts_of_bytes()


# -- tensors


def _check_tensors(header: Header) -> None:
    for tensor in header.tensors:
        if 0 in tensor.shape:
            raise HeaderError(f"its tensor {tensor.name!r} has no elements: its shape is {tensor.shape}")
        if (header.data_start + tensor.offset) % MAPPED_ALIGNMENT:
            raise HeaderError(f"the data of its tensor {tensor.name!r} is not aligned to {MAPPED_ALIGNMENT} bytes")
        _check_type(tensor)


def _check_type(tensor: Tensor) -> None:
    """See that llama.cpp can calculate with the tensor's type: it takes the routine without asking if there is one."""
    name, kind = tensor.name, tensor.type
    if kind in _NEVER_STORED:
        raise HeaderError(f"its tensor {name!r} is of type {_NEVER_STORED[kind]}, which models aren't stored in")
    if kind in _INTEGERS and name.endswith((".weight", ".bias")) and "tid2eid" not in name:
        raise HeaderError(f"its tensor {name!r} is of type {_INTEGERS[kind]}, and has to be of numbers with a fraction")
    if kind != _F32 and (name.endswith(("_norm.weight", ".bias")) or name.startswith(("rope_freqs.", "rope_factors_"))):
        raise HeaderError(f"its tensor {name!r} is of type {kind}, and has to be of type F32 (0)")
