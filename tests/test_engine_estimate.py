"""The estimate of a model's memory against what llama.cpp says that it allocates."""

import logging
import re
from collections import defaultdict
from dataclasses import replace

import pytest
from tiny_models import loaded, opened, process_memory, smollm2, tiny_encoder, tiny_model

from trioserve.config import ModelConfig
from trioserve.engine.base import Embedded, EmbeddingInput, Footprint, LoadOptions, SessionOptions, Task
from trioserve.engine.estimate import InspectedFile, device_share, estimate
from trioserve.engine.gguf import Header, Tensor, read_header
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.llama.context import _parameters
from trioserve.runtime.arrangement import arrange

MIB = 1 << 20
KERNELS = 64 * MIB
# llama.cpp says so in a line for each buffer, and again when a context is freed, in other words.
BUFFER = re.compile(r"(\w+) +(model|KV|compute|output) buffer size = +([\d.]+) MiB")
# Copies of weights in the order that the processor wants. The pages of the file that they were made from are mapped
# still, and the kernel drops them when it needs the room: they are not counted twice.
COPIES = ("AMX", "CPU_REPACK")


@pytest.fixture(scope="module")
def header():
    return read_header(smollm2())


@pytest.fixture(scope="module")
def weights():
    weights = LlamaEngine().load(smollm2(), LoadOptions())
    yield weights
    weights.close()


@pytest.fixture
def allocated(caplog):
    """What llama.cpp has said so far, in MiB by kind."""
    caplog.set_level(logging.DEBUG, "trioserve.llama")

    def read():
        found = defaultdict(float)
        for name, kind, size in BUFFER.findall(caplog.text):
            found["copy" if name in COPIES else kind] += float(size)
        return found

    return read


def close_to(mib):
    return pytest.approx(mib * MIB, rel=0.15)


def test_weights(header, allocated):
    LlamaEngine().load(smollm2(), LoadOptions()).close()
    found, said = estimate(header, SessionOptions(), 1).weights, allocated()
    assert found == close_to(said["model"])
    assert said["copy"] * MIB < 1.15 * found


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 64},
        {"n_ctx": 500},
        {"n_ctx": 2048},
        {"n_ctx": 4096},
        {"n_ctx": 4096, "n_ubatch": 128},
        {"n_ctx": 8192, "n_ubatch": 64},
        {"n_ctx": 2048, "n_batch": 256},
        {"n_ctx": 2048, "kv_dtype": "f32"},
        {"n_ctx": 2048, "kv_dtype": "bf16"},
        {"n_ctx": 2048, "kv_dtype": "q8_0"},
        {"n_ctx": 8192, "kv_dtype": "q4_0", "n_ubatch": 256},
        {"n_ctx": 2048, "flash_attention": True},
        {"n_ctx": 8192, "flash_attention": True},
        {"n_ctx": 1024, "max_sequences": 4, "n_ubatch": 256},
    ],
    ids=str,
)
def test_sessions(header, weights, allocated, options):
    options = SessionOptions(**options)
    weights.open_session(options).close()
    said = allocated()
    found = estimate(header, options, 1)
    assert found.kv_cache == close_to(said["KV"])
    assert found.compute == close_to(said["compute"] + said["output"])
    assert found.total == found.weights + found.kv_cache + found.compute


def test_slots_take_contexts_and_share_the_weights(header):
    options = SessionOptions(n_ctx=1024)
    one, three = estimate(header, options, 1), estimate(header, options, 3)
    assert (three.weights, three.kv_cache, three.compute) == (one.weights, 3 * one.kv_cache, 3 * one.compute)


def test_an_inspected_file_knows_its_memory(header):
    file = LlamaEngine().inspect(smollm2())
    config = ModelConfig(path=smollm2(), slots=2)
    options = arrange(config, file).options
    assert (file.architecture, file.n_ctx_train, options.n_ctx) == ("llama", 8192, 4096)
    assert file.memory(options, 2) == Footprint(host=estimate(header, options, 2).total)


