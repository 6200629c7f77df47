"""How much two sequences begin with in common."""

from hypothesis import given
from hypothesis import strategies as st

from trioserve.engine.prefix import common_prefix

tokens = st.lists(st.integers(0, 3), max_size=300)


@given(tokens, tokens, tokens)
def test_the_common_prefix_is_found_wherever_it_ends(shared, one, other):
    one, other = shared + one, shared + other
    found = common_prefix(one, other)
    assert found >= len(shared)
    assert one[:found] == other[:found]
    assert found == min(len(one), len(other)) or one[found] != other[found]


def test_nothing_has_nothing_in_common():
    assert common_prefix([], [1]) == common_prefix([1], []) == 0
