"""The choice of a thread count follows what steps really take."""

from __future__ import annotations

import pytest

from trioserve.runtime.pace import Pace

# seconds of a step with so many threads
QUIET = {1: 0.014, 2: 0.009, 4: 0.006, 8: 0.004}
CROWDED = {1: 0.019, 2: 0.25, 4: 0.9, 8: 1.5}


def run(pace: Pace, steps: int, times: dict[int, float], limit: int) -> list[int]:
    """Let steps take what the table says, and return the thread counts that they were given."""
    given = []
    for _ in range(steps):
        threads = pace.threads(limit)
        pace.note(threads, times[threads])
        given.append(threads)
    return given


def test_a_limit_of_one_is_one():
    assert set(run(Pace(), 100, QUIET, limit=1)) == {1}


@pytest.mark.parametrize("limit", [2, 4, 8])
def test_on_a_quiet_machine_it_keeps_all_threads(limit):
    given = run(Pace(), 1000, QUIET, limit)
    assert given[0] == limit
    assert given.count(limit) >= 985


@pytest.mark.parametrize("limit", [2, 4, 8])
def test_on_a_crowded_machine_it_soon_takes_one(limit):
    given = run(Pace(), 100, CROWDED, limit)
    assert given[16:].count(1) >= 82
    spent = sum(CROWDED[threads] for threads in given)
    assert spent < 0.1 * 100 * CROWDED[limit] + 100 * CROWDED[1] + 6 * CROWDED[limit]


def test_a_slump_is_noticed_after_two_steps():
    pace = Pace()
    run(pace, 500, QUIET, limit=2)
    assert run(pace, 6, CROWDED, limit=2)[3:] == [1, 1, 1]


def test_one_slow_step_is_taken_for_chance():
    pace = Pace()
    run(pace, 500, QUIET, limit=2)
    run(pace, 1, CROWDED, limit=2)
    assert run(pace, 20, QUIET, limit=2) == [2] * 20


def test_it_comes_back_when_the_crowd_has_gone():
    pace = Pace()
    run(pace, 100, CROWDED, limit=2)
    given = run(pace, 600, QUIET, limit=2)
    assert given[-100:].count(2) >= 98


def test_trying_more_on_a_crowded_machine_gets_rare():
    given = run(Pace(), 5000, CROWDED, limit=2)
    assert given.count(2) <= 10


def test_very_short_steps_are_left_alone():
    assert set(run(Pace(), 200, {1: 0.0001, 2: 0.0009}, limit=2)) == {2}


def test_never_more_than_the_limit_nor_less_than_one():
    pace = Pace()
    for limit in (8, 3, 5, 1, 2, 8):
        given = run(pace, 50, dict.fromkeys(range(1, 9), 1.0), limit)
        assert all(1 <= threads <= limit for threads in given)


def test_the_choice_for_a_limit_is_remembered():
    pace = Pace()
    run(pace, 50, CROWDED, limit=2)
    run(pace, 50, CROWDED, limit=1)
    assert run(pace, 1, CROWDED, limit=2) == [1]


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_what_chance_makes_it_take_is_given_up_soon(slow):
    """A trial that is compared with steps which others have disturbed looks like a success."""
    pace = Pace()
    run(pace, slow, {2: 0.016}, limit=2)
    assert run(pace, 200, QUIET, limit=2).count(1) <= 12


def test_what_one_session_has_found_out_holds_for_the_next():
    """They take turns, as the slots of a model do under a client that asks one thing after the other."""
    pace = Pace()
    given = [run(pace, 64, QUIET, limit=2).count(1) for _ in range(16)]
    assert sum(given[:4]) <= 5
    assert sum(given[4:]) <= 4


def test_steps_side_by_side_are_one_trial():
    pace, given = Pace(), []
    for _ in range(200):
        begun = [pace.threads(2) for _ in range(4)]
        for threads in begun:
            pace.note(threads, CROWDED[threads])
        given.append(begun)
    assert given[0] == [2] * 4
    assert given[-20:].count([1] * 4) >= 19