def test_a_tiny_model(allocated):
    path = tiny_model()
    weights = LlamaEngine().load(path, LoadOptions())
    weights.open_session(SessionOptions(n_ctx=512)).close()
    weights.close()
    found = estimate(read_header(path), SessionOptions(n_ctx=512), 1)
    assert found.kv_cache == close_to(allocated()["KV"])


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": (), "llama.block_count": "many"},
        {"tokenizer.ggml.tokens": (1, 2)},
        {
            "llama.embedding_length": 2**64 - 1,
            "llama.block_count": 2**64 - 1,
            "llama.attention.head_count_kv": 2**32 - 1,
        },
    ],
)
def test_a_header_that_says_little_or_nonsense_has_an_estimate(metadata):
    header = Header({"general.architecture": "llama", **metadata}, (Tensor("t", (32,), 0, 0),), 1000)
    assert estimate(header, SessionOptions(), 16).total >= 128


# -- layers on a GPU


MODEL = Header(
    {"general.architecture": "llama", "llama.block_count": 4, "llama.embedding_length": 64},
    tuple(
        Tensor(name, (size,), 24, 0)
        for name, size in {
            "token_embd.weight": 1000,
            **{f"blk.{layer}.ffn_up.weight": 100 for layer in range(4)},
            "output_norm.weight": 1,
            "output.weight": 500,
        }.items()
    ),
    2000,
)
TIED = replace(MODEL, tensors=MODEL.tensors[:-1])


@pytest.mark.parametrize(
    ("header", "gpu_layers", "weights", "share"),
    [
        (MODEL, 0, 0, 0),
        (MODEL, 1, 501, 0),
        (MODEL, 2, 601, 1 / 4),
        (MODEL, 5, 901, 1),
        (MODEL, 99, 901, 1),
        (MODEL, -1, 901, 1),
        (TIED, -1, 1401, 1),
        (TIED, 3, 1201, 1 / 2),
    ],
)
def test_the_last_layers_go_to_the_gpu_first(header, gpu_layers, weights, share):
    assert device_share(header, gpu_layers) == (weights, share)


def test_memory_on_the_gpu_and_on_the_host(header):
    options = SessionOptions(n_ctx=2048)
    host, gpu = InspectedFile(header), InspectedFile(header, offloads=True)
    assert host.memory(options, 2, -1) == gpu.memory(options, 2, 0) == host.memory(options, 2)
    whole, half = gpu.memory(options, 2, -1), gpu.memory(options, 2, 15)
    flash = estimate(header, replace(options, flash_attention=True), 2)
    assert whole.device + whole.host >= flash.total
    assert half.device < whole.device
    assert half.host > whole.host
    assert gpu.memory(options, 0, -1).device == device_share(header, -1)[0] + KERNELS


