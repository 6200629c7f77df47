"""How much two sequences begin with in common."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.engine.prefix import Kept, common_prefix, cut, goes_on

tokens = st.lists(st.integers(0, 3), max_size=300)


@given(tokens, tokens, tokens)
def test_the_common_prefix_is_found_wherever_it_ends(shared, one, other):
    one, other = shared + one, shared + other
    found = common_prefix(one, other)
    assert found >= len(shared)
    assert one[:found] == other[:found]
    assert found == min(len(one), len(other)) or one[found] != other[found]


@pytest.mark.parametrize(
    ("prompt", "usable", "of_the_whole"),
    [([1, 2, 3, 4], 3, 3), ([1, 2, 3], 3, 3), ([1, 2, 9], 2, 0), ([1, 2], 2, 0), ([9], 0, 0), ([], 0, 0)],
)
def test_what_has_no_parts_is_usable_as_a_whole_or_not_at_all(prompt, usable, of_the_whole):
    assert Kept([1, 2, 3]).usable(prompt) == usable
    assert Kept([1, 2, 3], divisible=False).usable(prompt) == of_the_whole


@pytest.mark.parametrize(
    ("most", "length", "grain", "first"),
    [
        (50, 100, 1, 50),
        (99, 100, 1, 98),  # never a last one alone
        (100, 100, 1, 98),
        (1, 2, 1, 0),
        (5, 2, 1, 0),
        (50, 100, 8, 48),
        (96, 100, 8, 88),  # and never fewer than a grain
        (92, 100, 8, 88),
        (100, 100, 8, 88),
        (100, 16, 8, 8),
        (100, 15, 8, 0),
        (7, 100, 8, 0),
        (0, 0, 8, 0),
    ],
)
def test_a_run_is_cut_at_multiples_of_a_grain_and_leaves_one(most, length, grain, first):
    assert cut(most, length, grain) == first


def test_nothing_has_nothing_in_common():
    assert common_prefix([], [1]) == common_prefix([1], []) == 0


@pytest.mark.parametrize(
    ("common", "prompt", "asked", "answered", "worth"),
    [
        (100, 120, 60, 40, True),  # the next turn of a conversation
        (100, 120, 160, 40, True),
        (100, 120, 160, 41, False),  # a stranger with the system prompt of a conversation
        (100, 100, 100, 5000, True),  # the same prompt once more, after a long answer
        (100, 120, 100, 5000, True),  # the next turn, without the thoughts
        (100, 120, 104, 5000, True),  # which the template had opened
        (100, 120, 105, 5000, False),
        (100, 100, 5000, 0, False),  # an early turn of a conversation once more
        (10, 100, 10, 0, False),  # the beginning of a chat template
        (11, 100, 11, 0, True),
        (0, 0, 0, 0, False),
        (0, 10, 0, 0, False),
        (1, 2, 3, 90, False),
    ],
)
def test_a_prompt_goes_on_where_it_saves_more_than_is_lost(common, prompt, asked, answered, worth):
    assert goes_on(common, prompt, Kept(range(asked + answered), asked)) is worth
