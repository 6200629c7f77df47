"""The decode core: over a scripted context for what it asks of one, over tiny models for what comes out.

"Bits" are digests of the logits behind every greedy choice: equal bits are a stronger claim than equal tokens.
"""

import collections
import hashlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    BOS,
    GREEDY,
    Answer,
    answer,
    asking,
    finish,
    loaded,
    opened,
    tiny_model,
    tiny_recurrent,
    tiny_windowed,
)

from trioserve.engine.base import Failed, Finished, FinishReason, SequenceRequest, SessionOptions, Token
from trioserve.engine.llama import context as context_module
from trioserve.engine.llama.context import Context, Outcome
from trioserve.engine.llama.core import DecodeCore
from trioserve.engine.prefix import cut
from trioserve.engine.rounding import GRAIN
from trioserve.engine.sampling import Sampling

MAX_SEQUENCES = 4
N_CTX = 64
VOCAB, END = 256, 0  # of the scripted model
LONG = 700  # tokens; enough for the order of additions to show in the last bits. No chunk below leaves one over

Cell = collections.namedtuple("Cell", "token position sequence output")


class ScriptedContext:
    """Answers every token with the next number, fails and aborts as told, and keeps what it was asked."""

    def __init__(self, outcomes=(), *, truncates=True):
        self.outcomes = list(outcomes)
        self.truncates = truncates
        self.divisible = True
        self.memory = collections.defaultdict(list)
        self.batches = []
        self.errors = ["the script says so"]
        self.interrupted = False
        self.closed = 0
        self.copied = 0

    def decode(self, batch, threads):
        struct = batch.struct
        self.batches.append(
            [
                Cell(struct.token[i], struct.pos[i], struct.seq_id[i][0], bool(struct.logits[i]))
                for i in range(struct.n_tokens)
            ]
        )
        for cell in self.batches[-1]:
            assert cell.position == len(self.memory[cell.sequence]), f"{cell} is not the next of its sequence"
            self.memory[cell.sequence].append(cell.token)
        return self.outcomes.pop(0) if self.outcomes else Outcome.DONE

    def logits(self, row):
        cell = self.batches[-1][row]
        assert cell.output, f"{cell} was not marked for output"
        return np.eye(1, VOCAB, (cell.token + 1) % VOCAB, dtype=np.float32)[0]

    def likeliest(self, outputs, which, bans):
        rows = [row for row, cell in enumerate(self.batches[-1]) if cell.output]
        assert len(rows) == outputs
        assert bans == [None] * len(which)
        return [int(self.logits(rows[index]).argmax()) for index in which]

    def truncate(self, sequence, tokens):
        whole = tokens >= len(self.memory[sequence])
        kept = tokens if whole or self.truncates else 0
        del self.memory[sequence][kept:]
        return whole or self.truncates

    def copy(self, source, target, tokens):
        self.memory[target] = self.memory[source][:]
        self.copied += 1
        return self.truncate(target, tokens)

    def length(self, sequence):
        return len(self.memory[sequence])

    def lower(self):
        self.interrupted = False

    def reset(self):
        self.memory.clear()
        self.lower()

    def close(self):
        self.closed += 1


class ScriptedVocabulary:
    size = VOCAB
    end_tokens = (END,)

    def piece(self, token):
        return bytes([token])

    def ends_generation(self, token):
        return token == END


def core_over(context, *, n_batch=8, chunk=4, beside=4, n_ctx=N_CTX, grain=1, apart=False, on_device=False, **waste):
    return DecodeCore(
        context,
        ScriptedVocabulary(),
        None,
        n_ctx=n_ctx,
        n_batch=n_batch,
        chunk=chunk,
        beside=beside,
        max_sequences=MAX_SEQUENCES,
        grain=grain,
        apart=apart,
        on_device=on_device,
        **waste,
    )


def counted(start, tokens):
    return [(start + i) % VOCAB for i in range(tokens)]


# --- what the core asks of a context ---


def test_a_prompt_goes_in_by_chunks_and_only_its_last_token_has_output():
    context = ScriptedContext()
    core = core_over(context)
    core.add(asking(counted(10, 10)))
    events = [core.step(1) for _ in range(3)]
    assert context.batches == [
        [Cell(10 + i, i, 0, False) for i in range(4)],
        [Cell(10 + i, i, 0, False) for i in range(4, 8)],
        [Cell(18, 8, 0, False), Cell(19, 9, 0, True)],
    ]
    assert events == [[], [], [Token(0, 20, "\x14")]]


def test_next_tokens_go_before_prompt_chunks():
    context = ScriptedContext()
    core = core_over(context, n_batch=6)
    quick = core.add(asking([40, 41]))
    core.step(1)
    slow = core.add(asking(counted(100, 30)))
    core.step(1)
    assert context.batches[1][0] == Cell(42, 2, quick, True)
    assert [cell.sequence for cell in context.batches[1][1:]] == [slow] * 4


def test_next_tokens_wait_for_a_bounded_piece_of_prompts_and_alone_those_get_more():
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=16, beside=3)
    first = core.add(asking(counted(100, 30), max_tokens=2))
    core.step(1)
    assert [len(batch) for batch in context.batches] == [16]
    core.add(asking([1]))
    for _ in range(3):
        core.step(1)
    # One next token, which comes to its second, and what is left for the prompt.
    assert [len(batch) for batch in context.batches] == [16, 4, 4, 4]
    core.remove(first)


@pytest.mark.parametrize(
    ("prompt", "pieces"), [(8, [8]), (10, [10]), (11, [8, 3]), (18, [8, 10]), (19, [8, 8, 3])], ids=str
)
def test_a_short_rest_of_a_prompt_makes_no_step_of_its_own(prompt, pieces):
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=16, beside=8)
    core.add(asking([1], max_tokens=20))
    core.step(1)
    late = core.add(asking(counted(100, prompt), max_tokens=1))
    for _ in pieces:
        core.step(1)
    assert [[cell.sequence for cell in batch].count(late) for batch in context.batches[1:]] == pieces


@pytest.mark.parametrize(
    ("prompt", "chunk", "pieces"),
    [
        (40, 16, [16, 16, 8]),
        (39, 16, [16, 8, 15]),
        (31, 23, [16, 15]),
        (17, 16, [8, 9]),
        (15, 16, [15]),
        (15, 8, [8, 7]),  # too small a chunk for it
        (9, 8, [7, 2]),
    ],
    ids=str,
)
def test_a_prompt_is_cut_at_multiples_of_the_grain_and_no_piece_is_smaller(prompt, chunk, pieces):
    context = ScriptedContext()
    core = core_over(context, n_batch=64, chunk=chunk, beside=chunk, grain=8)
    core.add(asking(counted(10, prompt), max_tokens=1))
    for _ in pieces:
        core.step(1)
    assert [len(batch) for batch in context.batches] == pieces


@pytest.mark.parametrize("more", [{"chunk": 8}, {"n_batch": 10, "chunk": 16}], ids=str)
def test_a_rest_goes_along_only_where_there_is_room_for_it(more):
    context = ScriptedContext()
    core = core_over(context, **{"n_batch": 40, "beside": 8, **more})
    core.add(asking([1], max_tokens=20))
    core.step(1)
    late = core.add(asking(counted(100, 10), max_tokens=1))
    core.step(1)
    assert [cell.sequence for cell in context.batches[1]].count(late) == 8


def test_next_tokens_and_prompts_take_turns_where_they_are_kept_apart():
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=16, beside=8, apart=True)
    going = core.add(asking([1], max_tokens=20))
    core.step(1)
    late = core.add(asking(counted(100, 24), max_tokens=2))
    for _ in range(7):
        core.step(1)
    steps = [[cell.sequence for cell in batch] for batch in context.batches[1:]]
    assert steps == [[late] * 8, [going], [late] * 8, [going], [late] * 8, [going, late], [going]]


def test_no_last_token_of_a_prompt_is_evaluated_alone_beside_a_shorter_one():
    """llama.cpp evaluates as many of each as the shortest has, and then the rest."""
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=30, beside=30, apart=True)
    lengths = {core.add(asking(counted(10 * i, length), max_tokens=1)): length for i, length in enumerate([5, 6, 7])}
    for _ in range(2):
        core.step(1)
    counts = [collections.Counter(cell.sequence for cell in batch) for batch in context.batches]
    assert [sorted(one.values()) for one in counts] == [[5, 7], [6]]
    assert sum(counts, collections.Counter()) == lengths


def test_the_prompt_that_is_nearest_to_its_end_goes_first():
    context = ScriptedContext()
    core = core_over(context, n_batch=8, chunk=8)
    core.add(asking(counted(100, 30)))
    short = core.add(asking([40, 41]))
    core.step(1)
    assert [cell.sequence for cell in context.batches[0]].count(short) == 2


def test_a_batch_is_in_the_order_of_its_sequences_numbers():
    """As long as each follows the one before it, llama.cpp reads the weights once for all of them."""
    context = ScriptedContext()
    core = core_over(context, n_batch=20)
    numbers = [core.add(asking([10 * (i + 1)], max_tokens=30)) for i in range(MAX_SEQUENCES)]
    core.remove(numbers[0])
    core.step(1)
    core.add(asking(counted(100, 9)))  # the latest comer, with the lowest number
    for _ in range(4):
        core.step(1)
    assert [cell.sequence for cell in context.batches[1]] == [*[numbers[0]] * 4, *numbers[1:]]
    assert [cell.sequence for cell in context.batches[4]] == numbers


