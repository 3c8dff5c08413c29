"""The runner itself: many calls at once, its own death, its end, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faulty_sandbox import FaultySandbox
from strop.errors import MachineError
from strop.sandbox import (
    LocalSandbox,
    RunOutcome,
    RunRequest,
    Sandbox,
    SandboxConfig,
    ScriptedSandbox,
    scripted_result,
)


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


async def settles_at(num_processes: int) -> bool:
    """Whether this process has so many descendants before a second is over: spare children come, and ended ones go."""
    for _ in range(100):
        if len(descendants(os.getpid())) == num_processes:
            return True
        await asyncio.sleep(0.01)
    return False


async def supervisor_of(name: str) -> int:
    """The process id of the sandbox's supervisor, once a program of this `name` runs under it."""
    for _ in range(500):
        found = {}
        for pid in descendants(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip(), Path(f"/proc/{pid}/cmdline").read_text()
        if any(comm == name for comm, _ in found.values()):
            return next(pid for pid, (_, line) in found.items() if "strop.sandbox.supervisor.node" in line)
        await asyncio.sleep(0.02)
    raise AssertionError("no program came to run")


async def settled() -> int:
    """How many descendants there are when no more spare children come."""
    await asyncio.sleep(0.3)
    return len(descendants(os.getpid()))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_fifty_calls_at_once_get_each_its_own_answer() -> None:
    async def play() -> None:
        async with LocalSandbox(SandboxConfig(max_running=8)) as box:
            requests = [RunRequest(code=f"print(input(), {number})", stdin=f"call {number}") for number in range(50)]
            results = await asyncio.gather(*map(box.run, requests))
            assert [result.text for result in results] == [f"call {number} {number}\n" for number in range(50)]

    asyncio.run(play())


def test_time_in_the_queue_is_reported_and_not_counted_against_the_limit() -> None:
    async def play() -> None:
        async with LocalSandbox(SandboxConfig(max_running=1, max_alive=1)) as box:
            slow = RunRequest(code="import time; time.sleep(0.3); print('done')", wall_s=0.8)
            results = await asyncio.gather(*(box.run(slow) for _ in range(4)))
            assert [result.outcome for result in results] == [RunOutcome.STDOUT] * 4
            assert max(result.timings.queue_s for result in results) > 0.8
            assert max(result.timings.run_s for result in results) < 0.8

    asyncio.run(play())


def test_a_loop_does_not_hold_up_the_calls_beside_it() -> None:
    async def play() -> None:
        async with LocalSandbox(SandboxConfig(max_running=4)) as box:
            loop = asyncio.create_task(box.run(RunRequest(code="while True: pass", wall_s=2.0)))
            for _ in range(5):
                assert (await box.run(RunRequest(code="1"))).text == "1"
            assert not loop.done()
            assert (await loop).outcome is RunOutcome.TIMEOUT

    asyncio.run(play())


def test_calls_in_flight_survive_the_death_of_the_fork_server() -> None:
    async def play() -> None:
        async with LocalSandbox(SandboxConfig(max_running=4)) as box:
            request = RunRequest(code="import time; time.sleep(0.3); print('done')")
            calls = [asyncio.create_task(box.run(request)) for _ in range(8)]
            await asyncio.sleep(0.15)
            os.kill(descendants(os.getpid())[0], signal.SIGKILL)
            assert [result.text for result in await asyncio.gather(*calls)] == ["done\n"] * 8

    asyncio.run(play())


def test_a_supervisor_that_keeps_dying_is_our_fault_and_not_the_programs() -> None:
    async def play() -> None:
        async with LocalSandbox() as box:
            code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'strop-doomed', 0, 0, 0); time.sleep(60)"
            call = asyncio.create_task(box.run(RunRequest(code=code, wall_s=60.0)))
            for _ in range(2):
                os.kill(await supervisor_of("strop-doomed"), signal.SIGKILL)
                await asyncio.sleep(0.2)
            result = await asyncio.wait_for(call, 30)
            assert result.outcome is RunOutcome.INTERNAL
            assert (await box.run(RunRequest(code="print(1)"))).text == "1\n"

    asyncio.run(play())


