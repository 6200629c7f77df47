"""LoRA adapters: what they change and for whom, and files that don't fit or would end the process."""

import dataclasses
import threading

import numpy as np
import pytest
from gguf_parts import ARRAY, F32, F64, STRING, U32, Parts, TensorParts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_adapters import tiny_adapter
from tiny_models import answer, asking, finish, loaded, opened, smollm2, tiny_encoder, tiny_model

from trioserve.engine.base import (
    Adapter,
    EmbeddingInput,
    Finished,
    LoadFailure,
    SessionOptions,
    Task,
    Token,
    UnfitOptions,
)
from trioserve.engine.estimate import InspectedFile
from trioserve.engine.gguf import Header, HeaderError, Tensor, read_header
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.lora_file import inspect_adapters
from trioserve.engine.model_file import inspect_model

BASE = tiny_model()
EVERYWHERE = (
    "attn_q.weight",
    "attn_v.weight",
    "ffn_up.weight",
    "ffn_down.weight",
    "output.weight",
    "token_embd.weight",
)
STRONG, SILENT = tiny_adapter(BASE, EVERYWHERE), tiny_adapter(BASE, EVERYWHERE, strength=0)
PROMPT = [1, 300, 40, 41, 42, 301, 77]
Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def weights():
    with loaded(BASE) as weights:
        yield weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "adapter.gguf"


def changed(change, source=STRONG):
    """A file's content after a change of its parts."""
    parts = Parts(source.read_bytes())
    change(parts)
    return parts.content()


def using(*adapters):
    """Adapters of a session: paths, or pairs of a path and a scale."""
    return tuple(Adapter(*adapter) if isinstance(adapter, tuple) else Adapter(adapter) for adapter in adapters)


def told(weights, *adapters, **options):
    """What a new session with these adapters says to the prompt: tokens, and how likely each was and its rivals."""
    with opened(weights, adapters=using(*adapters), **options) as session:
        return _likelihoods(session)


def _likelihoods(session):
    number = session.add(asking(PROMPT, 12, logprobs=3))
    likelihoods, ended = [], False
    while not ended:
        for event in session.step(1):
            ended |= isinstance(event, Finished)
            likelihoods += [event.likelihood] if isinstance(event, Token) else []
    session.remove(number)
    return likelihoods


# -- what it changes


def test_an_adapter_of_zeros_changes_no_bit(weights):
    assert told(weights, SILENT) == told(weights)


def test_an_adapter_changes_the_answer_and_with_a_scale_of_zero_it_does_not(weights):
    plain = told(weights)
    assert told(weights, STRONG) != plain
    assert told(weights, (STRONG, 0.0)) == plain
    assert told(weights) == plain  # the weights are what they were


@pytest.mark.parametrize("target", EVERYWHERE)
def test_an_adapter_works_like_weights_that_it_was_added_to(target, tmp_path):
    adapter, scale = tiny_adapter(BASE, (target,), rank=4, alpha=2.0), -1.5
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(changed(lambda parts: _merge(parts, adapter, scale * 2.0 / 4), BASE))
    with loaded(BASE) as base, loaded(merged) as whole:
        with_adapter, alone, with_merged = told(base, (adapter, scale)), told(base), told(whole)
    assert _numbers(with_adapter) == pytest.approx(_numbers(with_merged), abs=1e-4)
    assert _numbers(with_adapter) != pytest.approx(_numbers(alone), abs=1e-2)


def _merge(parts, adapter, scale):
    for a, b in _pairs(Parts(adapter.read_bytes())):
        tensor = parts.tensor(a.name.removesuffix(".lora_a"))
        flipped = tensor.name == "token_embd.weight"
        product = _values(a) @ _values(b).T if flipped else _values(b) @ _values(a)
        tensor.data = (_values(tensor) + scale * product).astype(np.float32).tobytes()


