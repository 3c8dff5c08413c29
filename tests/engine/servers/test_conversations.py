"""Places of a server: who holds one, who waits, and how they come free."""

import asyncio
import random

import pytest

from strop.engine.servers.engine import Conversations
from strop.errors import StropError

from ..support import make_request
from .lru_pool import LruPool


def test_a_request_that_is_cancelled_in_the_moment_of_its_turn_leaves_no_place_taken():
    async def scenario():
        places = Conversations(1)
        await places.enter(make_request("held", [1]))
        waiting = asyncio.create_task(places.enter(make_request("waiting", [1])))
        await asyncio.sleep(0)
        places.leave("held")  # grants the place
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(1):
            await places.enter(make_request("next", [1]))

    asyncio.run(scenario())


def test_whoever_leaves_the_queue_lets_the_others_move_up():
    async def scenario():
        places = Conversations(1)
        await places.enter(make_request("held", [1]))
        first, second = [asyncio.create_task(places.enter(make_request(name, [1]))) for name in ("first", "second")]
        await asyncio.sleep(0)
        places.leave("first")
        places.leave("held")
        await second
        assert first.cancelled() or first.done()
        assert places.busy == ["second"]

    asyncio.run(scenario())


def test_a_fork_needs_a_place_of_its_own_and_a_continuation_does_not():
    async def scenario():
        places = Conversations(1)
        request = make_request("a", [1, 2])
        await places.enter(request)
        places.end(request, (3,))
        await places.enter(make_request("b", [1, 2, 3, 4], extends="a", at=3))
        fork = asyncio.create_task(places.enter(make_request("fork", [1, 2, 3, 5], extends="b", at=3)))
        await asyncio.sleep(0)
        assert not fork.done()
        places.leave("b")
        await fork

    asyncio.run(scenario())


def test_a_prefix_that_differs_is_refused_with_its_place():
    async def scenario():
        places = Conversations(2)
        request = make_request("a", [1, 2])
        await places.enter(request)
        places.end(request, (3,))
        with pytest.raises(StropError, match="differ at position 1"):
            await places.enter(make_request("b", [1, 9, 3], extends="a", at=3))

    asyncio.run(scenario())


def test_whoever_leaves_in_the_moment_of_its_turn_has_none():
    async def scenario():
        places = Conversations(1)
        await places.enter(make_request("held", [1]))
        waiting = asyncio.create_task(places.enter(make_request("waiting", [1])))
        await asyncio.sleep(0)
        places.leave("held")  # grants the place
        places.leave("waiting")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not places.busy

    asyncio.run(scenario())


def test_an_idle_prefix_is_in_danger_when_more_was_released_since_than_the_memory_has_to_spare():
    async def scenario():
        places = Conversations(2, num_blocks=12, block_tokens=4)
        idle = make_request("idle", range(6), max_tokens=3)
        await places.enter(idle)
        places.end(idle, (6, 7))  # 8 ids: 2 blocks, of which the second lacks the id that was sampled last
        found = []
        for number in range(5):
            other = make_request(f"{number}", [60, number], max_tokens=8)  # 3 blocks
            await places.enter(other)
            found.append(places.endangered())
            places.leave(other.id)
        # 12 blocks less 2 that uses may take, 2 of the idle one and 3 of the other: 5 to spare; released were 0, 3, 6, 3, 6.
        assert found == [[], [], [(0, 1, 2, 3, 4)], [], [(0, 1, 2, 3, 4)]]

    asyncio.run(scenario())


def test_nothing_is_said_of_the_prefixes_of_a_server_that_does_not_tell_its_blocks():
    async def scenario():
        places = Conversations(2)
        idle = make_request("idle", range(60))
        await places.enter(idle)
        places.end(idle, (6, 7))
        for number in range(20):
            await places.enter(make_request(f"{number}", range(60)))
            assert not places.endangered()
            places.leave(f"{number}")

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_no_idle_conversation_loses_a_block_whatever_comes_and_goes(seed):
    """Memory for what all places may hold, and for a block more of each; prompts of groups are shared."""
    numbers = random.Random(seed)
    num_places, block, longest = numbers.choice([2, 3, 6]), numbers.choice([2, 4]), 24
    pool = LruPool(num_places * (longest // block + 1), block)
    places = Conversations(num_places, num_blocks=pool.num_blocks, block_tokens=block)
    prompts = [[numbers.randrange(50) for _ in range(numbers.randint(1, 10))] for _ in range(3)]
    running, idle, num_uses, num_kept = {}, {}, 0, 0

    def some(most):
        return [numbers.randrange(50) for _ in range(numbers.randint(1, most))]

    async def start(number):
        nonlocal num_uses, num_kept
        if idle and (numbers.random() < 0.4 or len(running) + len(idle) == num_places):
            parent = numbers.choice(list(idle))
            so_far = idle.pop(parent)
            ids, more = [*so_far, *some(3)], {"extends": parent, "at": len(so_far)}
        else:
            so_far, ids, more = [], [*numbers.choice(prompts), *some(2)], {}
        if len(ids) >= longest:
            places.leave(parent)
            return
        request = make_request(f"{number}", ids, max_tokens=longest - len(ids), **more)
        await places.enter(request)
        for prefix in places.endangered():
            num_uses += 1
            pool.start("use", list(prefix))
            pool.end("use", [0])
        found = pool.start(request.id, ids)
        assert found >= max(0, len(so_far) - 1) // block * block
        num_kept += found > 0 and bool(so_far)
        running[request.id] = request

    async def scenario():
        for number in range(1500):
            if len(running) + len(idle) < num_places or (idle and numbers.random() < 0.3):
                await start(number)
            if running and numbers.random() < 0.6:
                request = running.pop(numbers.choice(list(running)))
                completion = some(min(6, request.max_tokens))
                pool.end(request.id, completion)
                places.end(request, tuple(completion))
                idle[request.id] = [*request.ids, *completion]
            if idle and numbers.random() < 0.2:
                gone = numbers.choice(list(idle))
                del idle[gone]
                places.leave(gone)

    asyncio.run(scenario())
    assert num_kept > 100
    assert num_uses > 10