def test_next_tokens_as_many_as_a_batch_has_room_for_keep_no_prompt_waiting():
    core = core_over(ScriptedContext(), n_batch=MAX_SEQUENCES)
    for i in range(MAX_SEQUENCES - 1):
        core.add(asking([10 * (i + 1)], max_tokens=50))
    core.step(1)
    late = core.add(asking(counted(100, 9)))
    events = [event for _ in range(6) for event in core.step(1)]
    assert late in [event.sequence for event in events]


def test_a_long_prompt_gets_its_share_beside_any_number_of_short_ones():
    core = core_over(ScriptedContext(), n_batch=4)
    long = core.add(asking(counted(1, 56), max_tokens=1))
    others = [core.add(asking(counted(60, 4), max_tokens=1)) for _ in range(MAX_SEQUENCES - 1)]
    ended, steps = set(), 0
    while long not in ended:
        steps += 1
        ended = {event.sequence for event in core.step(1) if isinstance(event, Finished)}
        for number in ended.intersection(others):
            core.remove(number)
            others[others.index(number)] = core.add(asking(counted(60 + steps, 4), max_tokens=1))
    assert steps <= 56 // 4 * MAX_SEQUENCES


def test_a_sequence_that_is_held_takes_no_part():
    context = ScriptedContext()
    core = core_over(context)
    held, going = core.add(asking([5])), core.add(asking([90]))
    assert {event.sequence for event in core.step(1, [held])} == {going}
    assert {event.sequence for event in core.step(1)} == {held, going}


def test_prompts_that_do_not_fit_together_are_worked_in_the_order_of_arrival():
    core = core_over(ScriptedContext(), n_batch=4)
    numbers = [core.add(asking(counted(50, 9))) for _ in range(3)]
    seen = [event.sequence for _ in range(12) for event in core.step(1)]
    assert list(dict.fromkeys(seen)) == numbers


def test_a_failing_decode_fails_every_sequence_that_had_not_ended():
    context = ScriptedContext([Outcome.DONE, Outcome.FAILED])
    core = core_over(context)
    ended = core.add(asking([1], max_tokens=1))
    decoding = core.add(asking([9]))
    core.step(1)
    halfway = core.add(asking(counted(20, 30)))
    complete = core.add(asking([7]))
    events = core.step(1)
    assert all(isinstance(event, Failed) for event in events)
    assert sorted(event.sequence for event in events) == sorted([decoding, halfway, complete])
    assert ended not in [event.sequence for event in events]


def test_nothing_more_comes_from_sequences_that_failed():
    context = ScriptedContext([Outcome.FAILED])
    core = core_over(context)
    core.add(asking(counted(20, 30)))
    assert len(core.step(1)) == 1
    assert core.step(1) == []
    assert len(context.batches) == 1


def test_a_sequence_after_a_failure_is_answered():
    core = core_over(ScriptedContext([Outcome.FAILED]))
    failed = core.add(asking([5]))
    core.step(1)
    core.remove(failed)
    assert answer(core, asking([5], 3)).tokens == [6, 7, 8]


@pytest.mark.parametrize("outcomes", [[Outcome.INTERRUPTED], [Outcome.DONE, Outcome.INTERRUPTED]])
def test_an_interrupted_decode_reports_nothing(outcomes):
    core = core_over(ScriptedContext(outcomes))
    core.add(asking([5]))
    assert [core.step(1) for _ in outcomes][-1] == []


def test_nothing_is_decoded_while_the_flag_is_up():
    context = ScriptedContext()
    core = core_over(context)
    core.add(asking([5]))
    context.interrupted = True
    assert core.step(1) == []
    assert context.batches == []


def test_a_core_without_sequences_decodes_nothing():
    context = ScriptedContext()
    assert core_over(context).step(1) == []
    assert context.batches == []


def test_remove_ends_that_sequence_alone():
    core = core_over(ScriptedContext())
    first, second = core.add(asking([5])), core.add(asking([6]))
    core.remove(second)
    assert [event.sequence for event in core.step(1)] == [first]


def test_numbers_are_unique_among_the_live_and_used_again_after_remove():
    core = core_over(ScriptedContext())
    numbers = [core.add(asking([5])) for _ in range(MAX_SEQUENCES)]
    assert sorted(numbers) == list(range(MAX_SEQUENCES))
    core.remove(2)
    assert core.add(asking([5])) == 2


def test_one_sequence_too_many_is_refused_until_one_is_removed():
    core = core_over(ScriptedContext())
    for _ in range(MAX_SEQUENCES):
        core.add(asking([5]))
    with pytest.raises(RuntimeError, match="all 4 sequences"):
        core.add(asking([5]))
    core.remove(0)
    core.add(asking([5]))


@pytest.mark.parametrize("length", [0, N_CTX, N_CTX + 1, 10 * N_CTX])
def test_prompts_without_tokens_or_without_room_for_an_answer_are_refused(length):
    core = core_over(ScriptedContext())
    for _ in range(MAX_SEQUENCES + 1):  # a refusal takes no sequence
        with pytest.raises(ValueError, match=f"prompt of {length} tokens"):
            core.add(asking([5] * length))
    assert core.add(asking([5])) in range(MAX_SEQUENCES)


def test_an_end_token_stops_and_is_not_counted():
    core = core_over(ScriptedContext())
    got = answer(core, asking([VOCAB - 4], 30))
    assert got.tokens == [VOCAB - 3, VOCAB - 2, VOCAB - 1]
    assert got.reason is FinishReason.STOP


def test_an_end_token_at_once_is_an_empty_answer():
    got = answer(core_over(ScriptedContext()), asking([VOCAB - 1], 30))
    assert (got.tokens, got.text, got.reason) == ([], "", FinishReason.STOP)


@pytest.mark.parametrize(
    ("start", "max_tokens", "text"),
    [(ord("@"), 3, "ABC"), (VOCAB - 4, 9, "\N{REPLACEMENT CHARACTER}" * 3)],
    ids=["at the last token", "at the end token"],
)
def test_what_was_held_back_for_a_stop_string_comes_with_the_end(start, max_tokens, text):
    request = asking([start], max_tokens, stops=(text[-1] + "...",))
    got = answer(core_over(ScriptedContext()), request)
    assert got.text == text
    assert got.end.text == text[-1]


# --- what is kept of earlier sequences ---


def ended(core, request, steps=100):
    """Work a sequence and let go of it."""
    number = core.add(request)
    events = [event for _ in range(steps) for event in core.step(1)]
    core.remove(number)
    return events[-1] if events else None


def test_what_a_prompt_has_in_common_with_the_one_before_is_not_evaluated_again():
    context = ScriptedContext()
    core = core_over(context)
    prompt = counted(10, 20)
    assert ended(core, asking(prompt, 3)).cached == 0
    context.batches.clear()
    assert ended(core, asking([*prompt[:12], 90, 91, 92], 3)).cached == 12
    assert [cell.position for cell in context.batches[0]] == [12, 13, 14]


def test_an_answer_is_kept_like_its_prompt():
    core = core_over(ScriptedContext())
    ended(core, asking([10, 11], 5))
    assert core.history == [10, 11, 12, 13, 14, 15], "the last token of an answer is never evaluated"
    assert ended(core, asking([10, 11, 12, 13, 14, 15, 16, 90], 1)).cached == 6


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 1), (4, 2), (20, 18)])
def test_two_tokens_are_evaluated_anew_also_of_the_same_prompt(length, cached):
    context = ScriptedContext()
    core = core_over(context)
    prompt = counted(10, length)
    ended(core, asking(prompt, 3))
    context.batches.clear()
    assert ended(core, asking(prompt, 3)).cached == cached
    assert len(context.batches[0]) == min(2, length)


@pytest.mark.parametrize(("common", "cached"), [(60, 48), (50, 48), (48, 48), (47, 40), (7, 0)])
def test_what_is_kept_is_used_up_to_a_multiple_of_the_grain(common, cached):
    core = core_over(ScriptedContext(), n_batch=64, chunk=64, beside=64, grain=8)
    prompt = counted(10, 60)
    ended(core, asking([*prompt[:common], 1, 2], 1))
    assert ended(core, asking(prompt, 1)).cached == cached


def test_a_copy_ends_at_a_multiple_of_the_grain():
    core = core_over(ScriptedContext(), n_batch=64, chunk=64, beside=64, grain=8)
    prompt = counted(10, 45)
    numbers = [core.add(asking([*prompt, last, last], 1)) for last in (1, 2)]
    assert [one.end.cached for one in finish(core, *numbers)] == [0, 32]


def test_a_state_is_used_whole_whatever_the_grain():
    context = ScriptedContext(truncates=False)
    context.divisible = False
    core = core_over(context, n_batch=64, chunk=64, beside=64, grain=8)
    ended(core, asking(counted(10, 20), 1))
    assert ended(core, asking(counted(10, 23), 1)).cached == 20


def test_nothing_is_reused_where_that_is_not_wanted():
    core = core_over(ScriptedContext())
    for _ in range(2):
        assert ended(core, asking(counted(10, 20), 3, reuse=False)).cached == 0


def test_a_model_that_cannot_forget_a_part_starts_over():
    context = ScriptedContext(truncates=False)
    core = core_over(context)
    ended(core, asking(counted(10, 20), 3))
    assert ended(core, asking([*counted(10, 12), 90, 91], 3)).cached == 0
    assert ended(core, asking([*counted(10, 12), 90, 91, 92, 93, 94, 95], 3)).cached == 14 + 2


def test_what_a_step_evaluated_that_was_cut_short_is_not_kept():
    context = ScriptedContext([Outcome.DONE, Outcome.INTERRUPTED])
    core = core_over(context)
    number = core.add(asking(counted(10, 20)))
    core.step(1)
    context.interrupted = True
    core.step(1)
    context.interrupted = False
    core.step(1)
    core.remove(number)
    assert core.history == counted(10, 4)
    assert context.memory[number] == counted(10, 4)
    assert ended(core, asking(counted(10, 20), 3)).cached == 4


