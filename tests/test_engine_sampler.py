"""The sampler chain on tiny models: what each parameter does to an answer."""

import dataclasses
import math

import pytest
from tiny_models import BOS, GREEDY, answer, asking, finish, growth, loaded, opened, tiny_model

from trioserve.engine.base import FinishReason, Token
from trioserve.engine.sampling import Dry, Mirostat, Sampling

MIB = 1 << 20
PROMPT = [BOS, 5, 6, 7, 300, 301]
TOKENS = 40
FREE = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)  # nothing is cut off
HOT = dataclasses.replace(FREE, temperature=2.0)


@pytest.fixture(scope="module")
def weights():
    with loaded(tiny_model()) as tiny:
        yield tiny


@pytest.fixture(scope="module")
def answered(weights):
    """The tokens of an answer under some sampling."""
    with opened(weights) as session:

        def tokens(base=FREE, prompt=PROMPT, max_tokens=TOKENS, **changes):
            sampling = dataclasses.replace(base, **changes)
            return answer(session, asking(prompt, max_tokens, sampling, ignore_eos=True)).tokens

        yield tokens


@pytest.fixture(scope="module")
def greedy(answered):
    tokens = answered(GREEDY)
    assert len(set(tokens)) > 10  # an answer that could not differ would prove nothing
    return tokens


def first_choices(answered, base, seeds=60, **changes):
    return {answered(base, max_tokens=1, seed=seed, **changes)[0] for seed in range(seeds)}


# --- seeds ---


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 - 2])
def test_equal_seeds_give_equal_answers(answered, seed):
    assert answered(seed=seed) == answered(seed=seed)


def test_different_seeds_give_different_answers(answered):
    assert len({tuple(answered(seed=seed)) for seed in (0, 1, 2, 42, 43, 2**31, 2**32 - 2)}) == 7


def test_a_seed_counts_whoever_else_is_sampled(weights, answered):
    alone = [answered(seed=seed) for seed in (42, 43)]
    with opened(weights, max_sequences=3) as session:
        numbers = [
            session.add(asking(PROMPT, TOKENS, dataclasses.replace(FREE, seed=seed), ignore_eos=True))
            for seed in (7, 42, 43)
        ]
        assert [got.tokens for got in finish(session, *numbers)][1:] == alone


def test_greedy_answers_do_not_depend_on_the_seed(answered, greedy):
    assert answered(GREEDY, seed=43) == greedy


# --- what leaves one choice only ---


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-20, 1e-38, 1e-45, 1e-300])
def test_tiny_temperatures_are_greedy(answered, greedy, temperature):
    assert answered(temperature=temperature, seed=3) == greedy


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_cut_is_greedy_however_hot(answered, greedy, only):
    assert answered(HOT, seed=3, **only) == greedy


def test_penalties_off_leave_greedy_as_it_is(answered, greedy):
    assert answered(GREEDY, repeat_penalty=1.0, repeat_last_n=64) == greedy
    assert answered(GREEDY, repeat_penalty=10.0, repeat_last_n=0) == greedy


# --- what narrows the choice ---


def test_top_k_keeps_so_many(answered, greedy):
    assert greedy[0] in first_choices(answered, HOT, top_k=3)
    assert 1 < len(first_choices(answered, HOT, top_k=3)) <= 3 < len(first_choices(answered, HOT, top_k=0))


@pytest.mark.parametrize("cut", [{"top_p": 0.1}, {"min_p": 0.3}])
def test_a_cut_by_probability_narrows_the_choice(answered, cut):
    narrowed = first_choices(answered, FREE, **cut)
    assert 1 < len(narrowed) < len(first_choices(answered, FREE)) / 2


def test_heat_widens_the_choice(answered):
    sizes = [len(first_choices(answered, FREE, temperature=temperature)) for temperature in (0.1, 0.5, 2.0)]
    assert sizes == sorted(set(sizes))


# --- penalties ---


def test_a_repeat_penalty_avoids_what_was_said(answered, greedy):
    assert len(set(greedy)) < TOKENS
    assert len(set(answered(GREEDY, repeat_penalty=10.0))) == TOKENS


