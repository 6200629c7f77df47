"""Random models of a few hundred kilobytes, written on first use, and the shortest way to an answer from one.

The weights are a function of the seed and the shape alone: two models that differ in their tokenizer's keys only
compute the same numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import shutil
import string
import tempfile
from pathlib import Path

import pytest

from trioserve.config.model_files import embedded_model_path
from trioserve.engine.base import Failed, Finished, LoadOptions, SequenceRequest, SessionOptions, Token
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.model_file import inspect_model
from trioserve.engine.rounding import grain
from trioserve.engine.sampling import Sampling
from trioserve.errors import ConfigError

import gguf  # isort: skip - brings numpy in, which has to come after llama_cpp
import numpy as np  # isort: skip

UNKNOWN, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3  # id of <0x00>
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GREEDY = Sampling(temperature=0)

_WORDS = ["▁" + a + b for a, b in itertools.product("bdfklmnprst", "aeiou")]
_PIECES = ["▁", *string.ascii_letters, *string.digits, *".,:;!?-'\n", *_WORDS, "▁the", "é", "한", "국", "🙂"]
_Q8_0_COLUMNS = 32


@dataclasses.dataclass(frozen=True)
class Tiny:
    """The shape of a model.

    Attributes:
        seed: of the weights.
        quantised: Q8_0 weights instead of F32.
        add_bos: the tokenizer wants a beginning-of-sequence token in front.
        eos: id of the token that ends an answer.
        vocabulary: False leaves the tokenizer out.
        gap: ids of the tokens that begin the prefix, the suffix and the middle of a text with a gap, or some of them.
        architecture: as the header names it; the tensors are those of the llama architecture whatever it says.
    """

    seed: int = 1
    dim: int = 64
    ff: int = 128
    layers: int = 2
    heads: int = 4
    quantised: bool = False
    n_ctx_train: int = 512
    add_bos: bool = True
    eos: int = EOS
    template: str | None = None
    vocabulary: bool = True
    architecture: str = "llama"
    gap: tuple[int, ...] = ()


@functools.cache
def tiny_model(**shape):
    """Write a model once per shape and return its path; see ``Tiny`` for what a shape is."""
    tiny = Tiny(**shape)
    writer, path = _start(tiny.architecture)
    _hyperparameters(writer, tiny)
    _tokenizer(writer, tiny)
    rng = np.random.default_rng(tiny.seed)
    for name, dims in _llama_tensors(tiny):
        _random_tensor(writer, rng, name, dims, quantised=tiny.quantised)
    return _finish(writer, path)


@functools.cache
def tiny_encoder(pooling=gguf.PoolingType.MEAN, add_eos=False):
    """Write a BERT-shaped model: it turns text into vectors and answers nothing."""
    tiny = Tiny(layers=1)
    writer, path = _start("bert")
    _hyperparameters(writer, tiny)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_token_type_count(2)
    _tokenizer(writer, tiny)
    writer.add_add_eos_token(add_eos)
    rng = np.random.default_rng(tiny.seed)
    for name, dims in _bert_tensors(tiny):
        _random_tensor(writer, rng, name, dims)
    return _finish(writer, path)


@functools.cache
def tiny_windowed(window=32):
    """Write a model of whose layers some look no further back than a window."""
    tiny = Tiny(layers=4)
    writer, path = _start("cohere2")
    _hyperparameters(writer, tiny)
    writer.add_layer_norm_eps(1e-5)
    writer.add_sliding_window(window)
    writer.add_logit_scale(1.0)
    _tokenizer(writer, tiny)
    rng = np.random.default_rng(tiny.seed)
    _random_tensor(writer, rng, "token_embd.weight", (len(_vocabulary()), tiny.dim))
    _random_tensor(writer, rng, "output_norm.weight", (tiny.dim,))
    for layer in range(tiny.layers):
        at = f"blk.{layer}."
        _random_tensor(writer, rng, at + "attn_norm.weight", (tiny.dim,))
        for part in ("q", "k", "v", "output"):
            _random_tensor(writer, rng, at + f"attn_{part}.weight", (tiny.dim, tiny.dim))
        for part in ("gate", "up"):
            _random_tensor(writer, rng, at + f"ffn_{part}.weight", (tiny.ff, tiny.dim))
        _random_tensor(writer, rng, at + "ffn_down.weight", (tiny.dim, tiny.ff))
    return _finish(writer, path)


@functools.cache
def tiny_recurrent():
    """Write a model whose memory of a sequence is one state, of which no part can be forgotten."""
    tiny, inner, state, rank, kernel = Tiny(), 128, 16, 4, 4
    writer, path = _start("mamba")
    _hyperparameters(writer, tiny)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    _tokenizer(writer, tiny)
    rng = np.random.default_rng(tiny.seed)
    _random_tensor(writer, rng, "token_embd.weight", (len(_vocabulary()), tiny.dim))
    _random_tensor(writer, rng, "output_norm.weight", (tiny.dim,))
    for layer in range(tiny.layers):
        at = f"blk.{layer}."
        writer.add_tensor(f"{at}ssm_a", -np.ones((inner, state), np.float32))
        for name, dims in (
            ("attn_norm.weight", (tiny.dim,)),
            ("ssm_in.weight", (2 * inner, tiny.dim)),
            ("ssm_conv1d.weight", (inner, kernel)),
            ("ssm_conv1d.bias", (inner,)),
            ("ssm_x.weight", (rank + 2 * state, inner)),
            ("ssm_dt.weight", (inner, rank)),
            ("ssm_dt.bias", (inner,)),
            ("ssm_d", (inner,)),
            ("ssm_out.weight", (tiny.dim, inner)),
        ):
            _random_tensor(writer, rng, at + name, dims)
    return _finish(writer, path)


@functools.cache
def tiny_encoder_decoder():
    """Write a T5-shaped model: its decoder answers nothing without its encoder's output."""
    return _t5("t5", ("enc", "dec"))