def _pairs(parts):
    for a in parts.tensors:
        if a.name.endswith(".lora_a"):
            yield a, parts.tensor(a.name.removesuffix("a") + "b")


def _values(tensor):
    return np.frombuffer(tensor.data, np.float32, int(np.prod(tensor.shape))).reshape(tensor.shape[::-1])


def _numbers(likelihoods):
    return [likelihood.chosen.logprob for likelihood in likelihoods[:2]]


def test_several_adapters_work_together(weights):
    queries, values = tiny_adapter(BASE, ("attn_q.weight",)), tiny_adapter(BASE, ("attn_v.weight",), seed=2)
    both = told(weights, queries, (values, 0.5))
    assert both == told(weights, (values, 0.5), queries)
    assert both not in (told(weights, queries), told(weights, (values, 0.5)), told(weights))


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_adapters_come_in_several_types(weights, kind):
    rank = 32 if kind == "q8_0" else 3
    assert told(weights, tiny_adapter(BASE, EVERYWHERE, rank, kind=kind)) != told(weights)


def test_an_answer_depends_neither_on_threads_nor_on_the_cuts_of_its_prompt(weights):
    prompt = [1, *range(300, 360)]
    answers = []
    for threads, n_batch in ((1, 64), (2, 64), (1, 16), (2, 7)):
        with opened(weights, adapters=using(STRONG), n_batch=n_batch, n_ubatch=n_batch) as session:
            answers.append(answer(session, asking(prompt, 12), threads=threads).tokens)
    assert answers[1:] == answers[:1] * 3


# -- for whom


def test_sessions_over_the_same_weights_answer_as_alone(weights):
    alone = told(weights), told(weights, STRONG), told(weights, (STRONG, -1.0))
    with (
        opened(weights) as plain,
        opened(weights, adapters=using(STRONG)) as one,
        opened(weights, adapters=using((STRONG, -1.0))) as other,
    ):
        for _ in range(2):
            assert (_likelihoods(plain), _likelihoods(one), _likelihoods(other)) == alone
        numbers = [session.add(asking(PROMPT, 12)) for session in (plain, one, other)]
        tokens = {plain: [], one: [], other: []}
        for _ in range(12):  # step by step, in turn
            for session, found in tokens.items():
                found += [event.token for event in session.step(1) if isinstance(event, Token)]
        assert list(tokens.values()) == [[likelihood.chosen.token for likelihood in told] for told in alone]
        assert numbers == [0, 0, 0]