def test_nothing_is_kept_of_a_sequence_that_failed():
    context = ScriptedContext([Outcome.DONE, Outcome.FAILED])
    core = core_over(context)
    assert isinstance(ended(core, asking(counted(10, 20))), Failed)
    assert list(core.history) == []
    assert ended(core, asking(counted(10, 20), 3)).cached == 0


def test_the_sequence_that_has_most_of_a_prompt_takes_it():
    core = core_over(ScriptedContext())
    numbers = [core.add(asking(counted(start, length), 1)) for start, length in [(10, 20), (50, 9), (10, 5), (99, 3)]]
    for _ in range(20):
        core.step(1)
    for number in numbers:
        core.remove(number)
    assert core.history == counted(10, 20)
    assert core.add(asking(counted(10, 12))) == numbers[0]


def test_a_prompt_that_has_little_in_common_with_any_takes_an_empty_sequence_or_the_one_that_was_left_first():
    core = core_over(ScriptedContext())
    numbers = [core.add(asking([start], 1)) for start in range(10, 10 + MAX_SEQUENCES - 1)]
    core.step(1)
    for number in reversed(numbers):
        core.remove(number)
    placed = [core.add(asking([200 + i], 1)) for i in range(MAX_SEQUENCES)]
    assert placed == [MAX_SEQUENCES - 1, *reversed(numbers)]


def test_a_prompt_that_has_little_in_common_with_any_goes_where_it_leaves_no_gap():
    core = core_over(ScriptedContext())
    numbers = [core.add(asking([start], 9)) for start in range(10, 10 + MAX_SEQUENCES)]
    core.step(1)
    for number in numbers[:3]:  # the one that was left last lies beside the one that lives
        core.remove(number)
    assert [core.add(asking([200 + i], 9)) for i in range(3)] == [2, 1, 0]


CONVERSATION = [*counted(10, 40), *counted(100, 60)]
STRANGER = [*counted(10, 40), *counted(200, 9)]


def after_a_conversation(context, **sizes):
    core = roomy(context, **sizes)
    ended(core, asking(CONVERSATION, 1))
    context.batches.clear()
    return core


def test_a_stranger_copies_what_it_has_in_common_with_a_conversation_and_leaves_it_alone():
    context = ScriptedContext()
    core = after_a_conversation(context)
    assert ended(core, asking(STRANGER, 1)).cached == 40
    assert sum(map(len, context.batches)) == 9
    assert core.history == CONVERSATION
    assert sorted(map(len, context.memory.values())) == [len(STRANGER), len(CONVERSATION)]
    assert core.is_sound(0)
    assert ended(core, asking([*CONVERSATION, 7, 8, 9], 1)).cached == len(CONVERSATION)


def test_a_stranger_that_would_save_little_evaluates_it_rather_than_cost_a_conversation():
    context = ScriptedContext()
    core = after_a_conversation(context)
    assert ended(core, asking([*CONVERSATION[:31], 7, 8, 9], 1)).cached == 0
    assert context.copied == 0
    assert core.history == CONVERSATION


def test_a_stranger_cuts_a_conversation_down_where_no_other_sequence_is_free():
    context = ScriptedContext()
    core = after_a_conversation(context)
    numbers = [core.add(asking([start], 9)) for start in range(1, MAX_SEQUENCES)]
    numbers.append(core.add(asking(STRANGER, 1)))
    assert finish(core, *numbers)[-1].end.cached == 40
    assert context.copied == 0
    assert list(core.history) == []


def test_the_same_prompt_again_takes_the_place_of_its_own_answer():
    context = ScriptedContext()
    core = roomy(context)
    for cached in (0, 18):
        number = core.add(asking(counted(10, 20), 80))
        assert finish(core, number)[0].end.cached == cached
        core.remove(number)
    assert [len(memory) for memory in context.memory.values() if memory] == [99]


def test_a_conversation_that_begins_like_a_stranger_is_set_aside_while_there_is_an_empty_sequence():
    context = ScriptedContext()
    core = roomy(context)
    conversation = [*counted(10, 60), *counted(100, 40)]
    ended(core, asking(conversation, 1))
    for place in range(1, MAX_SEQUENCES):
        stranger = [*counted(10, 60), *counted(150 + 20 * place, 35)]
        assert ended(core, asking(stranger, 1)).cached == 60
        assert context.copied == place
        assert core.is_sound(0)
    assert ended(core, asking([*counted(10, 60), 7, 8, 9], 1)).cached == 60, "all sequences are taken"
    assert context.copied == MAX_SEQUENCES - 1
    assert ended(core, asking([*conversation, 7, 8, 9], 1)).cached == len(conversation)


def test_a_conversation_next_to_one_that_lives_makes_room_and_is_not_lost():
    context = ScriptedContext()
    core = roomy(context)
    numbers = [core.add(asking(prompt, 90)) for prompt in ([1, 2], CONVERSATION)]
    while len(context.memory[numbers[1]]) < len(CONVERSATION):
        core.step(1)
    core.remove(numbers[1])
    assert core.add(asking([200, 201], 1, reuse=False)) == numbers[1]
    assert core.is_sound(2)
    number = core.add(asking([*CONVERSATION, 7, 8, 9], 1))
    assert number == MAX_SEQUENCES - 1, "where it is least in the way"
    assert core._live[number].cached == len(CONVERSATION)


def test_what_is_set_aside_is_as_old_as_it_was():
    core = roomy(ScriptedContext())
    numbers = [core.add(asking([40 * place, *counted(60 * place, 79)], 1)) for place in range(3)]
    finish(core, *numbers)
    for number in (1, 0, 2):
        core.remove(number)
    oldest, newer, newest = (core._kept[number] for number in (1, 0, 2))
    ended(core, asking([*newer[:41], 250], 1))
    assert [tokens for tokens in core._kept.values() if len(tokens) > 42] == [oldest, newer, newest]


def test_an_end_that_is_evaluated_as_soon_as_copied_is_not_set_aside():
    context = ScriptedContext()
    core = roomy(context)
    ended(core, asking(counted(10, 91), 1))
    assert ended(core, asking([*counted(10, 60), 7, 8, 9], 1)).cached == 60
    assert context.copied == 0


def test_a_conversation_that_a_model_cannot_copy_is_lost_and_its_sequence_is_not(monkeypatch):
    context = ScriptedContext()
    core = roomy(context)
    ended(core, asking([*counted(10, 60), *counted(100, 40)], 1))
    monkeypatch.setattr(context, "copy", lambda source, target, tokens: context.truncate(target, 0) and False)
    assert ended(core, asking([*counted(10, 60), 7, 8, 9], 1)).cached == 60
    assert core.is_sound(0)


def test_the_next_turn_without_the_thoughts_of_the_last_takes_the_place_of_its_answer():
    context = ScriptedContext()
    core = roomy(context)
    ended(core, asking(counted(10, 40), 99))
    assert ended(core, asking([*counted(10, 40), 7, 8, 9], 1)).cached == 40
    assert context.copied == 0
    assert [len(memory) for memory in context.memory.values() if memory] == [43]


def test_what_is_kept_of_a_prompt_that_was_given_up_is_not_taken_for_an_answer():
    core = roomy(ScriptedContext())
    number = core.add(asking(counted(10, 90), 9))
    core.step(1)
    core.remove(number)
    assert (len(core.history), core.history.asked) == (20, 20)


def test_a_prompt_takes_the_place_of_what_it_goes_on_from_also_where_another_has_more_of_it():
    context = ScriptedContext()
    core = roomy(context)
    branch = [*counted(10, 90), *counted(150, 95)]
    prompts = [branch, counted(10, 40), counted(200, 30), counted(100, 30)]
    numbers = [core.add(asking(prompt, 1, share=False)) for prompt in prompts]
    finish(core, *numbers)
    for number in reversed(numbers):
        core.remove(number)
    number = core.add(asking([*counted(10, 90), 7, 8, 9], 1))
    assert (number, core._live[number].cached, context.copied) == (numbers[1], 90, 1)
    assert [core._kept[number] for number in (3, 2, 0)] == [prompts[3], prompts[2], branch], "nobody lost anything"


def test_a_stranger_of_a_model_that_cannot_be_copied_in_part_evaluates_all_and_costs_nobody_anything():
    context = ScriptedContext(truncates=False)
    core = after_a_conversation(context)
    for _ in range(2):
        assert ended(core, asking(STRANGER, 1)).cached == 0
        assert core.history == CONVERSATION
        assert core.is_sound(0)
    assert context.copied == 1, "it is tried once"
    numbers = [core.add(asking(ALIKE, 3, reuse=False)) for _ in range(2)]
    assert [answer.end.cached for answer in finish(core, *numbers)] == [0, 0]
    assert context.copied == 2, "those that live are another matter: a state can be had at its end"


def test_who_wants_nothing_that_is_kept_copies_nothing():
    context = ScriptedContext()
    core = after_a_conversation(context)
    assert ended(core, asking(STRANGER, 1, reuse=False)).cached == 0
    assert context.copied == 0
    assert core.history == CONVERSATION


def test_a_stranger_goes_on_from_one_that_lives_where_that_has_more_than_was_kept():
    context = ScriptedContext()
    core = after_a_conversation(context)
    leader = core.add(asking([*STRANGER[:45], *counted(150, 60)], 1))
    other = core.add(asking([*STRANGER[:45], *counted(150, 40)], 1))
    assert [answer.end.cached for answer in finish(core, leader, other)] == [40, 83]
    assert core.history == CONVERSATION


