"""Sessions that turn texts into vectors: what comes out doesn't depend on the company, and nothing is left behind."""

import itertools
import math
import threading

import gguf
import pytest
from tiny_models import (
    BOS,
    EOS,
    answer,
    asking,
    growth,
    loaded,
    opened,
    smollm2,
    tiny_encoder,
    tiny_encoder_decoder,
    tiny_model,
    tiny_t5_encoder,
)

from trioserve.engine.base import (
    Embedded,
    EmbeddingInput,
    Failed,
    LoadFailure,
    LoadOptions,
    SessionOptions,
    Task,
    UnfitOptions,
)
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.llama.context import Context, Outcome

TINY = {"llama": tiny_model, "bert": tiny_encoder, "t5": tiny_t5_encoder}
LENGTHS = [1, 40, 7, 90, 3, 64, 20, 33]
MIB = 1 << 20


@pytest.fixture(scope="module", params=TINY)
def weights(request):
    with loaded(TINY[request.param]()) as weights:
        yield weights


@pytest.fixture(scope="module")
def llama():
    with loaded(tiny_model()) as weights:
        yield weights


@pytest.fixture(scope="module")
def real():
    with loaded(smollm2()) as weights:
        yield weights


@pytest.fixture
def decodes(monkeypatch):
    """The sizes of the batches that sessions opened from here on evaluate; ``outcomes`` are forced in turn."""

    class Decodes(list):
        under_way = threading.Event()

    seen = Decodes()
    seen.outcomes = []

    class Watched(Context):
        def decode(self, batch, threads):
            seen.append(batch.size)
            seen.under_way.set()
            outcome = super().decode(batch, threads)
            return seen.outcomes.pop(0) if seen.outcomes else outcome

    monkeypatch.setattr("trioserve.engine.llama.embedder.Context", Watched)
    return seen


def embedding(weights, **options):
    return opened(weights, task=Task.EMBED, **options)


def text(weights, length, seed=0):
    """Tokens that differ from those of other lengths and seeds from the beginning on."""
    return [3 + (length * 31 + seed * 17 + i * i) % (weights.vocab_size - 3) for i in range(length)]


def works(weights, lengths):
    return [EmbeddingInput(text(weights, length, index)) for index, length in enumerate(lengths)]


def embed(session, works):
    """The events that end these works, in their order; at most so many at once as the session takes."""
    waiting, places, found = list(enumerate(works)), {}, {}
    while len(found) < len(works):
        while waiting and len(places) < session.max_sequences:
            place, work = waiting.pop(0)
            places[session.add(work)] = place
        for event in session.step(1):
            found[places.pop(event.sequence)] = event
            session.remove(event.sequence)
    return [found[place] for place in range(len(works))]


def vectors(session, works):
    return [event.vector for event in embed(session, works)]


def cosine(one, other):
    return math.sumprod(one, other) if hasattr(math, "sumprod") else sum(a * b for a, b in zip(one, other, strict=True))


def alike(some, others):
    return all(cosine(one, other) > 0.9999 for one, other in zip(some, others, strict=True))


# --- vectors ---


def test_a_vector_has_the_models_width_and_unit_length(weights):
    with embedding(weights) as session:
        assert session.traits.task is Task.EMBED
        for vector in vectors(session, works(weights, LENGTHS)):
            assert vector.typecode == "f"
            assert len(vector) == weights.n_embd == 64
            assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


def test_texts_that_differ_have_vectors_that_differ(weights):
    with embedding(weights) as session:
        for one, other in itertools.combinations(vectors(session, works(weights, LENGTHS)), 2):
            assert cosine(one, other) < 0.999


@pytest.mark.parametrize("size", [2, 5, 16, 33, 64, 256])
def test_the_company_of_a_batch_changes_no_vector(weights, size):
    wanted = works(weights, [LENGTHS[index % len(LENGTHS)] + index % 5 for index in range(size)])
    with embedding(weights, n_ctx=512) as session:
        alone = vectors(session, wanted)
    with embedding(weights, n_ctx=512, max_sequences=size) as session:
        assert alike(vectors(session, wanted), alone)
        assert alike(vectors(session, wanted[::-1]), alone[::-1])


@pytest.mark.parametrize("size", [3, 64])
def test_the_company_of_a_batch_changes_no_vector_of_a_real_model(real, size):
    wanted = works(real, [1 + index % 4 for index in range(size)])
    with embedding(real) as session:
        alone = vectors(session, wanted)
    with embedding(real, max_sequences=size) as session:
        together = vectors(session, wanted)
    assert alike(together, alone)
    assert len(together[0]) == real.n_embd == 576


def test_texts_of_like_meaning_are_nearer_to_each_other(real):
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Interest rates rose by half a percent."]
    with embedding(real, max_sequences=3) as session:
        tokens = [real.tokenize(text, special=True, add_bos=True) for text in texts]
        cat, other_cat, rates = vectors(session, [EmbeddingInput(each) for each in tokens])
    assert cosine(cat, other_cat) > cosine(cat, rates)


