"""What the supervisor of verification does about pairs that hang, and about children that die."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_support import SIGKILL, SIGSEGV, Watched, in_order, is_running, judge, request_of

from strop.errors import MachineError
from strop.sandbox.node import verification
from strop.sandbox.node.verification import ChildEnd
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.verify_process import ProcessVerifier

EQUAL, TIMEOUT, UNREADABLE, INTERNAL = PairVerdict.EQUAL, PairVerdict.TIMEOUT, PairVerdict.UNREADABLE, PairVerdict.INTERNAL
RIGHT = ("p - q", "-q + p")


@pytest.mark.parametrize("hang", ["9^{9^{9^9}}", "(x+1)^{5000}", "10^{10^{10}}"])
def test_a_pair_that_hangs_times_out_alone_and_costs_its_own_limit(hang):
    started = time.monotonic()
    assert judge(RIGHT) == [EQUAL]
    start_s = time.monotonic() - started
    started = time.monotonic()
    assert judge(RIGHT, ("3", hang), RIGHT, RIGHT, pair_wall_s=1.0) == [EQUAL, TIMEOUT, EQUAL, EQUAL]
    assert 1.0 < time.monotonic() - started < 1.5 + 3 * start_s  # one process before the hang, and one after it


def test_a_verdict_is_told_when_it_is_known_not_when_its_batch_is():
    async def first():
        verifier = ProcessVerifier()
        verdicts = verifier.verify(request_of(RIGHT, ("3", "9^{9^{9^9}}"), pair_wall_s=30.0))
        try:
            return await anext(verdicts)
        finally:
            await verdicts.aclose()
            await verifier.close()

    started = time.monotonic()
    assert asyncio.run(first()) == (0, EQUAL)
    assert time.monotonic() - started < 25


def test_nothing_is_left_of_a_request_that_was_given_up():
    async def give_up():
        pids = []
        verifier = ProcessVerifier()

        async def start_child():
            return Watched(await verifier.start_child(), pids=pids)

        verdicts = verification.verify(start_child, request_of(RIGHT, ("3", "9^{9^{9^9}}"), pair_wall_s=60.0))
        async for _ in verdicts:
            break
        await verdicts.aclose()
        await verifier.close()
        return pids

    (pid,) = asyncio.run(give_up())
    assert not is_running(pid)


def signalled(signal_number, *, after_lines, num_children):
    """The first so many children get a signal when they have said so many lines."""
    children = []

    def handle(child):
        number = signal_number if len(children) < num_children else 0
        children.append(Watched(child, signal_number=number, after_lines=after_lines))
        return children[-1]

    return handle, children


@pytest.mark.parametrize("after_lines", [0, 1, 2])
def test_a_child_that_was_killed_by_who_knows_whom_is_replaced_and_its_pair_judged_again(after_lines):
    handle, children = signalled(SIGKILL, after_lines=after_lines, num_children=1)
    assert judge(RIGHT, ("3", "9^{9^{9^9}}"), RIGHT, handle=handle, pair_wall_s=1.0) == [EQUAL, TIMEOUT, EQUAL]
    assert len(children) == 3  # the second one had to be killed for the pair that hangs


def test_a_pair_whose_children_are_lost_twice_is_our_fault_and_the_others_are_judged():
    handle, children = signalled(SIGKILL, after_lines=1, num_children=2)
    assert judge(("3", "9^{9^{9^9}}"), RIGHT, handle=handle, pair_wall_s=60.0) == [INTERNAL, EQUAL]
    assert len(children) == 3


def test_a_child_that_dies_twice_before_its_first_pair_is_not_tried_for_every_pair():
    handle, children = signalled(SIGKILL, after_lines=0, num_children=9)
    assert judge(*[RIGHT] * 5, handle=handle) == [INTERNAL] * 5
    assert len(children) == 2


def test_a_pair_that_crashes_the_interpreter_is_unreadable_and_the_others_are_judged():
    handle, children = signalled(SIGSEGV, after_lines=2, num_children=1)
    assert judge(RIGHT, ("3", "9^{9^{9^9}}"), RIGHT, handle=handle, pair_wall_s=60.0) == [EQUAL, UNREADABLE, EQUAL]
    assert len(children) == 2


def test_children_that_cannot_be_started_are_our_fault():
    async def start_child():
        raise MachineError("no child today")

    async def run():
        return await in_order(verification.verify(start_child, request_of(RIGHT, RIGHT)))

    with pytest.raises(MachineError, match="no child today"):
        asyncio.run(run())


class Scripted:
    """A child that says what its script says, then hangs or ends."""

    def __init__(self, lines, *, hangs, end):
        self._lines, self._hangs, self._end = lines, hangs, end
        self._killed = asyncio.Event()

    def send(self, payload):
        pass

    async def lines(self):
        for line in self._lines:
            yield line
        if self._hangs:
            await self._killed.wait()

    async def ended(self):
        return self._end

    def kill(self):
        self._killed.set()


LINES = st.one_of(
    st.sampled_from([b"start", b"0 equal", b"1 equal", b"0 unequal", b"2 unreadable", b"", b"0 equal\xff", b"-1 equal", b"0"]),
    st.binary(max_size=12),
)
SCRIPTS = st.tuples(st.lists(LINES, max_size=5), st.booleans(), st.sampled_from(ChildEnd))


@settings(max_examples=150, deadline=None)
@given(num_pairs=st.integers(1, 5), scripts=st.lists(SCRIPTS, max_size=8))
def test_whatever_children_say_every_pair_is_answered_once(num_pairs, scripts):
    queue = iter(scripts)

    async def start_child():
        lines, hangs, end = next(queue, ([], False, ChildEnd.LOST))
        return Scripted(lines, hangs=hangs, end=end)

    async def run():
        request = request_of(*[RIGHT] * num_pairs, pair_wall_s=0.001)
        async with asyncio.timeout(10):
            return await in_order(verification.verify(start_child, request, batch_size=2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_START_S", 0.001)
        patch.setattr(verification, "_GRACE_S", 0.001)
        assert len(asyncio.run(run())) == num_pairs


def test_a_verdict_that_came_while_the_supervisor_stood_still_counts():
    async def run():
        async def start_child():
            return Scripted([b"start", b"0 equal"], hangs=False, end=ChildEnd.DONE)

        return await in_order(verification.verify(start_child, request_of(RIGHT, pair_wall_s=0.0)))

    assert asyncio.run(run()) == [EQUAL]


def test_a_memory_kill_is_the_pairs_timeout():
    ends = [ChildEnd.MEMORY, ChildEnd.DONE]
    children = [Scripted([b"start", b"0 equal"], hangs=False, end=end) for end in ends]

    async def run():
        async def start_child():
            return children.pop(0)

        return await in_order(verification.verify(start_child, request_of(RIGHT, RIGHT, RIGHT)))

    assert asyncio.run(run()) == [EQUAL, TIMEOUT, EQUAL]