def test_reset_keeps_and_clear_forgets():
    core = core_over(ScriptedContext())
    for forget, kept in ((core.end_all, 8), (core.clear, 0)):
        core.add(asking(counted(10, 8)))
        core.step(1)
        core.step(1)
        forget()
        assert len(core.history) == kept


def test_clear_frees_every_number():
    core = core_over(ScriptedContext())
    for _ in range(3):
        for _ in range(MAX_SEQUENCES):
            core.add(asking([5]))
        core.clear()


def test_close_is_idempotent_with_sequences_alive():
    context = ScriptedContext()
    core = core_over(context)
    core.add(asking([5]))
    core.close()
    core.close()
    assert context.closed


# --- steps that set the next one going ---


def test_the_next_step_is_under_way_before_the_tokens_of_one_are_told():
    context = ScriptedContext()
    core = core_over(context, on_device=True)
    number = core.add(asking([10, 11], 3))
    assert core.step(1) == [Token(number, 12, "\x0c")]
    assert context.batches[-1] == [Cell(12, 2, number, True)]
    assert core.step(1) == [Token(number, 13, "\r")]
    *_, last = core.step(1)
    assert isinstance(last, Finished)
    assert len(context.batches) == 3, "nothing is evaluated for an answer that has ended"
    core.remove(number)
    assert core.step(1) == []


@pytest.mark.parametrize(("tokens", "hands"), [(1, 1), (32, 1), (64, 2), (600, 5)])
def test_a_device_is_helped_by_no_more_threads_than_it_gives_work(tokens, hands):
    seen = []
    context = ScriptedContext()
    decode = context.decode
    context.decode = lambda batch, threads: seen.append(threads) or decode(batch, threads)
    core = core_over(context, n_batch=600, chunk=600, n_ctx=700, on_device=True)
    core.add(asking(counted(1, tokens), 1))
    core.step(5)
    assert seen == [hands]


def test_what_was_under_way_for_a_sequence_that_left_is_nobody_s():
    context = ScriptedContext()
    core = core_over(context, on_device=True)
    leaving, *staying = [core.add(asking([10])) for _ in range(MAX_SEQUENCES)]
    core.step(1)
    core.remove(leaving)
    newcomer = core.add(asking([90, 91, 92]))
    assert newcomer == leaving, "the number is used again"
    assert [(event.sequence, event.token) for event in core.step(1)] == [(number, 12) for number in staying]
    assert [(event.sequence, event.token) for event in core.step(1)] == [(newcomer, 93), *((n, 13) for n in staying)]


def test_a_step_that_was_taken_back_is_taken_again():
    context = ScriptedContext()
    core = core_over(context, on_device=True)
    number = core.add(asking([10, 11]))
    core.step(1)
    context.interrupted = True
    assert core.step(1) == []
    core.resume()
    assert context.memory[number] == [10, 11]
    assert core.step(1) == [Token(number, 13, "\r")]


def test_a_failure_ahead_comes_after_the_token_that_was_there_before():
    core = core_over(ScriptedContext([Outcome.DONE, Outcome.FAILED]), on_device=True)
    number = core.add(asking([10, 11]))
    token, failed = core.step(1)
    assert (token.token, failed) == (12, Failed(number, "the script says so"))
    assert core.step(1) == []


def test_rows_stand_in_the_order_of_their_sequences():
    context = ScriptedContext()
    core = core_over(context)
    numbers = [core.add(asking([10 * place])) for place in range(MAX_SEQUENCES)]
    core.step(1)
    core.remove(numbers[1])
    core.add(asking([90, 91, 92]))  # begun last, under the second number
    core.step(1)
    assert [cell.sequence for cell in context.batches[-1]] == [0, 1, 1, 1, 2, 3]


def test_a_prompt_takes_a_number_next_to_those_that_are_live():
    core = core_over(ScriptedContext())
    first, second, _, last = [core.add(asking([10 * place])) for place in range(MAX_SEQUENCES)]
    core.step(1)
    for number in (first, second, last):
        core.remove(number)
    assert core.add(asking([90, 91])) == second
    assert core.add(asking([80, 81])) == first, "of two that are as near, the one that was left first"


def test_a_gap_is_bridged_by_rows_that_leave_nothing_behind():
    context = ScriptedContext()
    core = core_over(context, n_batch=20, chunk=20, beside=20, bridge=2)
    numbers = [core.add(asking(counted(10 * place, 4))) for place in range(MAX_SEQUENCES)]
    core.step(1)
    for number in numbers[1:3]:
        core.remove(number)
    events = core.step(1)
    assert [(cell.sequence, cell.output) for cell in context.batches[-1]] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert [(event.sequence, event.token) for event in events] == [(0, 5), (3, 35)]
    assert [context.memory[number] for number in numbers[1:3]] == [counted(10, 4), counted(20, 4)]


def test_a_gap_that_is_too_wide_is_left_open():
    context = ScriptedContext()
    core = core_over(context, n_batch=20, chunk=20, beside=20, bridge=1)
    numbers = [core.add(asking(counted(10 * place, 4))) for place in range(MAX_SEQUENCES)]
    core.step(1)
    for number in numbers[1:3]:
        core.remove(number)
    core.step(1)
    assert [cell.sequence for cell in context.batches[-1]] == [0, 3]


def test_a_sequence_that_is_full_is_no_bridge():
    context = ScriptedContext()
    core = core_over(context, n_batch=20, chunk=20, beside=20, n_ctx=4, bridge=2)
    numbers = [core.add(asking([10 * place], 4)) for place in range(3)]
    core.step(1)
    while len(context.memory[1]) < 4:
        core._live[1].known.append(1)
        context.memory[1].append(1)
    core.remove(1)
    core.step(1)
    assert [cell.sequence for cell in context.batches[-1]] == [numbers[0], numbers[2]]


def test_a_model_that_cannot_forget_a_part_is_a_bridge_but_once():
    context = ScriptedContext(truncates=False)
    core = core_over(context, n_batch=20, chunk=20, beside=20, bridge=2)
    numbers = [core.add(asking(counted(10 * place, 4))) for place in range(3)]
    core.step(1)
    core.remove(numbers[1])
    core.step(1)
    assert core.history == []
    core.step(1)
    assert [len(batch) for batch in context.batches] == [12, 3, 2]


@pytest.mark.parametrize(("most_extra", "told"), [(0, [9, 7, 4]), (2, [9, 9, 4]), (4, [9, 9, 4]), (5, [9, 9, 9])])
def test_prompts_of_one_step_are_made_equally_long_by_tokens_that_leave_nothing_behind(most_extra, told):
    """llama.cpp evaluates each length for itself."""
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=40, most_extra=most_extra)
    for place, length in enumerate([9, 7, 4]):
        core.add(asking(counted(50 * place, length)))
    events = core.step(1)
    assert [len(evaluated(context, number)) for number in range(3)] == told
    assert [(event.sequence, event.token) for event in events] == [(0, 9), (1, 57), (2, 104)]
    outputs = [(cell.sequence, cell.position) for cell in context.batches[0] if cell.output]
    assert outputs == [(0, 8), (1, 6), (2, 3)], "of each prompt's last token"
    assert [len(context.memory[number]) for number in range(3)] == [9, 7, 4]
    assert [event.token for event in core.step(1)] == [10, 58, 105]
    assert core.is_sound(3)


@pytest.mark.parametrize("limit", ["chunk", "n_batch"])
@pytest.mark.parametrize(("tokens", "told"), [(15, [8, 6]), (16, [8, 8])])
def test_prompts_are_made_no_longer_than_a_step_has_room_for(limit, tokens, told):
    context = ScriptedContext()
    core = core_over(context, **{"n_batch": 40, "chunk": 40, "most_extra": 4, limit: tokens})
    for place, length in enumerate([8, 6]):
        core.add(asking(counted(50 * place, length)))
    core.step(1)
    assert [len(evaluated(context, number)) for number in range(2)] == told


@pytest.mark.parametrize(("n_ctx", "told"), [(57, 6), (58, 8)])
def test_prompts_are_made_no_longer_than_their_sequences_have_room_for(n_ctx, told):
    context = ScriptedContext()
    core = core_over(context, n_batch=80, chunk=80, n_ctx=n_ctx, most_extra=4)
    kept = core.add(asking(counted(1, 50), 1))
    core.step(1)
    core.remove(kept)
    assert core.add(asking(counted(1, 56), 1)) == kept
    core.add(asking(counted(100, 8)))
    core.step(1)
    assert [cell.sequence for cell in context.batches[1]].count(kept) == told


def test_prompts_that_are_made_equally_long_need_not_wait_for_each_other():
    """As they do where of the longer one a token alone would be left."""
    context = ScriptedContext()
    core = core_over(context, n_batch=40, chunk=30, beside=30, apart=True, most_extra=4)
    for place, length in enumerate([5, 6, 7]):
        core.add(asking(counted(10 * place, length), max_tokens=1))
    core.step(1)
    assert [len(evaluated(context, number)) for number in range(3)] == [7, 7, 7]


def test_a_model_that_cannot_forget_a_part_has_no_prompt_made_longer():
    context = ScriptedContext(truncates=False)
    context.divisible = False
    core = core_over(context, n_batch=40, chunk=40, most_extra=9)
    for place, length in enumerate([9, 7]):
        core.add(asking(counted(50 * place, length)))
    core.step(1)
    assert [len(evaluated(context, number)) for number in range(2)] == [9, 7]