@pytest.mark.parametrize("last_n", [2, 4, 6, 64, 2**31 - 1])
def test_a_repeat_penalty_looks_back_on_so_much_of_the_prompt(answered, greedy, last_n):
    favoured = answered(GREEDY, repeat_penalty=1e-4, repeat_last_n=last_n, max_tokens=1)[0]
    assert greedy[0] not in PROMPT
    assert favoured in PROMPT[-last_n:]


@pytest.mark.parametrize("penalty", [1e-10, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("temperature", [1.0, 1e-8, 1e-45])
def test_the_least_repeat_penalties_still_choose_by_probability(answered, penalty, temperature):
    """A positive logit divided by next to nothing must not become an infinity."""
    gentle = answered(GREEDY, repeat_penalty=1e-6)
    assert answered(repeat_penalty=penalty, temperature=temperature) == gentle


@pytest.mark.parametrize("kind", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_look_at_the_answer_alone(answered, greedy, kind):
    said_before = [*PROMPT[:1], *range(3, 200), *PROMPT[1:]]
    plain = answered(GREEDY, prompt=said_before)
    assert plain[0] in said_before
    assert answered(GREEDY, prompt=said_before, max_tokens=1, **{kind: 2.0}) == plain[:1]
    assert answered(GREEDY, max_tokens=1, **{kind: -2.0}) == greedy[:1]


@pytest.mark.parametrize("kind", ["frequency_penalty", "presence_penalty"])
def test_a_positive_penalty_repeats_less_and_a_negative_one_more(answered, greedy, kind):
    less, more = (len(set(answered(GREEDY, **{kind: penalty}))) for penalty in (2.0, -2.0))
    assert more < len(set(greedy)) < less


def test_frequency_counts_each_use_and_presence_the_first_one():
    with loaded(tiny_model(seed=5)) as weights, opened(weights) as session:

        def most_used(**changes):
            sampling = dataclasses.replace(GREEDY, **changes)
            tokens = answer(session, asking(PROMPT, 200, sampling, ignore_eos=True)).tokens
            return max(map(tokens.count, tokens))

        assert most_used(frequency_penalty=1.0) < most_used(presence_penalty=1.0) <= most_used()


def test_penalties_look_back_over_the_whole_answer(weights):
    with opened(weights, n_ctx=512) as session:
        sampling = dataclasses.replace(GREEDY, repeat_penalty=1e4, repeat_last_n=2**31 - 1)
        tokens = answer(session, asking(PROMPT, 200, sampling, ignore_eos=True)).tokens
    assert len(set(tokens) - set(PROMPT)) == 200


# --- banned tokens ---


@pytest.fixture(scope="module")
def ending(greedy):
    """Weights whose end token is what the greedy answer says most often."""
    end = max(greedy, key=greedy.count)
    with loaded(tiny_model(eos=end)) as weights, opened(weights) as session:
        yield session, end


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        dataclasses.replace(GREEDY, presence_penalty=-2.0),
        FREE,
        HOT,
        dataclasses.replace(FREE, temperature=1e-8),
    ],
    ids=["greedy", "greedy with penalties", "free", "hot", "cold"],
)
def test_banned_tokens_are_never_chosen(ending, sampling):
    session, end = ending
    for seed in range(10):
        request = asking(PROMPT, 100, dataclasses.replace(sampling, seed=seed), ignore_eos=True)
        got = answer(session, request)
        assert end not in got.tokens
        assert (len(got.tokens), got.reason) == (100, FinishReason.LENGTH)


def test_the_same_tokens_end_the_answer_where_they_are_not_banned(ending):
    session, _ = ending
    assert answer(session, asking(PROMPT, 100)).reason is FinishReason.STOP


# --- memory ---


PENALISED = Sampling(repeat_penalty=1.1, repeat_last_n=2**31 - 1, frequency_penalty=0.1, presence_penalty=0.1)


@pytest.mark.parametrize("ending", ["removed", "reset"])
def test_sequences_give_their_chains_back(weights, ending):
    with opened(weights, n_ctx=4096) as session:

        def come_and_go():
            number = session.add(asking(PROMPT, 4, PENALISED))
            session.step(1)
            session.remove(number) if ending == "removed" else session.reset()

        assert growth(come_and_go, 1000, "RssAnon") < 4 * MIB  # a chain is 32 KiB of looking back


def test_a_closed_session_gives_the_chains_of_its_live_sequences_back(weights):
    def leave_alive():
        with opened(weights, n_ctx=4096, n_batch=32, n_ubatch=32) as session:
            session.add(asking(PROMPT, 4, PENALISED))

    assert growth(leave_alive, 300, "RssAnon") < 4 * MIB


# --- biases ---


def test_a_bias_brings_a_token_in_or_keeps_it_out(answered, greedy):
    banned = greedy[0]
    assert set(answered(GREEDY, logit_bias=((7, 100.0),))) == {7}
    assert banned not in answered(GREEDY, logit_bias=((banned, -float("inf")),))
    assert answered(GREEDY, logit_bias=((banned, 0.0),)) == greedy


def test_a_bias_counts_for_drawn_tokens_too(answered):
    assert first_choices(answered, HOT, logit_bias=((9, 100.0),)) == {9}
    assert 9 not in first_choices(answered, HOT, logit_bias=((9, -100.0),))


# --- other ways to choose ---


@pytest.mark.parametrize(
    "changes",
    [
        {"typical_p": 0.01},
        {"top_n_sigma": 0.01},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0001},
        {"dynatemp_range": 1.9, "dynatemp_exponent": 3.0},
        {"mirostat": Mirostat(1, tau=0.5)},
        {"mirostat": Mirostat(2, tau=0.5)},
        {"dry": Dry(5.0, allowed_length=0, breakers=())},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_each_parameter_has_an_effect_and_repeats_with_its_seed(answered, changes):
    plain = [answered(FREE, seed=seed) for seed in range(6)]
    changed = [answered(FREE, seed=seed, **changes) for seed in range(6)]
    assert changed != plain
    assert changed == [answered(FREE, seed=seed, **changes) for seed in range(6)]


@pytest.mark.parametrize(
    "changes",
    [
        {"typical_p": 1.0},
        {"top_n_sigma": 0.0},
        {"xtc_probability": 0.0},
        {"dynatemp_range": 0.0},
        {"mirostat": Mirostat(0, tau=0.1)},
        {"dry": Dry(0.0, allowed_length=0)},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_parameters_that_are_off_change_nothing(answered, changes):
    assert answered(FREE, seed=3, **changes) == answered(FREE, seed=3)


def test_narrow_truncation_leaves_the_greedy_answer(answered, greedy):
    assert answered(FREE, top_n_sigma=1e-6) == greedy


def test_dry_keeps_a_greedy_answer_from_repeating_itself(weights, answered):
    looping = answered(GREEDY, max_tokens=200, repeat_penalty=0.1, repeat_last_n=64)
    assert len(set(looping[-20:])) < 5, "without it the answer goes in circles"
    dry = answered(GREEDY, max_tokens=200, repeat_penalty=0.1, repeat_last_n=64, dry=Dry(50.0, breakers=()))
    assert len(set(dry[-20:])) > len(set(looping[-20:]))


# --- how likely tokens were ---


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("base", [GREEDY, FREE, dataclasses.replace(GREEDY, logit_bias=((7, 100.0),))])
def test_likelihoods_are_what_the_model_said(weights, top, base):
    with opened(weights) as session:
        session.add(asking(PROMPT, 5, base, logprobs=top, ignore_eos=True))
        events = [event for _ in range(5) for event in session.step(1) if isinstance(event, Token)]
    for event in events:
        likelihood = event.likelihood
        assert likelihood.chosen.token == event.token
        assert len(likelihood.top) == top
        found = [said.logprob for said in likelihood.top]
        assert found == sorted(found, reverse=True)
        assert likelihood.chosen.logprob <= 0
        assert sum(map(math.exp, found)) <= 1 + 1e-9
        if top and base == GREEDY:
            assert likelihood.top[0] == likelihood.chosen


def test_the_likelihoods_of_all_tokens_are_a_distribution(weights):
    with opened(weights) as session:
        session.add(asking(PROMPT, 1, GREEDY, logprobs=weights.vocab_size, ignore_eos=True))
        (token, _) = session.step(1)
    assert sum(math.exp(said.logprob) for said in token.likelihood.top) == pytest.approx(1)
    assert {said.token for said in token.likelihood.top} == set(range(weights.vocab_size))


def test_likelihoods_do_not_change_the_answer(weights, answered, greedy):
    with opened(weights) as session:
        number = session.add(asking(PROMPT, TOKENS, GREEDY, logprobs=5, ignore_eos=True))
        assert finish(session, number)[0].tokens == greedy