@functools.cache
def tiny_t5_encoder():
    """Write the encoder of a T5-shaped model."""
    return _t5("t5encoder", ("enc",))


def _t5(architecture, sides):
    tiny = Tiny(layers=1)
    writer, path = _start(architecture)
    _hyperparameters(writer, tiny)
    writer.add_key_length(tiny.dim // tiny.heads)
    writer.add_value_length(tiny.dim // tiny.heads)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(BOS)
    _tokenizer(writer, tiny)
    rng = np.random.default_rng(tiny.seed)
    for name, dims in _t5_tensors(tiny, sides):
        _random_tensor(writer, rng, name, dims)
    return _finish(writer, path)


def smollm2():
    """Path of the one model with sense in it, which comes with a package. Skips the test where it is not installed."""
    try:
        return embedded_model_path()
    except ConfigError as missing:
        pytest.skip(str(missing))


@contextlib.contextmanager
def loaded(path, **options):
    """Load a model for the length of a block."""
    weights = LlamaEngine().load(path, LoadOptions(**options))
    try:
        yield weights
    finally:
        weights.close()


@contextlib.contextmanager
def opened(weights, **options):
    """Open a session for the length of a block; small by default."""
    session = weights.open_session(SessionOptions(**{"n_ctx": 256, **options}))
    try:
        yield session
    finally:
        session.close()


def asking(prompt, max_tokens=16, sampling=GREEDY, **fields):
    """A request, greedy by default."""
    return SequenceRequest(prompt, max_tokens, sampling, **fields)


@dataclasses.dataclass
class Answer:
    """What became of one sequence."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    end: Finished | Failed | None = None

    @property
    def reason(self):
        return self.end.reason

    def take(self, event):
        assert self.end is None, f"{event} came after {self.end}"
        if isinstance(event, Token):
            self.tokens.append(event.token)
        else:
            self.end = event
        self.text += getattr(event, "text", "")


def finish(session, *numbers, threads=1):
    """Step until the sequences of these numbers have ended; theirs are the only live ones. Returns their answers."""
    answers = {number: Answer() for number in numbers}
    while any(answer.end is None for answer in answers.values()):
        for event in session.step(threads):
            answers[event.sequence].take(event)
    return [answers[number] for number in numbers]


def answer(session, request, threads=1):
    """Work one request on an empty session and leave it empty."""
    number = session.add(request)
    try:
        return finish(session, number, threads=threads)[0]
    finally:
        session.remove(number)


def grain_of(path):
    """Tokens whose multiples prompts for a model are cut at, on this machine."""
    return grain(inspect_model(path).tensors)


def process_memory(*fields):
    """Sum of fields of /proc/self/status, in bytes. RssAnon is the process's own, RssFile what it maps of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[field].split()[0]) * 1024 for field in fields)


def growth(action, times, *fields):
    """Bytes that the process grew by in so many rounds, after some to warm up."""
    for _ in range(max(3, times)):  # the allocator takes that long to settle
        action()
    before = process_memory(*fields)
    for _ in range(times):
        action()
    return process_memory(*fields) - before


@functools.cache
def _directory():
    path = Path(tempfile.mkdtemp(prefix="trioserve-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


_serial = itertools.count()


def _start(architecture):
    path = _directory() / f"{architecture}-{next(_serial)}.gguf"
    return gguf.GGUFWriter(path, architecture), path


def _finish(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(writer, tiny):
    writer.add_name("tiny")
    writer.add_context_length(tiny.n_ctx_train)
    writer.add_embedding_length(tiny.dim)
    writer.add_block_count(tiny.layers)
    writer.add_feed_forward_length(tiny.ff)
    writer.add_head_count(tiny.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(tiny.dim // tiny.heads)
    writer.add_vocab_size(len(_vocabulary()))


def _tokenizer(writer, tiny):
    if not tiny.vocabulary:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model("llama")
    texts, scores, kinds = zip(*_vocabulary(), strict=True)
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(tiny.eos)
    writer.add_add_bos_token(tiny.add_bos)
    writer.add_add_space_prefix(False)
    for name, token in zip(("pre", "suf", "mid"), tiny.gap, strict=False):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token)
    if tiny.template is not None:
        writer.add_chat_template(tiny.template)


@functools.cache
def _vocabulary():
    """Text, score and kind of each token: specials, the 256 bytes, and pieces of which the longer ones win."""
    kind = gguf.TokenType
    specials = [("<unk>", 0.0, kind.UNKNOWN), ("<s>", 0.0, kind.CONTROL), ("</s>", 0.0, kind.CONTROL)]
    single = [(f"<0x{byte:02X}>", 0.0, kind.BYTE) for byte in range(256)]
    pieces = [(piece, float(len(piece)), kind.NORMAL) for piece in _PIECES]
    return specials + single + pieces


def _llama_tensors(tiny):
    """Names and shapes, the vectors of norms among them."""
    dim, ff, vocab = tiny.dim, tiny.ff, len(_vocabulary())
    yield from [("token_embd.weight", (vocab, dim)), ("output_norm.weight", (dim,)), ("output.weight", (vocab, dim))]
    for layer in range(tiny.layers):
        at = f"blk.{layer}."
        yield from [(f"{at}{norm}_norm.weight", (dim,)) for norm in ("attn", "ffn")]
        yield from [(f"{at}attn_{part}.weight", (dim, dim)) for part in ("q", "k", "v", "output")]
        yield from [(f"{at}ffn_{part}.weight", (ff, dim)) for part in ("gate", "up")]
        yield f"{at}ffn_down.weight", (dim, ff)


def _bert_tensors(tiny):
    dim, ff, vocab = tiny.dim, tiny.ff, len(_vocabulary())
    yield from [("token_embd.weight", (vocab, dim)), ("token_types.weight", (2, dim))]
    yield "position_embd.weight", (tiny.n_ctx_train, dim)
    norms = ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"]
    yield from [(f"{norm}.{part}", (dim,)) for norm in norms for part in ("weight", "bias")]
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        yield from [(f"blk.0.{part}.weight", (dim, dim)), (f"blk.0.{part}.bias", (dim,))]
    yield from [("blk.0.ffn_up.weight", (ff, dim)), ("blk.0.ffn_up.bias", (ff,))]
    yield from [("blk.0.ffn_down.weight", (dim, ff)), ("blk.0.ffn_down.bias", (dim,))]


def _t5_tensors(tiny, sides):
    dim, ff = tiny.dim, tiny.ff
    yield "token_embd.weight", (len(_vocabulary()), dim)
    for side in sides:
        attentions = ["attn"] if side == "enc" else ["attn", "cross_attn"]
        at = f"{side}.blk.0."
        yield from [(f"{side}.output_norm.weight", (dim,)), (f"{at}ffn_norm.weight", (dim,))]
        yield f"{at}attn_rel_b.weight", (8, tiny.heads)
        for attention in attentions:
            yield f"{at}{attention}_norm.weight", (dim,)
            yield from [(f"{at}{attention}_{part}.weight", (dim, dim)) for part in "qkvo"]
        yield from [(f"{at}ffn_up.weight", (ff, dim)), (f"{at}ffn_down.weight", (dim, ff))]


def _random_tensor(writer, rng, name, dims, *, quantised=False):
    if len(dims) == 1:
        writer.add_tensor(name, np.ones(dims, np.float32))
        return
    # Unit variance through every layer: the numbers neither die out nor explode, and no answer repeats one token.
    values = rng.normal(0, dims[1] ** -0.5, dims).astype(np.float32)
    if quantised and dims[1] % _Q8_0_COLUMNS == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)