@pytest.mark.parametrize("dimensions", [1, 2, 63, 64])
def test_the_beginning_of_a_vector_is_at_unit_length_too(weights, dimensions):
    tokens = text(weights, 10)
    with embedding(weights) as session:
        whole, part = vectors(session, [EmbeddingInput(tokens), EmbeddingInput(tokens, dimensions)])
    length = math.hypot(*whole[:dimensions])
    assert list(part) == pytest.approx([number / length for number in whole[:dimensions]], abs=1e-6)


# --- pooling ---


def pooled(weights, tokens, pooling):
    with embedding(weights, pooling=pooling) as session:
        return vectors(session, [EmbeddingInput(tokens)])[0]


def test_the_mean_is_that_of_the_others(llama):
    """In a causal model the first token's vector is that of the text of one token, and so is its mean."""
    one = text(llama, 1)
    first = pooled(llama, one, "mean")
    assert alike([first] * 3, [pooled(llama, one, "last"), pooled(llama, [*one, 5, 6], "cls"), first])
    assert cosine(pooled(llama, [*one, 5, 6], "mean"), pooled(llama, [*one, 5, 6], "last")) < 0.999
    assert cosine(pooled(llama, [*one, 5, 6], "mean"), first) < 0.999


@pytest.mark.parametrize(
    ("own", "pooling"), [(None, "mean"), ("NONE", "mean"), ("MEAN", "mean"), ("CLS", "cls"), ("LAST", "last")]
)
def test_a_model_is_pooled_in_its_own_way_and_by_the_mean_where_it_has_none(own, pooling):
    with loaded(tiny_encoder(own and gguf.PoolingType[own])) as weights:
        tokens = text(weights, 20)
        expected = pooled(weights, tokens, pooling)
        assert cosine(pooled(weights, tokens, "auto"), expected) > 0.99999
        for other in {"mean", "cls", "last"} - {pooling}:
            assert cosine(pooled(weights, tokens, other), expected) < 0.999


def test_a_text_gets_the_special_tokens_that_the_tokenizer_wants():
    with loaded(tiny_encoder(add_eos=True)) as weights:
        tokens = weights.tokenize("the", special=True, add_bos=True)
    assert (tokens[0], tokens[-1]) == (BOS, EOS)


# --- steps ---


def test_a_step_takes_as_many_whole_texts_as_fit(llama, decodes):
    with embedding(llama, n_ctx=100, max_sequences=8) as session:
        embed(session, works(llama, [60, 50, 30, 100, 10, 1]))
    assert decodes == [100, 51, 100]  # 60 + 30 + 10, then 50 + 1, then the long one alone


def test_a_step_takes_no_more_than_the_batch_but_for_one_text(llama, decodes):
    with embedding(llama, n_ctx=100, n_batch=40, max_sequences=8) as session:
        embed(session, works(llama, [30, 10, 90, 20, 20]))
    assert decodes == [40, 90, 40]


def test_a_context_forgets_the_texts_of_each_step(llama):
    with embedding(llama, n_ctx=64, max_sequences=2) as session:
        assert all(isinstance(event, Embedded) for event in embed(session, works(llama, [64] * 10)))


@pytest.mark.parametrize("how", ["embedded", "interrupted", "waiting"])
def test_a_session_is_sound_after_a_reset_whatever_was_before(weights, how):
    with embedding(weights, max_sequences=2) as session:
        assert session.is_sound()
        numbers = [session.add(work) for work in works(weights, [9, 5])]
        assert not session.is_sound(), "texts wait"
        if how == "interrupted":
            session.interrupt()
        if how != "waiting":
            session.step(1)
        if how == "embedded":
            session.remove(numbers[0])
            assert not session.is_sound(), "one is still taken"
        session.reset()
        assert session.is_sound()


def test_a_session_without_texts_has_nothing_to_do(llama, decodes):
    with embedding(llama) as session:
        assert session.step(1) == []
    assert decodes == []


def test_what_does_not_fit_is_refused(weights):
    with embedding(weights, n_ctx=100, max_sequences=2) as session:
        for wrong in (EmbeddingInput([]), EmbeddingInput([5] * 101), asking([BOS])):
            with pytest.raises(ValueError, match=r"takes no|does not fit"):
                session.add(wrong)
        for work in works(weights, [100, 1]):
            session.add(work)
        with pytest.raises(RuntimeError, match="all 2 sequences"):
            session.add(EmbeddingInput([5]))


def test_a_removed_text_is_not_evaluated(llama, decodes):
    with embedding(llama, max_sequences=2) as session:
        gone, kept = map(session.add, works(llama, [10, 5]))
        session.remove(gone)
        assert [event.sequence for event in session.step(1)] == [kept]
    assert decodes == [5]