def llama(width, forward, layers, heads, kv_heads, vocabulary):
    """The header of a model in the shape of Llama's, in Q8_0."""
    keys = width // heads * kv_heads
    block = {
        "attn_norm": (width,), "attn_q": (width, width), "attn_k": (width, keys), "attn_v": (width, keys),
        "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (width, forward), "ffn_up": (width, forward),
        "ffn_down": (forward, width),
    }  # fmt: skip
    shapes = {"token_embd": (width, vocabulary), "output_norm": (width,), "output": (width, vocabulary)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    f32, q8_0 = 0, 8
    return Header(
        {
            "general.architecture": "llama",
            "llama.vocab_size": vocabulary,
            "llama.embedding_length": width,
            "llama.feed_forward_length": forward,
            "llama.block_count": layers,
            "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": kv_heads,
        },
        tuple(Tensor(f"{name}.weight", shape, q8_0 if len(shape) > 1 else f32, 0) for name, shape in shapes.items()),
        0,
    )


SHAPES = {
    "135M": llama(576, 1536, 30, 9, 3, 49152),
    "1B": llama(2048, 8192, 16, 32, 8, 128256),
    "8B": llama(4096, 14336, 32, 32, 8, 128256),
}


@pytest.mark.parametrize(
    ("shape", "gpu_layers", "options", "one", "two"),
    [
        ("8B", -1, {}, 8312, 8952),
        ("8B", 16, {}, 4322, 4728),
        ("8B", 1, {}, 768, 934),
        ("8B", -1, {"n_ctx": 16384}, 9860, 12048),
        ("1B", -1, {}, 1530, 1738),
        ("1B", 8, {}, 906, 1046),
        ("1B", 1, {}, 420, 504),
        ("1B", -1, {"flash_attention": False}, 1852, 2380),
        ("1B", -1, {"kv_dtype": "q8_0"}, 1470, 1618),
        ("1B", -1, {"n_ubatch": 128}, 1478, 1636),
        ("1B", -1, {"n_ctx": 2048, "max_sequences": 4}, 1656, 1990),
        ("135M", -1, {}, 324, 444),
    ],
)
def test_memory_on_the_gpu_is_what_one_took(shape, gpu_layers, options, one, two):
    """MiB by which the free memory of an H200 shrank from before the load until one and two sessions had worked."""
    file, options = InspectedFile(SHAPES[shape], offloads=True), SessionOptions(**options)
    found = [file.memory(options, slots, gpu_layers).device / MIB for slots in (1, 2)]
    assert found == pytest.approx([one, two], rel=0.1)


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [("8B", {}, 552), ("8B", {"n_ctx": 16384}, 564), ("1B", {}, 278), ("1B", {"n_ubatch": 128}, 269), ("135M", {}, 35)],
)
def test_buffers_on_the_host_of_a_model_on_the_gpu(shape, options, said):
    """MiB that llama.cpp said it put there: the embeddings, and the inputs of one session."""
    found = InspectedFile(SHAPES[shape], offloads=True).memory(SessionOptions(**options), 1, -1)
    assert found.host == close_to(said)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_gpu_without_layers_has_no_part_in_a_step(offloaded):
    assert _parameters(SessionOptions(), offloaded=offloaded).op_offload is offloaded


# --- embeddings ---


def embedding(**options):
    return SessionOptions(task=Task.EMBED, **options)


def full_step(session, tokens):
    """Evaluate as many tokens as the session takes at once; return the bytes by which the process grew."""
    session.add(EmbeddingInput([5] * tokens))
    before = process_memory("RssAnon")
    (event,) = session.step(1)
    assert isinstance(event, Embedded)
    return process_memory("RssAnon") - before


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 64},
        {"n_ctx": 512, "max_sequences": 8},
        {"n_ctx": 2048, "max_sequences": 2},
        {"n_ctx": 2048, "flash_attention": True},
        {"n_ctx": 2048, "kv_dtype": "q8_0", "n_batch": 256},
    ],
    ids=str,
)
def test_sessions_that_embed(header, weights, allocated, options):
    options = embedding(**options)
    weights.open_session(options).close()
    said = allocated()
    found = estimate(header, options, 1)
    # llama.cpp says nothing of the logits that it keeps, as it makes room for them at the first step only.
    kept = 4 * options.n_ctx * weights.vocab_size
    assert found.kv_cache == close_to(said["KV"])
    assert found.compute - kept == close_to(said["compute"])


def test_a_session_that_embeds_keeps_the_logits_of_all_tokens(header, weights):
    options = embedding(n_ctx=256)
    session = weights.open_session(options)
    grown = full_step(session, 256)
    session.close()
    assert grown == pytest.approx(estimate(header, options, 1).compute, rel=0.15)


@pytest.mark.parametrize("options", [{"n_ctx": 512}, {"n_ctx": 256, "max_sequences": 8}], ids=str)
def test_encoders(allocated, options):
    path, options = tiny_encoder(), embedding(**options)
    with loaded(path) as weights, opened(weights, task=Task.EMBED, n_ctx=options.n_ctx):
        said = allocated()
    found = estimate(read_header(path), options, 1)
    assert (found.kv_cache, said["KV"]) == (0, 0)
    assert found.compute == close_to(said["compute"])
