"""What happens to pairs that hang, and to processes that die, in plain processes and in confined children."""

import asyncio
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_support import in_order, is_running, judge, request_of

from strop.errors import MachineError
from strop.sandbox import verify_process
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.supervisor.processes import Ended
from strop.sandbox.verify_process import ProcessVerifier, VerifyChild

EQUAL, TIMEOUT, UNREADABLE, INTERNAL = PairVerdict.EQUAL, PairVerdict.TIMEOUT, PairVerdict.UNREADABLE, PairVerdict.INTERNAL
RIGHT = ("p - q", "-q + p")
HANGS = ("3", "9^{9^{9^9}}")


@pytest.mark.parametrize("hang", ["9^{9^{9^9}}", "(x+1)^{5000}", "10^{10^{10}}"])
def test_a_pair_that_hangs_times_out_alone_and_costs_its_own_limit(hang):
    started = time.monotonic()
    assert judge(RIGHT) == [EQUAL]
    start_s = time.monotonic() - started
    started = time.monotonic()
    assert judge(RIGHT, ("3", hang), RIGHT, RIGHT, pair_wall_s=1.5) == [EQUAL, TIMEOUT, EQUAL, EQUAL]
    assert 1.5 < time.monotonic() - started < 2.5 + 4 * start_s  # two processes at first, and one after the hang


def test_a_verdict_is_given_when_it_is_known_not_when_its_request_is_complete():
    async def first():
        verifier = ProcessVerifier()
        verdicts = verifier.verify(request_of(RIGHT, HANGS, pair_wall_s=30.0))
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
        verifier = ProcessVerifier()
        verdicts = verifier.verify(request_of(RIGHT, HANGS, pair_wall_s=60.0))
        async for _ in verdicts:
            break
        await verdicts.aclose()
        pids = [process.pid for process in verifier._processes]
        await verifier.close()
        with pytest.raises(MachineError, match="was closed"):
            verifier.compare(*RIGHT, wall_s=1.0)
        return pids

    pids = asyncio.run(give_up())
    assert pids
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("signals", "pair", "wall_s", "expected"),
    [
        ([signal.SIGSEGV], HANGS, 60.0, UNREADABLE),
        ([signal.SIGKILL], RIGHT, 60.0, EQUAL),  # judged again
        ([signal.SIGKILL], HANGS, 5.0, TIMEOUT),
        ([signal.SIGKILL] * 2, HANGS, 60.0, INTERNAL),
    ],
)
def test_a_process_that_dies_is_replaced_and_its_pair_is_blamed_only_for_a_crash(signals, pair, wall_s, expected, monkeypatch):
    signals, asked = [*signals], set()

    def ask(process, *args, original=verify_process._Process.ask):
        asked.add(process.pid)
        return original(process, *args)

    monkeypatch.setattr(verify_process._Process, "ask", ask)

    async def run():
        verifier = ProcessVerifier(max_processes=1)
        try:
            assert await asyncio.to_thread(verifier.compare, *RIGHT, wall_s=60.0) is EQUAL
            if pair is RIGHT:
                os.kill(*asked, signals.pop())
            asked.clear()
            judging = asyncio.create_task(asyncio.to_thread(verifier.compare, *pair, wall_s=wall_s))
            while signals:
                await asyncio.sleep(0.2)
                if asked:
                    os.kill(asked.pop(), signals.pop())
            verdict = await judging
            assert await asyncio.to_thread(verifier.compare, *RIGHT, wall_s=60.0) is EQUAL
            return verdict
        finally:
            await verifier.close()

    assert asyncio.run(run()) is expected


class Scripted:
    """A child of a fork server that emits its lines once it has work, then hangs or ends."""

    def __init__(self, lines, *, hangs=False, crashes=False):
        self.output, self._writer = os.pipe2(os.O_NONBLOCK)
        self._lines, self._hangs = b"\x01" + b"".join(line + b"\n" for line in lines), hangs
        self._end = Ended(exit_code=None, signal=signal.SIGSEGV if crashes else signal.SIGKILL, cpu_s=0.0, peak_bytes=0)
        self.ended = None

    def give(self, work, on_end):
        self._on_end = on_end
        os.write(self._writer, self._lines)
        if not self._hangs:
            asyncio.get_running_loop().call_soon(self.kill)

    def kill(self):
        if self.ended is None:
            self.ended = self._end
            os.close(self._writer)
            self._on_end()

    def close(self):
        os.close(self.output)


def judged_by(*children, num_pairs=2, pair_wall_s=0.005):
    """The verdicts, when each (lines, keys) of `children` is one child; and the number of children that were started."""
    queue = iter(children)
    num_started = num_ended = 0

    def note_end():
        nonlocal num_ended
        num_ended += 1

    async def start_child():
        nonlocal num_started
        num_started += 1
        lines, keys = next(queue, ([], {}))
        return VerifyChild(Scripted(lines, **keys), note_end)

    async def run():
        request = request_of(*[RIGHT] * num_pairs, pair_wall_s=pair_wall_s)
        async with asyncio.timeout(10):
            return await in_order(verify_process.verify(start_child, request))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_process, "_START_S", 0.005)
        patch.setattr(verify_process, "_GRACE_S", 0.001)
        verdicts = asyncio.run(run())
    assert num_ended == num_started
    return verdicts, num_started


ALL = [b"start", b"0 equal", b"1 equal"]


@pytest.mark.parametrize(
    ("children", "expected"),
    [
        ([(ALL, {})], [EQUAL, EQUAL]),
        ([(ALL[:1], {}), (ALL, {})], [EQUAL, EQUAL]),  # lost once
        ([(ALL[:2], {}), (ALL[:2], {})], [EQUAL, EQUAL]),
        ([(ALL[:1], {}), (ALL[:1], {}), (ALL[:2], {})], [INTERNAL, EQUAL]),  # lost twice on one pair
        ([([], {}), ([], {})], [INTERNAL, INTERNAL]),  # does not start: a third child is not tried
        ([(ALL[:1], {"crashes": True}), (ALL[:2], {})], [UNREADABLE, EQUAL]),
        ([(ALL[:1], {"hangs": True}), (ALL[:2], {})], [TIMEOUT, EQUAL]),
        ([(ALL[:2], {"hangs": True})], [EQUAL, TIMEOUT]),
    ],
)
def test_pairs_of_a_child_that_is_lost_are_judged_by_another(children, expected):
    assert judged_by(*children) == (expected, len(children))


LINES = st.one_of(
    st.sampled_from([b"start", b"0 equal", b"1 equal", b"0 unequal", b"2 unreadable", b"", b"0 equal\xff", b"-1 equal", b"0"]),
    st.binary(max_size=12),
)
CHILDREN = st.tuples(st.lists(LINES, max_size=5), st.fixed_dictionaries({"hangs": st.booleans(), "crashes": st.booleans()}))


@settings(max_examples=150, deadline=None)
@given(num_pairs=st.integers(1, 5), children=st.lists(CHILDREN, max_size=8))
def test_every_pair_is_answered_once_whatever_children_emit(num_pairs, children):
    assert len(judged_by(*children, num_pairs=num_pairs)[0]) == num_pairs


def test_a_verdict_that_came_while_the_supervisor_was_suspended_counts():
    assert judged_by((ALL, {}), pair_wall_s=0.0) == ([EQUAL, EQUAL], 1)


def test_children_that_cannot_be_started_are_our_fault():
    async def start_child():
        raise MachineError("no child today")

    async def run():
        return await in_order(verify_process.verify(start_child, request_of(RIGHT, RIGHT)))

    with pytest.raises(MachineError, match="no child today"):
        asyncio.run(run())