def test_a_failed_step_fails_its_texts_and_no_others(llama, decodes):
    wanted = works(llama, [60, 50, 40])
    with embedding(llama, n_ctx=100, max_sequences=3) as session:
        decodes.outcomes.append(Outcome.FAILED)
        first, second, third = embed(session, wanted)
        assert (type(first), type(second), type(third)) == (Failed, Embedded, Failed)
        assert alike(vectors(session, wanted[1:2]), [second.vector])


def test_a_token_that_the_model_does_not_have_fails_its_step(llama):
    with embedding(llama) as session:
        (failed,) = embed(session, [EmbeddingInput([-1])])
        assert isinstance(failed, Failed)
        assert failed.message
        assert isinstance(embed(session, works(llama, [5]))[0], Embedded)


def test_a_vector_without_a_direction_is_a_failure(llama, monkeypatch):
    monkeypatch.setattr(Context, "vector", lambda self, _: self.numbers)
    import numpy as np

    with embedding(llama) as session:
        for numbers in ([0, 0], [np.nan, 1], [np.inf, 1]):
            monkeypatch.setattr(Context, "numbers", np.array(numbers, np.float32), raising=False)
            (failed,) = embed(session, [EmbeddingInput([5])])
            assert "no direction" in failed.message


# --- interrupts ---


def test_an_interrupt_stops_a_step_in_the_middle(real, decodes):
    with embedding(real, n_ctx=1024) as session:
        expected = vectors(session, works(real, [9]))
        decodes.under_way.clear()
        session.add(EmbeddingInput(text(real, 1024)))

        def interrupt():
            assert decodes.under_way.wait(60)
            session.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert [session.step(1) for _ in range(3)] == [[]] * 3
        thread.join()
        assert decodes[-1] == 1024
        session.reset()
        assert session.step(1) == []
        assert alike(vectors(session, works(real, [9])), expected)


def test_an_interrupt_before_a_step_holds_until_reset(weights, decodes):
    with embedding(weights) as session:
        session.add(EmbeddingInput([5]))
        session.interrupt()
        assert session.step(1) == []
        assert decodes == []
        session.reset()
        assert isinstance(embed(session, [EmbeddingInput([5])])[0], Embedded)


# --- which model can do what ---


@pytest.mark.parametrize("path", [tiny_encoder, tiny_t5_encoder])
def test_an_encoder_does_not_generate_and_says_what_it_is_for(path):
    with loaded(path()) as weights, pytest.raises(UnfitOptions, match='task = "embed"'):
        weights.open_session(SessionOptions(n_ctx=128))


def test_one_model_does_both_side_by_side(llama):
    question = asking([BOS, 300, 301], 8, ignore_eos=True)
    with opened(llama) as session, embedding(llama, max_sequences=4) as embedder:
        before = answer(session, question).tokens
        number = session.add(question)
        session.step(1)
        expected = vectors(embedder, works(llama, [5, 9]))
        session.remove(number)
        assert answer(session, question).tokens == before
        assert alike(vectors(embedder, works(llama, [5, 9])), expected)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (lambda: tiny_model(vocabulary=False), "no vocabulary"),
        (tiny_encoder_decoder, "encoder and a decoder"),
        (lambda: tiny_encoder(gguf.PoolingType.RANK), "rank"),
    ],
)
def test_models_of_other_kinds_are_refused(path, words):
    with pytest.raises(LoadFailure, match=words):
        LlamaEngine().load(path(), LoadOptions())


def test_more_context_than_a_model_has_positions_is_refused():
    """llama.cpp would end the process at the first token beyond."""
    with loaded(tiny_encoder()) as weights:
        with pytest.raises(UnfitOptions, match="n_ctx is 513, but the model has learnt 512 positions"):
            weights.open_session(SessionOptions(task=Task.EMBED, n_ctx=513))
        with embedding(weights, n_ctx=512) as session:
            assert isinstance(embed(session, works(weights, [512]))[0], Embedded)


@pytest.mark.parametrize("max_sequences", [1, 3, 7, 100, 256])
@pytest.mark.parametrize("n_ctx", [16, 100, 512])
def test_any_context_goes_with_any_number_of_sequences(weights, n_ctx, max_sequences):
    with embedding(weights, n_ctx=n_ctx, max_sequences=max_sequences) as session:
        wanted = works(weights, [n_ctx, 1, 2, *[1] * min(max_sequences, n_ctx)])
        assert all(isinstance(event, Embedded) for event in embed(session, wanted))


def test_closed_sessions_give_their_memory_back(weights):
    def open_and_close():
        with embedding(weights, n_ctx=512, max_sequences=8) as session:
            embed(session, works(weights, [200, 100]))

    assert growth(open_and_close, 20, "RssAnon") < 8 * MIB
