import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from strop.errors import MachineError
from strop.rewards.verifier import MathVerifier, Verdict


def verify(*pairs, deadline_s=20.0):
    """The verdict on each (gold, prediction), all by one verifier."""

    async def judge():
        verifier = MathVerifier(deadline_s=deadline_s)
        try:
            return [await verifier.verify(gold, prediction) for gold, prediction in pairs]
        finally:
            await verifier.close()

    return asyncio.run(judge())


def test_algebra_is_judged_by_meaning():
    right = [
        (r"\frac{1}{2}", "0.5"),
        ("p - q", "-q + p"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        ("72", r"72\text{ dollars}"),
        ("72", "x = 72"),
    ]
    wrong = [(r"\frac{1}{2}", "0.51"), ("p - q", "q - p"), ("72", r"x = 73"), ("72", "72 or 73"), ("72", r"\text{seventy}")]
    assert verify(*right) == [Verdict.CORRECT] * len(right)
    assert not any(verdict.is_correct for verdict in verify(*wrong))


def test_gold_comes_first_for_the_judge_is_not_symmetric():
    assert [verdict.is_correct for verdict in verify(("1 < x < 2", "(1, 2)"), ("(1, 2)", "1 < x < 2"))] == [True, False]


def test_plain_numbers_never_start_the_child():
    async def judge():
        verifier = MathVerifier()
        verdicts = [await verifier.verify("1,072", "1072.0"), await verifier.verify("1072", "1073")]
        return verdicts, verifier._child

    assert asyncio.run(judge()) == ([Verdict.EXACT, Verdict.WRONG], None)


def test_the_trainers_process_never_imports_the_judge():
    code = "import sys, strop.rewards; sys.exit(any(name in sys.modules for name in ('math_verify', 'sympy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pair_that_hangs_the_judge_is_a_timeout_and_the_next_pair_is_judged():
    verdicts = verify(("3", "10^{10^{10^{10}}}"), ("p - q", "-q + p"), deadline_s=2.0)
    assert verdicts == [Verdict.TIMEOUT, Verdict.CORRECT]
    assert not Verdict.TIMEOUT.is_correct


def test_a_prediction_of_ten_thousand_characters_is_not_read():
    assert verify(("3", "x" * 10_001)) == [Verdict.UNREADABLE]


async def _kill(child):
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()


def test_a_lost_child_is_replaced_and_its_pair_judged_again():
    async def judge():
        verifier = MathVerifier(deadline_s=20.0)
        try:
            await verifier.verify("p - q", "-q + p")
            first = verifier._child
            await _kill(first)
            return await verifier.verify("p - q", "-q + p"), verifier._child is not first
        finally:
            await verifier.close()

    assert asyncio.run(judge()) == (Verdict.CORRECT, True)


def test_a_judge_that_cannot_be_started_is_our_fault(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="ended before its first pair"):
        verify(("p - q", "-q + p"))


def test_a_question_given_up_does_not_answer_the_next_one():
    async def judge():
        verifier = MathVerifier(deadline_s=20.0)
        try:
            await verifier.verify("p - q", "-q + p")  # the child is up
            question = asyncio.ensure_future(verifier.verify("a + b", "b + a"))
            await asyncio.sleep(0)
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)
            return await verifier.verify("p - q", "q - p")
        finally:
            await verifier.close()

    assert asyncio.run(judge()) is Verdict.WRONG


def test_no_child_outlives_close():
    async def judge():
        verifier = MathVerifier(deadline_s=20.0)
        await verifier.verify("p - q", "-q + p")
        child = verifier._child
        await verifier.close()
        await verifier.close()
        return child.returncode

    assert asyncio.run(judge()) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the child on Linux; elsewhere the end of stdin does")
def test_a_child_that_computes_ends_when_its_parent_is_killed():
    code = """
import asyncio
from strop.rewards import MathVerifier

async def main():
    verifier = MathVerifier(deadline_s=60.0)
    await verifier.verify("p", "q")
    print(verifier._child.pid, flush=True)
    await verifier.verify("3", "10^{10^{10^{10}}}")

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