def test_sequences_of_one_session_have_its_adapters(weights):
    with opened(weights, adapters=using(STRONG), max_sequences=3) as session:
        together = finish(session, *[session.add(asking(PROMPT[: 3 + more], 8)) for more in range(3)])
    with opened(weights, adapters=using(STRONG)) as session:
        alone = [answer(session, asking(PROMPT[: 3 + more], 8)) for more in range(3)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("base", [BASE, tiny_encoder()], ids=["decoder", "encoder"])
def test_vectors_are_changed_too(base):
    def vector(*adapters):
        with opened(weights, task=Task.EMBED, adapters=using(*adapters)) as session:
            assert session.is_sound()
            session.add(EmbeddingInput(PROMPT))
            (event,) = session.step(1)
            return event.vector

    with loaded(base) as weights:
        plain = vector()
        assert vector(tiny_adapter(base, ("attn_q.weight", "ffn_up.weight"), strength=0)) == plain
        assert vector(tiny_adapter(base, ("attn_q.weight", "ffn_up.weight"))) != plain
        assert vector() == plain


def test_a_session_with_adapters_begins_sound_and_goes_on_after_an_interrupt(weights):
    with opened(weights, adapters=using(STRONG)) as session:
        assert session.is_sound()
        first = _likelihoods(session)
        session.add(asking(PROMPT, 12))
        session.interrupt()
        assert session.step(1) == []
        session.reset()
        assert session.is_sound()
        assert _likelihoods(session) == first


def test_a_file_is_read_anew_once_nobody_uses_it(weights, path):
    strong, silent = told(weights, STRONG), told(weights)
    path.write_bytes(STRONG.read_bytes())
    with opened(weights, adapters=using(path)):
        path.write_bytes(SILENT.read_bytes())
        with opened(weights, adapters=using(path)):
            pass
        assert told(weights, path) == strong
    assert told(weights, path) == silent


def test_adapters_come_and_go_while_others_work():
    errors = []

    def work(*adapters):
        try:
            expected = alone[adapters]
            for _ in range(6):
                assert told(weights, *adapters) == expected
        except BaseException as error:
            errors.append(error)

    kinds = [(), (STRONG,), ((SILENT, 2.0), (STRONG, 0.5))]
    with loaded(BASE) as weights:
        alone = {kind: told(weights, *kind) for kind in kinds}
        threads = [threading.Thread(target=work, args=kind) for kind in kinds * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


# -- what doesn't fit


def renamed(old, new):
    def change(parts):
        parts.tensor(old).name = new

    return change


def reshaped(name, *shape, kind=0, nbytes=None):
    def change(parts):
        tensor = parts.tensor(name)
        tensor.shape, tensor.type = shape, kind
        tensor.data = bytes(int(np.prod(shape)) * 4 if nbytes is None else nbytes)

    return change


def both(one, other):
    return lambda parts: (one(parts), other(parts))


def without(name):
    return lambda parts: parts.tensors.remove(parts.tensor(name))


def key(name, kind, value):
    return lambda parts: parts.set(name, kind, value)


UNFIT = {
    "not an adapter": (key("general.type", STRING, "model"), "general.type is 'model'"),
    "no type": (lambda parts: parts.drop("general.type"), "general.type is None"),
    "a type that is no text": (key("general.type", U32, 7), "general.type is 7"),
    "another kind": (key("adapter.type", STRING, "dora"), "adapter.type is 'dora'"),
    "kinds": (key("adapter.type", ARRAY, (STRING, ["lora"])), "adapter.type is 1"),
    "no kind": (lambda parts: parts.drop("adapter.type"), "adapter.type is None"),
    "another family": (key("general.architecture", STRING, "qwen3"), "for qwen3 models, and this is a llama model"),
    "a family that is no text": (key("general.architecture", U32, 1), "does not name its architecture"),
    "alpha of another type": (key("adapter.lora.alpha", U32, 8), "alpha is not a number of 32 bits with a fraction"),
    "alpha of 64 bits": (key("adapter.lora.alpha", F64, 8.0), "alpha is not a number of 32 bits with a fraction"),
    "alpha that is no number": (key("adapter.lora.alpha", F32, float("nan")), "alpha is nan"),
    "alpha without end": (key("adapter.lora.alpha", F32, float("inf")), "alpha is inf"),
    "activated": (key("adapter.alora.invocation_tokens", ARRAY, (U32, [1])), "alora.invocation_tokens"),
    "nothing": (lambda parts: parts.tensors.clear(), "changes no tensor"),
    "half a pair": (without(f"{Q}.lora_b"), f"no tensor '{Q}.lora_b'"),
    "the other half": (without(f"{Q}.lora_a"), f"no tensor '{Q}.lora_a'"),
    "another name": (renamed(f"{Q}.lora_a", f"{Q}.lora_c"), "named neither NAME.lora_a nor NAME.lora_b"),
    "a name with two halves": (renamed(f"{Q}.lora_a", f"{Q}.lora_b.lora_a"), "named neither"),
    "an unknown tensor": (
        both(renamed(f"{Q}.lora_a", "blk.9.x.lora_a"), renamed(f"{Q}.lora_b", "blk.9.x.lora_b")),
        "changes the tensor 'blk.9.x', which the model doesn't have",
    ),
    "too few columns": (reshaped(f"{Q}.lora_a", 32, 4), r"shape \[32, 4\], and \[64, 4, 1, 1\] would fit"),
    "too many rows": (reshaped(f"{Q}.lora_b", 4, 65), r"shape \[4, 65\]"),
    "two ranks": (reshaped(f"{Q}.lora_b", 5, 64), r"shape \[5, 64\]"),
    "more dimensions": (reshaped(f"{Q}.lora_a", 64, 4, 2), r"shape \[64, 4, 2\]"),
    "embeddings the other way round": (reshaped("token_embd.weight.lora_a", 64, 4), "token_embd.weight.lora_a' has"),
    "embeddings of two ranks": (reshaped("token_embd.weight.lora_b", 5, 64), "token_embd.weight.lora_b' has"),
    "no rank": (both(reshaped(f"{Q}.lora_a", 64, 0), reshaped(f"{Q}.lora_b", 0, 64)), "rank .* is 0"),
    "an absurd rank": (
        both(reshaped(f"{Q}.lora_a", 64, 9999), reshaped(f"{Q}.lora_b", 9999, 64)),
        "rank of its tensor .* is 9999; 1 to 64",
    ),
    "integers": (reshaped(f"{Q}.lora_a", 64, 4, kind=26), "is of type 26; usable are F32"),
    "doubles": (reshaped(f"{Q}.lora_a", 64, 4, kind=28, nbytes=64 * 4 * 8), "is of type 28; usable are F32"),
}


@pytest.mark.parametrize(("change", "words"), UNFIT.values(), ids=UNFIT.keys())
def test_an_adapter_that_does_not_fit_is_refused(weights, path, change, words):
    path.write_bytes(changed(change))
    with pytest.raises(UnfitOptions, match=words) as refusal:
        LlamaEngine().inspect(BASE, [path])
    assert refusal.value.option == "lora"
    assert str(path) in str(refusal.value)
    with pytest.raises(UnfitOptions, match=words):
        weights.open_session(SessionOptions(n_ctx=64, adapters=using(path)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends inside its header"),
        (b"no gguf at all", "does not begin with GGUF"),
        (STRONG.read_bytes()[:500], "ends inside its header"),
        (STRONG.read_bytes()[:-100], "truncated"),
        (BASE.read_bytes(), "general.type is None"),
    ],
    ids=["empty", "text", "half a header", "truncated", "a model"],
)
def test_a_file_that_is_no_adapter_is_refused(path, content, words):
    path.write_bytes(content)
    with pytest.raises(UnfitOptions, match=words):
        LlamaEngine().inspect(BASE, [path])


def test_a_missing_file_and_a_file_given_twice_are_refused(path):
    for adapters, words in (([path], "No such file"), ([STRONG, STRONG.parent / "." / STRONG.name], "given twice")):
        with pytest.raises(UnfitOptions, match=words):
            LlamaEngine().inspect(BASE, adapters)


def test_embeddings_that_are_the_output_too_can_not_be_changed():
    base = smollm2()
    with pytest.raises(UnfitOptions, match="is the output's too"):
        LlamaEngine().inspect(base, [tiny_adapter(base, ("token_embd.weight",))])


def test_what_was_refused_holds_nothing(weights, path):
    path.write_bytes(changed(without(f"{Q}.lora_b")))
    with pytest.raises(UnfitOptions):
        weights.open_session(SessionOptions(n_ctx=64, adapters=using(STRONG, path)))
    assert told(weights, STRONG) != told(weights)


def test_numbers_that_are_none_end_nothing(weights, path):
    def change(parts):
        for a, _ in _pairs(parts):
            a.data = np.full(len(a.data) // 4, np.nan, np.float32).tobytes()

    path.write_bytes(changed(change))
    with opened(weights, adapters=using(path)) as session:
        answer(session, asking(PROMPT, 4))
    with opened(weights, adapters=using((STRONG, 1e6))) as session:
        answer(session, asking(PROMPT, 4))


def _header(base, *tensors, **metadata):
    types = {"general.type": "adapter", "adapter.type": "lora"}
    return Header({"general.architecture": base} | types | metadata, tuple(tensors), 1 << 40)


def test_experts_have_to_be_as_many_as_the_model_has(monkeypatch, path):
    def fits(experts):
        a = Tensor("blk.0.ffn_up_exps.weight.lora_a", (64, 4, experts), 0, 0)
        b = Tensor("blk.0.ffn_up_exps.weight.lora_b", (4, 128, experts), 0, 0)
        monkeypatch.setattr("trioserve.engine.lora_file.read_header", lambda path: _header("qwen3moe", a, b))
        return inspect_adapters([path], base)

    base = _header("qwen3moe", Tensor("blk.0.ffn_up_exps.weight", (64, 128, 8), 12, 0))
    assert list(fits(8)) == [path]
    with pytest.raises(HeaderError, match=r"\[64, 4, 7\], and \[64, 4, 8, 1\] would fit"):
        fits(7)


def test_a_matrix_of_nvfp4_and_too_many_pairs_for_a_family_are_refused(monkeypatch, path):
    def pair(name):
        return Tensor(f"{name}.lora_a", (64, 4), 0, 0), Tensor(f"{name}.lora_b", (4, 64), 0, 0)

    def check(base, *paths):
        adapter = _header(base.architecture, *pair("blk.0.attn_q.weight"))
        monkeypatch.setattr("trioserve.engine.lora_file.read_header", lambda path: adapter)
        return inspect_adapters(paths, base)

    with pytest.raises(HeaderError, match="NVFP4"):
        check(_header("llama", Tensor("blk.0.attn_q.weight", (64, 64), 40, 0)), path)
    base = _header("qwen35", Tensor("blk.0.attn_q.weight", (64, 64), 0, 0))
    check(base, path)
    with pytest.raises(HeaderError, match="1 tensors of a qwen35 model can be changed, not 2"):
        check(base, path, path.with_name("other.gguf"))


SMALL = tiny_adapter(BASE, ("blk.0.attn_q.weight",)).read_bytes()
HEAD = len(SMALL) - len(Parts(SMALL).tensors[0].data) - len(Parts(SMALL).tensors[1].data)


@given(st.lists(st.tuples(st.integers(0, HEAD - 1), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_bytes_of_a_header_the_process_lives(weights, path, changes):
    content = bytearray(SMALL)
    for at, byte in changes:
        content[at] = byte
    path.write_bytes(content)
    try:
        session = weights.open_session(SessionOptions(n_ctx=64, adapters=using(path)))
    except LoadFailure:
        return
    answer(session, asking(PROMPT, 2))
    session.close()


# -- memory


def test_an_adapter_counts_once_for_all_sessions_beside_the_weights_that_it_is_for():
    header = inspect_model(BASE)
    adapters = inspect_adapters([STRONG], header)
    nbytes = read_header(STRONG).weights_size
    options = SessionOptions(n_ctx=256)
    with_adapter = dataclasses.replace(options, adapters=using(STRONG))
    file = InspectedFile(header, offloads=True, adapters=adapters)
    for slots in (0, 1, 3):
        added = file.memory(with_adapter, slots) - file.memory(options, slots)
        assert (added.host, added.device) == (nbytes, 0)
    added = file.memory(with_adapter, 2, -1) - file.memory(options, 2, -1)
    embeddings = sum(t.nbytes for t in adapters[STRONG].tensors if t.name.startswith("token_embd"))
    assert (added.host, added.device) == (embeddings, nbytes - embeddings)


def test_a_tensor_of_norms_is_left_out_as_llama_cpp_does(weights, path):
    def change(parts):
        parts.tensors.append(TensorParts("blk.0.attn_norm.weight", (64,), 0, bytes(256)))

    path.write_bytes(changed(change))
    assert told(weights, path) == told(weights, STRONG)