def test_a_cancelled_call_takes_its_program_with_it() -> None:
    async def play() -> None:
        async with LocalSandbox() as box:
            before = await settled()
            call = asyncio.create_task(box.run(RunRequest(code="while True: pass")))
            await asyncio.sleep(0.2)
            assert await settles_at(before + 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await settles_at(before)

    asyncio.run(play())


def test_a_call_cancelled_before_its_program_started_leaves_no_program() -> None:
    async def play() -> None:
        async with LocalSandbox(SandboxConfig(max_running=8)) as box:
            before = await settled(), num_descriptors()
            for num_turns in range(12):  # of the event loop: the call is then in another place each time
                call = asyncio.create_task(box.run(RunRequest(code="while True: pass", wall_s=60.0)))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            await box.run(RunRequest(code="1"))
            assert await settles_at(before[0])
            assert num_descriptors() == before[1]

    asyncio.run(play())


def test_addresses_do_not_depend_on_what_runs_at_the_same_time() -> None:
    async def play() -> None:
        texts = set()
        for _ in range(2):
            async with LocalSandbox(SandboxConfig(max_running=6)) as box:
                programs = ["object()", "1 / 0", "print('x' * 9999)", "import time; time.sleep(0.01)", "object()"]
                results = await asyncio.gather(*(box.run(RunRequest(code=programs[n % 5])) for n in range(100)))
                texts |= {result.text for result in results if result.text.startswith("<object")}
        assert len(texts) == 1

    asyncio.run(play())


def test_close_tells_the_threads_that_wait_for_an_answer() -> None:
    box = Sandbox()
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(box.run, "while True: pass", wall_s=60.0) for _ in range(3)]
        time.sleep(0.3)
        box.close()
        assert all("closed" in call.result(timeout=5).reason for call in calls)


def test_descriptors_and_processes_do_not_grow_with_calls() -> None:
    async def play() -> None:
        async with LocalSandbox() as box:
            programs = ["print(1)", "1 / 0", "import os; os.fork()", "import os; os._exit(3)", "while True: print('x' * 99999)"]
            await asyncio.gather(*(box.run(RunRequest(code=code)) for code in programs))
            before = await settled(), num_descriptors()
            for _ in range(12):
                await asyncio.gather(*(box.run(RunRequest(code=programs[n % 5], output_bytes=4096)) for n in range(25)))
            assert await settles_at(before[0])
            assert num_descriptors() == before[1]

    asyncio.run(play())


def test_close_leaves_nothing_behind_and_may_be_called_twice() -> None:
    descriptors, processes = num_descriptors(), descendants(os.getpid())
    box = Sandbox()
    box.run("print(1)")
    assert descendants(os.getpid()) != processes
    box.close()
    box.close()
    assert descendants(os.getpid()) == processes
    assert num_descriptors() == descriptors


def test_close_ends_the_calls_that_still_run() -> None:
    async def play() -> None:
        box = LocalSandbox()
        call = asyncio.create_task(box.run(RunRequest(code="while True: pass", wall_s=60.0)))
        await asyncio.sleep(0.3)
        await box.close()
        assert "closed" in (await call).reason
        with pytest.raises(MachineError, match="closed"):
            await box.run(RunRequest(code="1"))

    asyncio.run(play())


def test_a_scripted_sandbox_answers_from_its_script() -> None:
    box = ScriptedSandbox(answer={"1 + 1": "2", "1 / 0": scripted_result("ZeroDivisionError", RunOutcome.ERROR)})
    assert asyncio.run(box.run(RunRequest(code="1 + 1"))).text == "2"
    assert asyncio.run(box.run(RunRequest(code="1 / 0"))).outcome is RunOutcome.ERROR
    assert [request.code for request in box.requests] == ["1 + 1", "1 / 0"]


def test_a_scripted_sandbox_fails_the_same_requests_under_the_same_seed() -> None:
    async def faults(seed: int) -> list[bool]:
        box = FaultySandbox(answer=lambda request: request.code, fault_rate=0.5, max_latency_s=0.001, seed=seed)
        requests = [RunRequest(code=str(number)) for number in range(20)]
        results = await asyncio.gather(*map(box.run, requests), return_exceptions=True)
        return [isinstance(result, MachineError) for result in results]

    first = asyncio.run(faults(1))
    assert asyncio.run(faults(1)) == first
    assert asyncio.run(faults(2)) != first
    assert 0 < sum(first) < 20


def test_a_scripted_sandbox_dies_when_its_script_says_so() -> None:
    box = FaultySandbox(answer=lambda request: "ok", dies_after=1)
    assert asyncio.run(box.run(RunRequest(code="1"))).text == "ok"
    with pytest.raises(MachineError, match="died after 1 requests"):
        asyncio.run(box.run(RunRequest(code="1")))
