"""Places of a server: who holds one, who waits, and how they come free."""

import asyncio

import pytest

from strop.engine.servers.conversations import Conversations
from strop.errors import StropError

from ..support import make_request


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