@pytest.mark.parametrize("outcome", [Outcome.INTERRUPTED, Outcome.FAILED])
def test_a_step_with_prompts_that_were_made_longer_can_be_cut_short_and_can_fail(outcome):
    context = ScriptedContext([outcome])
    core = core_over(context, n_batch=40, chunk=40, most_extra=9)
    numbers = [core.add(asking(counted(50 * place, length), 2)) for place, length in enumerate([9, 7])]
    events = core.step(1)
    core.resume()
    if outcome is Outcome.INTERRUPTED:
        assert [answer.tokens for answer in finish(core, *numbers)] == [[9, 10], [57, 58]]
    else:
        assert [type(event) for event in events] == [Failed] * 2
        for number in numbers:
            core.remove(number)
        assert core.is_sound(0)


def test_only_the_first_prompt_of_a_step_is_cut_up():
    context = ScriptedContext()
    core = core_over(context, n_batch=20, chunk=10)
    for place in range(3):
        core.add(asking(counted(50 * place, 6)))
    core.step(1)
    assert [cell.sequence for cell in context.batches[0]] == [0] * 6


# --- sequences that begin alike ---

ALIKE = counted(1, 50)


def evaluated(context, number):
    return [cell.token for batch in context.batches for cell in batch if cell.sequence == number]


def roomy(context, **sizes):
    return core_over(context, **{"n_batch": 100, "chunk": 20, "beside": 20, "n_ctx": 200, **sizes})


def test_one_of_the_prompts_that_are_alike_is_evaluated_and_copied():
    context = ScriptedContext()
    core = roomy(context)
    numbers = [core.add(asking(ALIKE, 3, reuse=False)) for _ in range(4)]
    answers = finish(core, *numbers)
    assert [answer.tokens for answer in answers] == [counted(51, 3)] * 4
    assert [answer.end.cached for answer in answers] == [0, 48, 48, 48]
    assert evaluated(context, numbers[0]) == [*ALIKE, 51, 52]
    for number in numbers[1:]:
        assert evaluated(context, number) == [*ALIKE[-2:], 51, 52]
    assert context.copied == 3


def test_what_prompts_begin_with_is_copied_as_soon_as_it_is_there():
    context = ScriptedContext()
    core = roomy(context)
    long, short = core.add(asking(counted(1, 100), 3)), core.add(asking([*counted(1, 40), *counted(150, 10)], 3))
    answers = finish(core, long, short)
    assert [answer.tokens for answer in answers] == [counted(101, 3), counted(160, 3)]
    assert evaluated(context, short)[:10] == counted(150, 10)
    first = next(index for index, batch in enumerate(context.batches) if any(cell.sequence == short for cell in batch))
    assert first == 2, "after two pieces of 20"


def test_a_sequence_that_is_at_its_answer_is_copied_at_once():
    context = ScriptedContext()
    core = roomy(context)
    early = core.add(asking(ALIKE, 30))
    while len(context.batches) < 10:
        core.step(1)
    late = core.add(asking(ALIKE, 3))
    core.step(1)
    assert evaluated(context, late) == ALIKE[-2:]
    assert context.memory[late] == ALIKE
    assert context.memory[early][:50] == ALIKE


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [(counted(1, 33), {}), ([9, *ALIKE[1:]], {}), (ALIKE, {"share": False})],
    ids=["short", "other", "not to be shared"],
)
def test_prompts_that_have_little_in_common_or_share_nothing_are_evaluated_side_by_side(prompt, fields):
    context = ScriptedContext()
    core = roomy(context, chunk=100)
    core.add(asking(ALIKE, 3))
    core.add(asking(prompt, 3, **fields))
    core.step(1)
    assert len(context.batches[0]) == len(ALIKE) + len(prompt)


def test_a_copy_of_a_large_cache_has_to_save_more():
    context = ScriptedContext()
    core = roomy(context, n_ctx=64 * 60, chunk=200)
    for _ in range(2):
        core.add(asking(ALIKE, 3))
    core.step(1)
    assert len(context.batches[0]) == 2 * len(ALIKE)


def test_those_who_wait_go_on_when_their_leader_ends_with_its_prompt():
    context = ScriptedContext()
    core = roomy(context)
    numbers = [core.add(asking(ALIKE, 1)) for _ in range(3)]
    ended = []
    while len(ended) < 3:
        for event in core.step(1):
            if isinstance(event, Finished):
                ended.append(event.sequence)
                core.remove(event.sequence)
    assert [len(evaluated(context, number)) for number in numbers] == [50, 2, 2]


def test_the_first_of_those_who_wait_takes_the_lead_of_one_that_is_given_up():
    context = ScriptedContext()
    core = roomy(context)
    given_up, *numbers = [core.add(asking(ALIKE, 2)) for _ in range(4)]
    core.step(1)
    core.remove(given_up)
    answers = finish(core, *numbers)
    assert [answer.tokens for answer in answers] == [counted(51, 2)] * 3
    assert [answer.end.cached for answer in answers] == [0, 48, 48]
    assert context.copied == 2


def test_nobody_waits_for_a_prompt_that_is_held():
    context = ScriptedContext()
    core = roomy(context)
    leader, other = (core.add(asking(ALIKE, 2)) for _ in range(2))
    core.step(1)
    tokens = [event.token for _ in range(4) for event in core.step(1, [leader]) if isinstance(event, Token)]
    assert tokens == counted(51, 2)
    assert evaluated(context, other) == [*ALIKE, 51]


def test_what_a_prompt_that_is_given_up_or_held_has_come_to_is_not_lost_to_those_who_wait():
    for held in (False, True):
        context = ScriptedContext()
        core = roomy(context)
        leader, *numbers = [core.add(asking(ALIKE, 2)) for _ in range(4)]
        core.step(1)
        core.step(1)
        if not held:
            core.remove(leader)
        events = [event for _ in range(5) for event in core.step(1, [leader] if held else [])]
        assert [event.cached for event in events if isinstance(event, Finished)] == [40, 48, 48]
        assert [len(evaluated(context, number)) for number in numbers] == [10 + 1, 2 + 1, 2 + 1]


def test_those_who_wait_for_one_that_is_given_up_find_the_others_who_are_most_like_them():
    context = ScriptedContext()
    core = roomy(context, chunk=8)
    given_up = core.add(asking(counted(1, 100), 2))
    core.step(1)
    prompts = [[*counted(1, 40), 99], counted(1, 90), counted(1, 95)]
    numbers = [core.add(asking(prompt, 2)) for prompt in prompts]
    core.remove(given_up)
    answers = finish(core, *numbers)
    assert [answer.end.cached for answer in answers] == [0, 40, 90]


def test_nobody_gives_up_what_was_kept_for_less_when_a_leader_goes():
    context = ScriptedContext()
    core = roomy(context)
    kept = core.add(asking(counted(1, 60), 1))
    finish(core, kept)
    core.remove(kept)
    leader = core.add(asking(counted(1, 110), 2, reuse=False))
    core.remove(core.add(asking([5, 6], 1)))
    assert core.history == counted(1, 60)
    numbers = [
        core.add(asking([*counted(1, 45), *counted(200, 9)], 2, reuse=False)),
        core.add(asking(counted(1, 120), 2)),
    ]
    core.remove(leader)
    assert [answer.end.cached for answer in finish(core, *numbers)] == [0, 60]


def test_a_short_prompt_that_waits_for_a_long_one_takes_it_along_past_others():
    context = ScriptedContext()
    core = roomy(context, n_ctx=400, chunk=20)
    oldest = core.add(asking(counted(200, 150), 1))
    long = core.add(asking(counted(1, 130), 1))
    core.add(asking(counted(150, 100), 1))
    short = core.add(asking([*counted(1, 40), *counted(90, 5)], 1))
    steps = 0
    while not evaluated(context, short):
        core.step(1)
        steps += 1
    assert steps == 3
    assert not evaluated(context, oldest)
    assert len(evaluated(context, long)) == 40


def test_nobody_waits_for_one_that_has_failed():
    context = ScriptedContext([Outcome.FAILED])
    core = roomy(context)
    failed = [core.add(asking(ALIKE, 2)) for _ in range(2)]
    assert {event.sequence for event in core.step(1)} == set(failed)
    late = core.add(asking(ALIKE, 2))
    tokens = [event.token for _ in range(5) for event in core.step(1) if isinstance(event, Token)]
    assert tokens == counted(51, 2)
    core.remove(late)


def test_nobody_waits_for_one_that_has_ended_and_lost_its_memory():
    context = ScriptedContext()
    core = roomy(context, chunk=100)
    ended = core.add(asking(ALIKE, 1))
    core.step(1)
    core.add(asking(ALIKE, 2))
    context.truncates = False
    context.memory[ended].append(7)
    core.resume()
    context.truncates = True
    tokens = [event.token for _ in range(4) for event in core.step(1) if isinstance(event, Token)]
    assert tokens == counted(51, 2)


def test_the_number_of_a_sequence_whose_memory_could_not_be_copied_is_not_lost(monkeypatch):
    context = ScriptedContext()
    core = roomy(context)
    leader, other = (core.add(asking(ALIKE, 1)) for _ in range(2))
    finish(core, leader)

    def fail(*_):
        raise RuntimeError("no copy")

    monkeypatch.setattr(context, "copy", fail)
    with pytest.raises(RuntimeError, match="no copy"):
        core.remove(leader)
    core.remove(other)
    assert len([core.add(asking([5])) for _ in range(MAX_SEQUENCES)]) == MAX_SEQUENCES


