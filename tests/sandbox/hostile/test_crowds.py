"""Hostile programs in numbers, and at the end of the service itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strop.sandbox import IsolationLevel, RunResult, Sandbox, SandboxConfig

from .case import CONFINED, NAMESPACES, Case, kind_of
from .cases import CASES
from .host import processes

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

_ONE_OF_EACH_CLASS = (
    *("echo-unicode", "stdin-eof", "only-comments", "stdin-lines", "stderr-only", "tabs-and-spaces", "recursion", "sleep"),
    *("big-pow", "daemonize", "segfault", "flood", "mem-list", "fake-timeout-text", "source-over-limit", "exit-code-negative"),
)


@pytest.fixture(params=[NAMESPACES, CONFINED])
def crowded(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level: IsolationLevel = request.param
    with Sandbox(config=SandboxConfig(level=level, min_level=level)) as box:
        yield box


def run(box: Sandbox, case: Case) -> RunResult:
    return box.run(case.code.replace("HOST_MARK", "'crowd'"), stdin=case.stdin, wall_s=case.wall_s, memory_mib=case.memory_mib)


def test_sixty_four_calls_of_every_class_at_once_get_each_its_own_answer(crowded: Sandbox) -> None:
    cases = [CASES[name] for name in _ONE_OF_EACH_CLASS * 4]
    with ThreadPoolExecutor(len(cases)) as threads:
        results = list(threads.map(lambda case: run(crowded, case), cases))
    wrong = [
        (case.name, kind_of(result), result.text[:200])
        for case, result in zip(cases, results, strict=True)
        if not any(answer.fits(result) for answer in case.answers_at(result.level))
    ]
    assert wrong == []


def test_two_hundred_endless_loops_do_not_keep_two_hundred_prints_waiting(crowded: Sandbox) -> None:
    """A loop holds its slot for its limit, so the last print waits for about loops x limit / slots, and no more."""
    limit_s = 0.1
    with ThreadPoolExecutor(400) as threads:
        started_at = time.perf_counter()
        loops = [threads.submit(crowded.run, "while True: pass", wall_s=limit_s) for _ in range(200)]
        prints = [threads.submit(crowded.run, f"print({n})") for n in range(200)]
        assert [call.result().text for call in prints] == [f"{n}\n" for n in range(200)]
        assert {call.result().outcome.value for call in loops} == {"timeout"}
        took_s = time.perf_counter() - started_at
    num_slots = SandboxConfig().max_running
    assert took_s < 3 * (200 * limit_s / num_slots + 200 * 0.01)
    assert max(call.result().timings.run_s for call in loops) < limit_s + 0.5 + 1.5


_UNCLEAN = '''
import os, sys, threading, time
from strop.sandbox import IsolationLevel, Sandbox, SandboxConfig
level = IsolationLevel(sys.argv[1])
box = Sandbox(config=SandboxConfig(level=level, min_level=level))
code = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b'strop-unclean', 0, 0, 0)
os.fork()
open('f', 'w').write('x')
time.sleep(60)
"""
for _ in range(3): threading.Thread(target=box.run, args=(code,), kwargs={"wall_s": 60.0}, daemon=True).start()
time.sleep(1)
print("running", flush=True)
time.sleep(60)
'''


@pytest.mark.parametrize("level", [NAMESPACES, CONFINED])
def test_a_service_that_is_killed_takes_its_programs_with_it_and_the_next_one_starts_clean(level: IsolationLevel) -> None:
    def survivors() -> list[int]:
        return [process.pid for process in processes() if process.name == "strop-unclean" and not process.is_zombie]

    with subprocess.Popen([sys.executable, "-c", _UNCLEAN, level.value], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"running\n"
        assert len(survivors()) == 6
        service.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survivors() == []
    with Sandbox(config=SandboxConfig(level=level, min_level=level)) as box:
        assert box.run("6 * 7").text == "42"


def test_an_answer_that_attacks_its_judge_is_only_a_wrong_answer(box: Sandbox, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    attacks = [
        f"\\boxed{{__import__('os').system('touch {planted}')}}",
        f"\\boxed{{open('{planted}', 'w')}}",
        "\\boxed{(lambda: (1).__class__.__base__.__subclasses__())()}",
        "\\boxed{" + "{" * 10_000 + "42" + "}" * 10_000 + "}",
        "\\boxed{" + "\\frac{1}{" * 2_000 + "2" + "}" * 2_000 + "}",
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{(x+1)^{50000}}",
        "\\boxed{\\input{/etc/passwd}}",
        "$" * 50_000,
        "\0\x1b[2J\u202e",
    ]
    verdicts = box.verify([("42", attack) for attack in attacks] + [("42", "\\boxed{42}")], pair_wall_s=1.0)
    assert [verdict.value for verdict in verdicts[:-1] if verdict.value in ("equal", "internal")] == []
    assert verdicts[-1].value == "equal"
    assert not planted.exists()
