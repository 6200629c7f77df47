"""Which slot a prompt goes to, and what slots keep, on tiny real models."""

import pytest
import trio
from tiny_models import GREEDY, grain_of, tiny_model

from trioserve.config import Config, ModelConfig
from trioserve.engine.prefix import Kept, cut
from trioserve.runtime.pool import Pool
from trioserve.service import Done, GenerationRequest, TokenPrompt, open_service


class Used:
    """A slot, as far as the choice goes."""

    def __init__(self, history, kept_since=0.0, asked=None, *, divisible=True):
        self.place = self
        self.history = Kept(history, asked, divisible=divisible)
        self.kept_since = kept_since if history else 0


def choose(slots, prompt, free=None):
    pool = Pool(None, None, 100, slots)
    return pool.best_slot(prompt, list(range(len(slots))) if free is None else free)


LONG = list(range(100))


@pytest.mark.parametrize(
    ("slots", "prompt", "best"),
    [
        ([Used([]), Used(LONG, 1)], LONG, 1),
        ([Used([]), Used(LONG[:60], 1, divisible=False)], LONG, 1),
        ([Used([]), Used([*LONG[:60], 500], 1, divisible=False)], LONG, 0),  # nothing could be had of it
        ([Used(LONG[:50], 2), Used(LONG[:60], 1)], LONG, 1),
        ([Used(LONG[:50], 2), Used(LONG[:50], 1)], LONG, 0),
        ([Used(LONG[:10], 2), Used([])], LONG, 1),  # a tenth is too little to count
        ([Used(LONG[:11], 2), Used([])], LONG, 0),
        ([Used([*LONG[:50], *range(500, 550)], 2), Used([])], LONG, 0),
        ([Used([*LONG[:50], *range(500, 551)], 2), Used([])], LONG, 1),  # it would lose more than it gives
        ([Used([*LONG[:50], *range(500, 551)], 2), Used([*LONG[:40], *range(500, 600)], 1)], LONG, 1),
        ([Used([*LONG[:50], *range(500, 900)], 2), Used([*LONG[:20], 7], 3), Used([])], LONG, 1),
        ([Used([*LONG[:50], *range(500, 540)], 2), Used([*LONG[:50], 7], 1)], LONG, 1),  # of two that give as much
        ([Used([*LONG, *range(500, 900)], 2, asked=100), Used([])], LONG, 0),  # the same again
        ([Used([*LONG[:60], *range(500, 900)], 2, asked=60), Used([])], LONG, 0),  # the next turn, without thoughts
        ([Used([7], 5), Used([8], 3), Used([9], 4)], LONG, 1),
        ([Used([7], 5), Used([]), Used([])], LONG, 1),
        ([Used([]), Used([])], [], 0),
    ],
)
def test_the_slot_that_costs_least(slots, prompt, best):
    assert choose(slots, prompt) == best


def test_only_free_slots_are_chosen():
    assert choose([Used(LONG, 1), Used([8], 3), Used([9], 2)], LONG, free=[1, 2]) == 2


async def ask(service, prompt, **fields):
    """Slot and usage of an answer."""
    request = GenerationRequest(TokenPrompt(prompt), max_tokens=4, sampling=GREEDY, ignore_eos=True, **fields)
    async with service.generate(request) as generation:
        parts = [part async for part in generation]
    assert isinstance(parts[-1], Done)
    return parts[-1].timings.slot, parts[-1].usage.cached_tokens


@pytest.fixture
async def service():
    config = Config(models=(ModelConfig(path=tiny_model(), slots=2, n_ctx=512),))
    with trio.fail_after(40):
        async with open_service(config) as service:
            await service.wait_started()
            yield service


async def test_conversations_stay_in_their_slots(service):
    first, second = list(range(10, 66)), list(range(100, 156))
    assert await ask(service, first) == (0, 0)
    assert await ask(service, second) == (1, 0)
    assert await ask(service, [*second, *[9] * 8]) == (1, 56)
    assert await ask(service, [*first, *[9] * 8]) == (0, 56)
    assert await ask(service, first) == (0, cut(56, 56, grain_of(tiny_model())))


async def test_a_stranger_takes_the_slot_that_was_unused_longest(service):
    first, second, third = (list(range(start, start + 50)) for start in (10, 100, 200))
    await ask(service, first)
    await ask(service, second)
    assert await ask(service, third) == (0, 0)
    assert await ask(service, first) == (1, 0), "its slot was taken"


async def test_a_request_can_do_without(service):
    prompt = list(range(10, 60))
    await ask(service, prompt)
    assert (await ask(service, prompt, cache_prompt=False))[1] == 0
    assert (await ask(service, prompt))[1] == cut(50, 50, grain_of(tiny_model()))


async def test_a_model_can_do_without():
    config = Config(models=(ModelConfig(path=tiny_model(), n_ctx=512, cache_prompt=False),))
    async with open_service(config) as service:
        prompt = list(range(10, 60))
        assert [await ask(service, prompt) for _ in range(2)] == [(0, 0), (0, 0)]


async def test_nothing_is_kept_over_an_unload(service):
    prompt = list(range(10, 60))
    await ask(service, prompt)
    (model,) = service.registry
    await model.unload()
    assert await ask(service, prompt) == (0, 0)


async def test_a_prompt_of_its_own_waits_no_longer_than_those_that_share_a_beginning():
    """Whoever has most of the prompt in the free slot would otherwise go first, and so again."""
    config = Config(models=(ModelConfig(path=tiny_model(), n_ctx=512),))
    shared, ended = list(range(10, 60)), []
    async with open_service(config) as service:
        await service.wait_started()
        (model,) = service.registry

        async def queue(nursery, name, prompt):
            async def follow():
                ended.append((name, (await ask(service, prompt))[1]))

            before = model.status().queued_requests
            nursery.start_soon(follow)
            with trio.fail_after(40):
                while model.status().queued_requests == before:
                    await trio.sleep(0)

        # Of a prompt like the others', it would depend on chance how much is kept until it is given up.
        first = service.generate(GenerationRequest(TokenPrompt([7]), max_tokens=4))
        async with trio.open_nursery() as nursery, first:
            for number in range(6):
                prompt = list(range(100, 150)) if number == 2 else [*shared, 5, number]
                await queue(nursery, number, prompt)
    assert [name for name, _ in ended] == list(range(6))
    assert [name for name, kept in ended if not kept] == [0, 2, 3], "the one of its own, and whoever came after another"