def test_a_model_that_cannot_forget_a_part_evaluates_each_prompt():
    context = ScriptedContext(truncates=False)
    core = roomy(context)
    numbers = [core.add(asking(ALIKE, 2)) for _ in range(3)]
    answers = finish(core, *numbers)
    assert [answer.tokens for answer in answers] == [counted(51, 2)] * 3
    assert [answer.end.cached for answer in answers] == [0, 0, 0]
    for number in numbers:
        core.remove(number)
    context.batches.clear()
    for _ in range(2):
        core.add(asking(ALIKE, 2))
    core.step(1)
    assert len({cell.sequence for cell in context.batches[0]}) == 1, "the first piece of the first"
    assert [live.leader for live in core._live.values()] == [None, None], "and nobody waits for it any more"


def test_an_interrupt_before_the_copy_leaves_all_of_them_to_go_on():
    context = ScriptedContext([Outcome.DONE, Outcome.INTERRUPTED])
    core = roomy(context)
    numbers = [core.add(asking(ALIKE, 2)) for _ in range(3)]
    core.step(1)
    core.step(1)
    core.resume()
    assert [answer.tokens for answer in finish(core, *numbers)] == [counted(51, 2)] * 3


Plan = collections.namedtuple("Plan", "joins_at start length max_tokens leaves_at")
plans = st.builds(
    Plan,
    joins_at=st.integers(0, 12),
    start=st.integers(1, 90),
    length=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    leaves_at=st.none() | st.integers(0, 30),
)


class Crowd:
    """Works plans on a scripted core: each joins when its time has come and a number is free.

    Arguments:
        holds: whether to hold the next of the live sequences in the next step; false when there are no more.
    """

    def __init__(self, plans, n_batch, chunk, holds=(), **more):
        self.context = ScriptedContext()
        self.holds = iter(holds)
        self.core = core_over(self.context, n_batch=n_batch, chunk=chunk, **more)
        self.waiting = sorted(plans, key=lambda plan: plan.joins_at)
        self.live = {}
        self.ended = []  # (plan, answer, what was evaluated of it)

    def work(self):
        for now in itertools.count():
            if not self.waiting and not self.live:
                return
            assert now < 1000, f"{list(self.live)} wait for ever"
            self._leave(lambda plan, got, now=now: plan.leaves_at is not None and now > plan.leaves_at)
            self._join(now)
            steps = len(self.context.batches)
            for event in self.core.step(1, [number for number in self.live if next(self.holds, False)]):
                self.live[event.sequence][1].take(event)
            for cell in itertools.chain.from_iterable(self.context.batches[steps:]):
                if cell.sequence in self.live:
                    self.live[cell.sequence][2].append(cell)
            for number, (plan, _, _) in self.live.items():
                memory = self.context.memory[number]
                assert memory == counted(plan.start, len(memory))
            self._leave(lambda plan, got: got.end is not None)

    def check(self, plans):
        assert len(self.ended) == len(plans)
        for plan, got, _ in self.ended:
            room = min(plan.max_tokens, N_CTX - plan.length)
            assert got.tokens == counted(plan.start + plan.length, room)[: len(got.tokens)]
            assert got.end is None or len(got.tokens) == room

    def _join(self, now):
        while self.waiting and self.waiting[0].joins_at <= now and len(self.live) < MAX_SEQUENCES:
            plan = self.waiting.pop(0)
            number = self.core.add(asking(counted(plan.start, plan.length), plan.max_tokens))
            assert number not in self.live
            self.live[number] = (plan, Answer(), [])

    def _leave(self, condition):
        for number, entry in list(self.live.items()):
            if condition(*entry[:2]):
                self.core.remove(number)
                self.ended.append(self.live.pop(number))


@given(st.lists(plans, min_size=1, max_size=8), st.integers(MAX_SEQUENCES, 20), st.integers(1, 20))
@settings(deadline=None)
def test_sequences_that_come_and_go_never_disturb_each_other(plans, n_batch, chunk):
    crowd = Crowd(plans, n_batch, min(chunk, n_batch))
    crowd.work()
    assert len(crowd.ended) == len(plans)
    for plan, got, cells in crowd.ended:
        room = min(plan.max_tokens, N_CTX - plan.length)
        whole = counted(plan.start, plan.length + room)
        assert got.tokens == whole[plan.length :][: len(got.tokens)]
        cached = cells[0].position if cells else 0
        assert cached <= max(plan.length - 2, 0)
        assert [cell.token for cell in cells] == whole[cached:][: len(cells)]
        assert [cell.position for cell in cells] == list(range(cached, cached + len(cells)))
        assert [cell.output for cell in cells] == [cell.position >= plan.length - 1 for cell in cells]
        if got.end is not None:
            assert got.reason is FinishReason.LENGTH
            assert len(got.tokens) == room
    for batch in crowd.context.batches:
        assert 0 < len(batch) <= max(n_batch, 2 * MAX_SEQUENCES)
        assert [cell.sequence for cell in batch] == sorted(cell.sequence for cell in batch)
        assert all(len(list(cells)) <= chunk for _, cells in itertools.groupby(batch, key=lambda cell: cell.sequence))


extras = st.integers(0, 9)


@given(
    st.lists(plans, min_size=1, max_size=8), st.integers(MAX_SEQUENCES, 20), st.integers(2, 20), st.booleans(), extras
)
@settings(deadline=None)
def test_next_tokens_and_prompts_that_are_kept_apart_are_answered_the_same(plans, n_batch, chunk, coarse, extra):
    crowd = Crowd(plans, n_batch, min(chunk, n_batch), apart=True, grain=8 if coarse else 1, most_extra=extra)
    crowd.work()
    crowd.check(plans)
    for batch in crowd.context.batches:
        counts = collections.Counter(cell.sequence for cell in batch).values()
        assert len({count == 1 for count in counts}) == 1
        least = 8 if coarse else 2
        assert not any(0 < abs(one - other) < least for one, other in itertools.combinations(counts, 2))


@given(st.lists(plans, min_size=1, max_size=8), st.integers(MAX_SEQUENCES, 20), st.integers(1, 20), extras)
@settings(deadline=None)
def test_steps_that_set_the_next_one_going_answer_the_same(plans, n_batch, chunk, extra):
    crowd = Crowd(plans, n_batch, min(chunk, n_batch), on_device=True, bridge=2, most_extra=extra)
    crowd.work()
    crowd.check(plans)
    assert all(len(batch) <= max(n_batch, 2 * MAX_SEQUENCES) for batch in crowd.context.batches)


alike = st.builds(
    Plan,
    joins_at=st.integers(0, 12),
    start=st.sampled_from([1, 1, 1, 2]),
    length=st.integers(34, 120),
    max_tokens=st.integers(1, 5),
    leaves_at=st.none() | st.integers(0, 30),
)


@given(st.lists(alike, min_size=2, max_size=8), st.integers(4, 40), st.lists(st.booleans(), max_size=30), st.booleans())
@settings(deadline=None)
def test_sequences_that_begin_alike_are_answered_whoever_comes_goes_or_is_held(plans, chunk, holds, on_device):
    crowd = Crowd(plans, chunk, chunk, holds, n_ctx=128, beside=chunk, on_device=on_device, bridge=2, most_extra=4)
    crowd.work()
    assert len(crowd.ended) == len(plans)
    for plan, got, _ in crowd.ended:
        assert got.tokens == counted(plan.start + plan.length, plan.max_tokens)[: len(got.tokens)]
        assert got.end is None or len(got.tokens) == plan.max_tokens
        assert got.end is None or got.end.cached <= plan.length - 2
    assert len(crowd.context.batches) < 400


# --- what comes out of real contexts ---


@pytest.mark.parametrize("sequences", [1, 3, 16, 17])
def test_the_numbers_of_rows_of_logits_fill_cache_lines(sequences):
    parameters = context_module._parameters(SessionOptions(max_sequences=sequences), offloaded=False)
    assert parameters.n_outputs_max >= sequences
    assert 4 * parameters.n_outputs_max % 64 == 0


@pytest.fixture(scope="module")
def weights():
    with loaded(tiny_model()) as tiny:
        yield tiny


@pytest.fixture(scope="module", params=["f32", "q8_0"])
def shaped(request):
    shape = {} if request.param == "f32" else {"dim": 128, "ff": 256, "layers": 3, "quantised": True}
    with loaded(tiny_model(**shape)) as tiny:
        yield tiny


@pytest.fixture
def bits_of(monkeypatch):
    """Answer a request on an empty session and return the digests of the logits behind each choice."""
    seen = collections.defaultdict(list)

    class Watched(Context):
        def logits(self, row):
            logits = super().logits(row)
            seen[threading.get_ident()].append(hashlib.sha256(logits.tobytes()).hexdigest())
            return logits

    monkeypatch.setattr("trioserve.engine.llama.session.Context", Watched)

    def bits(session, request, threads=1):
        mine = seen[threading.get_ident()]
        mine.clear()
        answer(session, request, threads)
        return list(mine)

    return bits


def prompt_of(weights, length, seed=0):
    rng = np.random.default_rng(seed)
    return [BOS, *rng.integers(3, weights.vocab_size, length - 1).tolist()]


@pytest.fixture
def long_request(shaped):
    return asking(prompt_of(shaped, LONG), 12, ignore_eos=True)


@pytest.fixture
def alone(shaped, bits_of, long_request):
    """The bits of the long request on a fresh session, with one thread."""
    with opened(shaped, n_ctx=1024) as session:
        bits = bits_of(session, long_request)
    assert len(bits) == 12
    return bits


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(shaped, bits_of, long_request, alone, threads):
    with opened(shaped, n_ctx=1024) as session:
        assert bits_of(session, long_request, threads) == alone