def test_a_step_that_was_begun_with_another_limit_tells_nothing():
    told, untold = Pace(), Pace()
    for pace in (told, untold):
        run(pace, 20, QUIET, limit=4)
        run(pace, 10, QUIET, limit=2)
        if pace is told:
            for _ in range(10):
                pace.note(4, 1.0)
    assert run(told, 100, QUIET, limit=2) == run(untold, 100, QUIET, limit=2)


def test_one_lucky_step_of_a_trial_changes_nothing():
    pace = Pace()
    given = run(pace, 3, QUIET, limit=2)
    given += run(pace, 1, {1: 0.001, 2: 0.009}, limit=2)
    given += run(pace, 200, QUIET, limit=2)
    assert given[3] == 1
    assert given.count(1) <= 6


def test_one_unlucky_step_does_not_keep_it_from_more_threads():
    pace = Pace()
    run(pace, 100, CROWDED, limit=2)
    given = [1]
    while given[-1] == 1:  # the first step of the next trial is disturbed
        given += run(pace, 1, {1: 0.014, 2: 0.02}, limit=2)
    given += run(pace, 2, QUIET, limit=2)
    assert given[-3:] == [2, 2, 2]
    assert run(pace, 200, QUIET, limit=2).count(2) >= 195


def test_what_a_limit_has_taught_is_not_paid_for_again_when_it_comes_back():
    """As where a second client comes and goes all the time."""
    pace = Pace()
    run(pace, 500, QUIET, limit=2)
    given = []
    for _ in range(20):
        run(pace, 20, QUIET, limit=1)
        given += run(pace, 20, QUIET, limit=2)
    assert given.count(1) <= 4


def test_a_crowd_that_came_meanwhile_is_noticed_soon():
    pace = Pace()
    run(pace, 500, QUIET, limit=2)
    run(pace, 20, QUIET, limit=1)
    assert run(pace, 10, CROWDED, limit=2)[-5:] == [1] * 5


@pytest.mark.parametrize("away", [1, 4, 20])
@pytest.mark.parametrize("own", [1, 2, 3, 4, 5, 8])
def test_a_crowd_is_noticed_where_limits_take_turns(own, away):
    pace = Pace()
    run(pace, 500, QUIET, limit=2)
    given = []
    while len(given) < 200:
        run(pace, away, CROWDED, limit=1)
        given += run(pace, own, CROWDED, limit=2)
    assert given[20:].count(2) <= 10


@pytest.mark.parametrize("own", [1, 2, 3, 4, 5, 8])
def test_no_threads_are_taken_away_where_limits_take_turns(own):
    pace = Pace()
    given = []
    while len(given) < 1000:
        run(pace, 4, QUIET, limit=1)
        given += run(pace, own, QUIET, limit=2)
    assert given.count(1) <= 15


def test_another_kind_of_step_is_bound_only_where_more_threads_are_held_up():
    pace = Pace()
    assert pace.bound(8) == 8
    run(pace, 100, CROWDED, limit=8)
    assert (pace.bound(8), pace.bound(4)) == (1, 4)
    run(pace, 20_000, QUIET, limit=8)
    assert pace.bound(8) == 8


def test_another_kind_of_step_is_not_bound_by_what_is_best_for_this_one():
    """Fewer threads may be a little faster for next tokens, and all are for prompts."""
    pace = Pace()
    given = run(pace, 200, {8: 0.0030, 4: 0.0025, 2: 0.004, 1: 0.007}, limit=8)
    assert given[-1] == 4
    assert pace.bound(8) == 8


def test_threads_that_are_held_up_no_more_are_free_for_every_kind_of_step():
    pace = Pace()
    run(pace, 100, CROWDED, limit=2)
    assert pace.bound(2) == 1
    # Two threads are as fast as one now, and no faster: nothing is adopted, and yet nobody is in the way.
    run(pace, 20_000, {1: 0.014, 2: 0.014}, limit=2)
    assert (pace.bound(2), pace.threads(2)) == (2, 1)


def test_a_few_threads_more_that_get_on_say_nothing_of_all():
    pace = Pace()
    run(pace, 100, CROWDED, limit=8)
    partly = {1: 0.019, 2: 0.012, 4: 0.9, 8: 1.5}
    given = run(pace, 6000, partly, limit=8)
    assert given[-1] == 2
    assert pace.bound(8) == 2
