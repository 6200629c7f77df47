"""What a worker thread is doing, as others see it."""

import pytest

from trioserve.runtime.pulse import Call, Pulse


async def test_a_call_is_noted_while_it_lasts(mock_clock):
    pulse, seen = Pulse(), []
    mock_clock.jump(5)

    def work(one, other):
        seen.append((pulse.under_way, str(pulse)))
        mock_clock.jump(1.5)
        seen.append(str(pulse))
        return one + other

    assert pulse.call("adding up", work, 1, 2) == 3
    assert seen == [(Call("adding up", 5.0), "adding up for 0.0 s"), "adding up for 1.5 s"]
    assert (pulse.under_way, str(pulse)) == (None, "outside the engine")


async def test_a_call_that_raises_is_over():
    pulse = Pulse()
    with pytest.raises(ZeroDivisionError):
        pulse.call("dividing", lambda: 1 / 0)
    assert pulse.under_way is None