def test_each_step_uses_the_threads_it_is_told(weights, monkeypatch):
    used = []

    class Watched(Context):
        def decode(self, batch, threads):
            outcome = super().decode(batch, threads)
            used.append((llama_cpp.llama_n_threads(self.pointer), llama_cpp.llama_n_threads_batch(self.pointer)))
            return outcome

    monkeypatch.setattr("trioserve.engine.llama.session.Context", Watched)
    with opened(weights) as session:
        session.add(asking([BOS, 300], 10, ignore_eos=True))
        for threads in (2, 1, 1, 3):
            session.step(threads)
    assert used == [(2, 2), (1, 1), (1, 1), (3, 3)]


@pytest.mark.parametrize(("sizes", "steps"), [({"n_ubatch": 16}, 7), ({"n_batch": 40}, 3), ({}, 1)])
def test_a_step_evaluates_no_more_of_a_prompt_than_a_micro_batch(weights, sizes, steps):
    with opened(weights, **sizes) as session:
        session.add(asking(prompt_of(weights, 100), ignore_eos=True))
        assert [len(session.step(1)) for _ in range(steps)] == [0] * (steps - 1) + [1]


def test_bits_do_not_depend_on_thread_counts_that_change_between_steps(shaped, bits_of, long_request, alone):
    class Restless:
        """Steps with other threads each time than it is told."""

        def __init__(self, session):
            self.add, self.remove = session.add, session.remove
            self._step, self._threads = session.step, itertools.cycle([2, 1, 3, 1])

        def step(self, threads):
            return self._step(next(self._threads))

    with opened(shaped, n_ctx=1024, n_ubatch=128) as session:
        assert bits_of(Restless(session), long_request) == alone


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize("n_batch", ["as the chunk", 2048])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(shaped, bits_of, long_request, alone, chunk, n_batch):
    sizes = {"n_ubatch": chunk, "n_batch": chunk if isinstance(n_batch, str) else n_batch}
    with opened(shaped, n_ctx=1024, **sizes) as session:
        assert bits_of(session, long_request) == alone


def test_bits_do_not_depend_on_what_the_session_answered_before(shaped, bits_of, long_request, alone):
    with opened(shaped, n_ctx=1024) as session:
        answer(session, asking(prompt_of(shaped, 333, seed=1), 20))
        answer(session, asking(prompt_of(shaped, 2, seed=2), 1))
        assert bits_of(session, long_request) == alone


@pytest.mark.parametrize("common", [1, 5, 128, 129, 300, LONG - 3, LONG - 2, LONG - 1, LONG])
def test_bits_do_not_depend_on_what_was_kept_of_an_earlier_prompt(shaped, bits_of, long_request, alone, common):
    prompt = long_request.prompt
    with opened(shaped, n_ctx=1024) as session:
        answer(session, asking([*prompt[:common], *prompt_of(shaped, 50, seed=3)[1:]], 3, ignore_eos=True))
        number = session.add(long_request)
        assert finish(session, number)[0].end.cached == cut(common, LONG, shaped._grain)
        session.remove(number)
        session.clear()
        answer(session, asking([*prompt[:common], *prompt_of(shaped, 50, seed=3)[1:]], 3, ignore_eos=True))
        assert bits_of(session, long_request) == alone


@pytest.fixture(scope="module", params=["Q4_K_S", "Q6_K"])
def in_plain_order(request, tmp_path_factory):
    """A model whose weights stay in the order of the file, of a kind of which few rows are multiplied otherwise."""
    path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request.param}")
    source = tiny_model(dim=256, ff=512)
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), how) == 0
    defaults = llama_cpp.llama_model_default_params

    def plain():
        params = defaults()
        params.use_extra_bufts = False
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "llama_model_default_params", plain)
        with loaded(path) as tiny:
            yield tiny


@pytest.mark.parametrize("common", [5, 37, 93, 197, 198, 199, 200])
def test_bits_do_not_depend_on_what_was_kept_where_few_rows_are_multiplied_otherwise(in_plain_order, bits_of, common):
    prompt = prompt_of(in_plain_order, 200)
    request = asking(prompt, 12, ignore_eos=True)
    assert in_plain_order._grain == GRAIN
    with opened(in_plain_order) as session:
        alone = bits_of(session, request)
        session.clear()
        answer(session, asking([*prompt[:common], *prompt_of(in_plain_order, 40, seed=3)[1:]], 3, ignore_eos=True))
        assert bits_of(session, request) == alone


@pytest.mark.parametrize("whole", [True, False], ids=["whole cache", "cache of a window"])
@pytest.mark.parametrize("common", [20, 300])
def test_a_model_with_a_window_answers_the_same_after_an_earlier_prompt(monkeypatch, common, whole):
    parameters = context_module._parameters

    def changed(options, *, offloaded):
        params = parameters(options, offloaded=offloaded)
        assert params.swa_full, "the estimate and the reuse count on it"
        params.swa_full = whole
        return params

    monkeypatch.setattr(context_module, "_parameters", changed)
    with loaded(tiny_windowed()) as windowed, opened(windowed, n_ctx=1024, n_batch=64, n_ubatch=32) as session:
        prompt = prompt_of(windowed, 320)
        fresh = answer(session, asking(prompt, 24, ignore_eos=True, reuse=False))
        session.clear()
        answer(session, asking([*prompt[:common], *prompt_of(windowed, 500, seed=3)[1:]], 3, ignore_eos=True))
        again = answer(session, asking(prompt, 24, ignore_eos=True))
    assert again.tokens == fresh.tokens
    assert again.end.cached == (cut(common, 320, windowed._grain) if whole else 0)


def test_bits_do_not_depend_on_a_prompt_that_was_cut_short(shaped, bits_of, long_request, alone):
    with opened(shaped, n_ctx=1024) as session:
        session.add(long_request)
        session.step(1)
        session.step(1)
        session.interrupt()
        assert session.step(1) == []
        session.reset()
        assert list(session.history) == list(long_request.prompt[: len(session.history)])
        assert 0 < len(session.history) < LONG
        assert bits_of(session, long_request) == alone


def test_bits_do_not_depend_on_the_session_nor_on_its_size(shaped, bits_of, long_request, alone):
    with (
        opened(shaped, n_ctx=1024) as first,
        opened(shaped, n_ctx=2048) as second,
        opened(shaped, n_ctx=1024, max_sequences=2) as third,
    ):
        assert [bits_of(session, long_request) for session in (third, first, second)] == [alone] * 3


def test_bits_do_not_depend_on_sessions_that_work_at_the_same_moment(shaped, bits_of, long_request, alone):
    together = threading.Barrier(4)

    def work(threads):
        with opened(shaped, n_ctx=1024, n_ubatch=64) as session:
            together.wait()
            return bits_of(session, long_request, threads)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [1, 1, 2, 2])) == [alone] * 4


def test_reset_makes_a_session_as_good_as_new(shaped, bits_of, long_request, alone):
    with opened(shaped, n_ctx=1024, n_ubatch=64, max_sequences=2) as session:
        session.add(asking(prompt_of(shaped, 5, seed=1), 100, ignore_eos=True))
        session.add(asking(prompt_of(shaped, 900, seed=2)))
        for _ in range(4):  # one sequence answers, the other one is in the middle of its prompt
            session.step(1)
        session.reset()
        assert session.step(1) == []
        assert bits_of(session, long_request) == alone


def test_a_token_that_is_not_in_the_vocabulary_fails_and_the_next_request_is_answered(weights, bits_of):
    good = asking(prompt_of(weights, 20), 8)
    with opened(weights) as session, opened(weights) as fresh:
        got = answer(session, asking([BOS, weights.vocab_size]))
        assert isinstance(got.end, Failed)
        assert bits_of(session, good) == bits_of(fresh, good)


@pytest.fixture(scope="module")
def crowd(weights):
    """Four requests of different lengths, and what each is answered alone."""
    requests = [asking(prompt_of(weights, n, seed=n), 24, ignore_eos=True) for n in (3, 40, 120, 17)]
    with opened(weights) as session:
        return requests, [answer(session, request).tokens for request in requests]


def test_each_event_of_a_crowd_carries_the_number_of_its_sequence(weights, crowd):
    requests, alone = crowd
    with opened(weights, max_sequences=4) as session:
        numbers = [session.add(request) for request in requests]
        assert [got.tokens for got in finish(session, *numbers)] == alone


def test_sequences_join_between_steps(weights, crowd):
    requests, alone = crowd
    with opened(weights, max_sequences=4, n_ubatch=16) as session:
        answers = {}
        for step in itertools.count():
            if step % 5 == 0 and step < 20:
                answers[session.add(requests[step // 5])] = Answer()
            for event in session.step(1):
                answers[event.sequence].take(event)
            if step >= 20 and all(got.end for got in answers.values()):
                break
        assert [got.tokens for got in answers.values()] == alone


def test_a_removed_sequence_leaves_the_others_unchanged(weights, crowd):
    requests, alone = crowd
    with opened(weights, max_sequences=4) as session:
        numbers = [session.add(request) for request in requests]
        answers = {number: Answer() for number in numbers}
        removed = {numbers[0]: 3, numbers[2]: 9}  # after so many steps
        for step in range(48):
            for event in session.step(1):
                answers[event.sequence].take(event)
            for number in [number for number, at in removed.items() if at == step]:
                session.remove(number)
        assert [answers[number].tokens for number in (numbers[1], numbers[3])] == [alone[1], alone[3]]


def test_a_number_used_again_carries_nothing_over(weights, crowd):
    requests, alone = crowd
    with opened(weights, max_sequences=4) as session:
        for request in [*requests, *reversed(requests)]:
            assert answer(session, request).tokens == alone[requests.index(request)]


@pytest.mark.parametrize(("length", "tokens"), [(255, 1), (254, 2), (200, 56)])
def test_the_end_of_the_context_ends_an_answer(weights, length, tokens):
    with opened(weights, n_ctx=256) as session:
        got = answer(session, asking(prompt_of(weights, length), 1000, ignore_eos=True))
    assert (len(got.tokens), got.reason) == (tokens, FinishReason.LENGTH)


@pytest.mark.parametrize("length", [256, 257, 2560])
def test_a_prompt_that_fills_the_context_is_refused(weights, length):
    with opened(weights, n_ctx=256) as session, pytest.raises(ValueError, match="does not fit into 256"):
        session.add(asking(prompt_of(weights, length), 1))


def test_every_sequence_of_a_crowd_can_fill_its_context(weights):
    with opened(weights, n_ctx=256, max_sequences=4) as session:
        numbers = [session.add(asking(prompt_of(weights, 100 + n, n), 1000, ignore_eos=True)) for n in range(4)]
        assert [len(got.tokens) for got in finish(session, *numbers)] == [156, 155, 154, 153]


@pytest.mark.parametrize("max_tokens", [1, 2, 31])
def test_max_tokens_is_met_exactly(weights, max_tokens):
    with opened(weights) as session:
        got = answer(session, asking(prompt_of(weights, 10), max_tokens, ignore_eos=True))
    assert (len(got.tokens), got.reason) == (max_tokens, FinishReason.LENGTH)


@pytest.fixture(scope="module")
def plain(weights):
    """A request and its answer when nothing stops it."""
    request = asking(prompt_of(weights, 10), 40, ignore_eos=True)
    with opened(weights) as session:
        return request, answer(session, request)


@pytest.fixture(scope="module")
def ending(plain):
    """Weights whose end token is one that the plain answer has in its middle, and where."""
    tokens = plain[1].tokens
    at = next(i for i in range(5, len(tokens)) if tokens[i] not in tokens[:i])
    with loaded(tiny_model(eos=tokens[at])) as tiny:
        yield tiny, at


def test_an_end_of_generation_token_ends_with_stop(plain, ending):
    request, whole = plain
    weights, at = ending
    with opened(weights) as session:
        got = answer(session, SequenceRequest(request.prompt, 40, request.sampling))
    assert (got.tokens, got.reason) == (whole.tokens[:at], FinishReason.STOP)


def test_ignore_eos_goes_on_with_another_token(plain, ending):
    request, whole = plain
    weights, at = ending
    with opened(weights) as session:
        got = answer(session, request)
    assert got.tokens[:at] == whole.tokens[:at]
    assert whole.tokens[at] not in got.tokens
    assert (len(got.tokens), got.reason) == (40, FinishReason.LENGTH)


@given(st.data())
@settings(deadline=None)
def test_a_stop_string_ends_the_text_wherever_tokens_are_cut(weights, plain, data):
    request, whole = plain
    start = data.draw(st.integers(0, len(whole.text) - 1))
    end = data.draw(st.integers(start + 1, min(len(whole.text), start + 6)))
    stop = whole.text[start:end]
    with opened(weights) as session:
        number = session.add(SequenceRequest(request.prompt, 40, request.sampling, stops=(stop,), ignore_eos=True))
        got = finish(session, number)[0]
    assert got.text == whole.text[: whole.text.index(stop)]
    assert got.reason is FinishReason.STOP
    assert got.tokens == whole.tokens[: len(got.tokens)]


def test_a_stop_string_that_never_comes_changes_nothing(weights, plain):
    request, whole = plain
    with opened(weights) as session:
        got = answer(session, SequenceRequest(request.prompt, 40, request.sampling, ("never met",), ignore_eos=True))
    assert (got.tokens, got.text) == (whole.tokens, whole.text)
    assert isinstance(got.end, Finished)


# --- what goes wrong on the way ---


class Stubborn(ScriptedContext):
    """Fails to truncate, once it is told so."""

    fails = False

    def truncate(self, sequence, tokens):
        if self.fails:
            raise RuntimeError("the script says so")
        return super().truncate(sequence, tokens)


def test_no_number_is_lost_where_memory_could_not_be_freed():
    context = Stubborn()
    core = core_over(context)
    numbers = [core.add(asking([5, 6, 7])) for _ in range(MAX_SEQUENCES)]
    context.fails = True
    with pytest.raises(RuntimeError):
        core.remove(numbers[0])
    core.clear()
    context.fails = False
    assert sorted(core.add(asking([5, 6, 7])) for _ in range(MAX_SEQUENCES)) == sorted(numbers)


def test_nothing_is_kept_of_a_sequence_whose_sampler_could_not_be_made(monkeypatch):
    context = ScriptedContext()
    core = core_over(context)
    ended(core, asking(counted(10, 20), 3))
    monkeypatch.setattr(core, "_sampler", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.add(asking([*counted(10, 15), 90, 91, 92]))
    assert core.history == counted(10, 15)
    assert context.memory[0] == counted(10, 15)


# --- prompts that are alike, on real contexts ---


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("common", [LONG, 400], ids=["the same", "the same beginning"])
def test_copies_of_a_beginning_answer_as_if_they_had_evaluated_it(shaped, common, kv_dtype):
    prompts = [prompt_of(shaped, LONG)[:common] + prompt_of(shaped, LONG, seed)[common:] for seed in range(4)]
    sampling = [GREEDY, *(Sampling(temperature=2.0, top_k=0, min_p=0.0, seed=seed) for seed in range(3))]
    requests = [asking(prompt, 12, one, ignore_eos=True) for prompt, one in zip(prompts, sampling, strict=True)]
    with opened(shaped, n_ctx=1024, kv_dtype=kv_dtype) as session:
        alone = [answer(session, request).tokens for request in requests]
    with opened(shaped, n_ctx=1024, max_sequences=4, kv_dtype=kv_dtype) as session:
        numbers = [session.add(request) for request in requests]
        beside = finish(session, *numbers)
        assert session.is_sound(4)
        for number in numbers:
            session.remove(number)
        assert session.is_sound()
    assert [one.tokens for one in beside] == alone
    assert [one.end.cached for one in beside] == [0, *[cut(common, LONG, shaped._grain)] * 3]


def test_what_is_copied_of_a_kept_prompt_is_the_same_to_the_bit(shaped, bits_of, long_request, alone):
    earlier = [*long_request.prompt[:300], *prompt_of(shaped, 400, seed=3)[1:]]
    with opened(shaped, n_ctx=1024, max_sequences=2) as session:
        answer(session, asking(earlier, 1, ignore_eos=True))
        assert bits_of(session, long_request) == alone
        for prompt in (earlier, long_request.prompt):
            number = session.add(asking(prompt, 1))
            assert finish(session, number)[0].end.cached == cut(LONG, len(prompt), shaped._grain), "both are kept"
            session.remove(number)
        assert session.is_sound()


def test_a_conversation_that_was_set_aside_goes_on_with_the_same_bits(shaped, bits_of, long_request, alone):
    stranger = [*long_request.prompt[:500], *prompt_of(shaped, 90, seed=3)[1:]]
    with opened(shaped, n_ctx=1024, max_sequences=2) as session:
        assert bits_of(session, long_request) == alone
        for number in [session.add(asking(stranger, 1)) for _ in range(2)]:  # before anything is evaluated
            session.remove(number)
        assert session.is_sound()
        assert bits_of(session, long_request) == alone
        number = session.add(long_request)
        assert finish(session, number)[0].end.cached == cut(LONG, LONG, shaped._grain)
        session.remove(number)


def test_copies_work_where_layers_look_back_over_a_window():
    with loaded(tiny_windowed()) as weights:
        request = asking(prompt_of(weights, 200), 12, ignore_eos=True)
        with opened(weights) as session:
            alone = answer(session, request).tokens
        with opened(weights, max_sequences=3) as session:
            beside = finish(session, *[session.add(request) for _ in range(3)])
    assert [one.tokens for one in beside] == [alone] * 3
    assert [one.end.cached for one in beside] == [0, *[cut(200, 200, weights._grain)] * 2]


def test_a_state_is_not_lost_to_a_prompt_that_could_have_no_part_of_it():
    with loaded(tiny_recurrent()) as weights, opened(weights, max_sequences=2) as session:
        prompt = prompt_of(weights, 100)
        answer(session, asking(prompt_of(weights, 40, seed=1), 4, ignore_eos=True))
        answer(session, asking(prompt, 4, ignore_eos=True))
        kept = list(session.history)
        assert len(kept) == 103
        stranger = session.add(asking([*prompt[:90], 5, 6, 7], 4, ignore_eos=True))
        assert finish(session, stranger)[0].end.cached == 0
        session.remove(stranger)
        assert list(session.history) == kept
        number = session.add(asking([*kept, 5, 6, 7], 4, ignore_eos=True))
        assert finish(session, number)[0].end.cached == len(kept)
        session.remove(number)
        assert session.is_sound()


@pytest.mark.parametrize(
    ("common", "cached"), [(128, 128), (100, 0)], ids=["up to the end of a step", "up to the midst of one"]
)
def test_a_state_is_copied_whole_or_not_at_all(common, cached):
    with loaded(tiny_recurrent()) as weights:
        prompt = prompt_of(weights, 200)
        other = [*prompt[:common], *prompt_of(weights, 60, seed=1)[1:]]
        requests = [asking(one, 12, ignore_eos=True) for one in (prompt, other)]
        with opened(weights) as session:
            alone = [answer(session, request).tokens for request in requests]
        with opened(weights, max_sequences=2) as session:
            numbers = [session.add(request) for request in requests]
            beside = finish(session, *numbers)
            assert session.is_sound(2)
            for number in numbers:
                session.remove(number)
            assert session.is_sound()
    assert [one.tokens for one in beside] == alone
    assert [one.end.cached for one in beside] == [0, cached]
