import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.errors import MachineError
from strop.rewards.math import MathVerifier
from strop.rewards.r1_zero import question_only_reward_fn
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.verify_process import ProcessVerifier


def verify(*pairs, deadline_s=20.0, service=None, is_fused=False):
    """The verdict on each (gold, prediction), all asked at once."""

    async def judge():
        verifier = MathVerifier(service, deadline_s=deadline_s)
        try:
            return await asyncio.gather(*(verifier.verify(gold, prediction, is_fused=is_fused) for gold, prediction in pairs))
        finally:
            await verifier.close()

    return asyncio.run(judge())


@pytest.fixture(scope="module")
def ask():
    """Verdicts of one verifier, whose process takes seconds to start."""
    verifier = MathVerifier(deadline_s=20.0)

    def verdicts(*pairs, is_fused=False):
        async def judge():
            return await asyncio.gather(*(verifier.verify(*pair, is_fused=is_fused) for pair in pairs))

        return runner.run(judge())

    with asyncio.Runner() as runner:
        verdicts.can_read = lambda gold: runner.run(verifier.can_read(gold))
        yield verdicts
        runner.run(verifier.close())


def test_algebra_is_judged_by_meaning(ask):
    right = [
        (r"\frac{\sqrt{4}}{4}", "0.5"),
        ("p - q", "-q + p"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ]
    spelled = [(r"\frac{1}{2}", "0.5"), ("72", r"72\text{ dollars}"), ("72", "x = 72")]
    wrong = [(r"\frac{1}{2}", "0.51"), ("p - q", "q - p"), ("72", r"x = 73"), ("72", "72 or 73"), ("72", r"\text{seventy}")]
    assert ask(*right) == [PairVerdict.EQUAL] * len(right)
    assert ask(*spelled) == [PairVerdict.EQUAL] * len(spelled)
    assert not any(verdict is PairVerdict.EQUAL for verdict in ask(*wrong))


def test_gold_comes_first_for_the_judge_is_not_symmetric(ask):
    assert [verdict is PairVerdict.EQUAL for verdict in ask(("1 < x < 2", "(1, 2)"), ("(1, 2)", "1 < x < 2"))] == [True, False]


class Broken:
    """A service that says what it is told to."""

    def __init__(self, *verdicts, error=None):
        self.verdicts, self.error = verdicts, error
        self.requests = []

    async def verify(self, request):
        self.requests.append(request)
        for index, verdict in enumerate(self.verdicts):
            yield index, verdict
        if self.error is not None:
            raise self.error


def test_plain_numbers_are_never_asked_of_the_service():
    service = Broken()
    assert verify(("1,072", "1072.0"), ("1072", "1073"), service=service) == [PairVerdict.EQUAL, PairVerdict.UNEQUAL]
    assert service.requests == []


def test_the_trainers_process_never_imports_the_judge():
    code = "import sys, strop.rewards; sys.exit(any(name in sys.modules for name in ('math_verify', 'sympy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pair_that_hangs_the_judge_is_a_timeout_and_the_others_are_judged():
    verdicts = verify(("p - q", "-q + p"), ("3", "10^{10^{10^{10}}}"), ("a + b", "b + a"), deadline_s=1.5)
    assert verdicts == [PairVerdict.EQUAL, PairVerdict.TIMEOUT, PairVerdict.EQUAL]


def test_a_prediction_of_ten_thousand_characters_is_not_read():
    assert verify(("3", "x" * 10_001)) == [PairVerdict.UNREADABLE]


BY_TEXT_AND_SYMPY = [(r"\text{North-East}", "north-east"), (r"2x+1\%", "1+2x")]  # text; sympy
BY_MATH_VERIFY = [("1 < x < 2", "(1, 2)"), (r"\{1,2\}", r"\{2, 1\}")]
BY_BOTH = [("p - q", "-q + p"), (r"\frac{\sqrt{4}}{4}", "0.5"), ("72", "72.0")]
BY_NEITHER = [("p - q", "q - p"), (r"\frac{1}{2}", "0.51"), ("52_8", "52_9"), ("72", "x = 73"), (r"\text{north}", "south")]


def test_fused_either_of_two_graders_will_do(ask):
    pairs = [*BY_TEXT_AND_SYMPY, *BY_MATH_VERIFY, *BY_BOTH, *BY_NEITHER]
    first = [question_only_reward_fn(rf"\boxed{{{answer}}}", gold)["reward"] == 1 for gold, answer in pairs]
    second = [verdict is PairVerdict.EQUAL for verdict in ask(*pairs)]
    assert first == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 5
    assert second == [False] * 2 + [True] * 2 + [True] * 3 + [False] * 5
    either = [verdict is PairVerdict.EQUAL for verdict in ask(*pairs, is_fused=True)]
    assert either == [True] * 7 + [False] * 5


def test_fused_a_pair_is_asked_of_sympy_in_its_normal_form_and_of_math_verify_as_it_is():
    service = Broken(PairVerdict.EQUAL)
    assert verify((r"( 2x, \dfrac{1}{3} )", r"(x + x, 0.3)"), service=service, is_fused=True) == [PairVerdict.EQUAL]
    [[pair]] = [request.pairs for request in service.requests]
    assert (pair.gold, pair.answer) == (r"( 2x, \dfrac{1}{3} )", r"(x + x, 0.3)")
    assert pair.differences == (("2x", "x+x"), (r"\frac{1}{3}", "0.3"))


@pytest.mark.parametrize(
    "answer",
    [
        r"\sqrt{4}",  # an integer has to be written as one
        "(2, 3)",  # as many elements, in the same brackets
        "two",  # letters that nobody multiplies
        "2" * 9_000,  # too long for it
    ],
)
def test_fused_what_the_rules_of_the_first_grader_refuse_is_asked_of_math_verify_alone(answer):
    service = Broken(PairVerdict.UNEQUAL)
    assert verify(("2", answer), service=service, is_fused=True) == [PairVerdict.UNEQUAL]
    assert [(pair.gold, pair.answer) for request in service.requests for pair in request.pairs] == [("2", answer)]


def test_fused_a_pair_that_hangs_either_grader_is_a_timeout_within_one_limit():
    assert verify(("3", "9^{9^{9^9}}"), ("2x", "x + 9^{9^{9^9}}"), is_fused=True, deadline_s=1.0) == [PairVerdict.TIMEOUT] * 2


def test_questions_asked_together_are_one_request():
    async def judge():
        service = Counting()
        verifier = MathVerifier(service)
        pairs = [(f"a + {number}", f"{number + number % 2} + a") for number in range(40)]
        try:
            verdicts = await asyncio.gather(*(verifier.verify(*pair) for pair in pairs))
        finally:
            await verifier.close()
            await service.close()
        return verdicts, service.num_pairs

    verdicts, num_pairs = asyncio.run(judge())
    assert verdicts == [PairVerdict.EQUAL, PairVerdict.UNEQUAL] * 20
    assert num_pairs == [40]


class Counting(ProcessVerifier):
    def __init__(self):
        super().__init__()
        self.num_pairs = []

    def verify(self, request):
        self.num_pairs.append(len(request.pairs))
        return super().verify(request)


@pytest.mark.parametrize(
    ("service", "message"),
    [
        (Broken(PairVerdict.INTERNAL), "failed twice on one pair"),
        (Broken(), "did not judge every pair"),
        (Broken(error=MachineError("the service is gone")), "the service is gone"),
    ],
    ids=["internal", "silent", "lost"],
)
def test_a_judge_that_fails_is_our_fault_and_no_verdict(service, message):
    with pytest.raises(MachineError, match=message):
        verify(("p - q", "-q + p"), service=service)


def test_verdicts_that_came_before_a_service_was_lost_stand():
    async def judge():
        verifier = MathVerifier(Broken(PairVerdict.EQUAL, error=MachineError("the service is gone")))
        return await asyncio.gather(verifier.verify("a", "b"), verifier.verify("c", "d"), return_exceptions=True)

    first, second = asyncio.run(judge())
    assert first is PairVerdict.EQUAL
    assert isinstance(second, MachineError)


def test_a_judge_that_cannot_be_started_is_our_fault(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MachineError, match="did not start"):
        verify(("p - q", "-q + p"))


def test_a_question_given_up_does_not_answer_the_next_one():
    async def judge():
        verifier = MathVerifier(deadline_s=20.0)
        try:
            await verifier.verify("p - q", "-q + p")  # a process is up
            question = asyncio.ensure_future(verifier.verify("a + b", "b + a"))
            await asyncio.sleep(0)
            question.cancel()
            await asyncio.gather(question, return_exceptions=True)
            return await verifier.verify("p - q", "q - p")
        finally:
            await verifier.close()

    assert asyncio.run(judge()) is PairVerdict.UNEQUAL


def test_closing_ends_the_questions_that_wait_and_the_processes_that_compute():
    async def judge():
        verifier = MathVerifier(deadline_s=60.0)
        await verifier.verify("p - q", "-q + p")
        (process,) = verifier._own._processes
        question = asyncio.ensure_future(verifier.verify("3", "10^{10^{10^{10}}}"))
        await asyncio.sleep(0.2)
        assert is_running(process.pid)
        await verifier.close()
        await verifier.close()
        (error,) = await asyncio.gather(question, return_exceptions=True)
        return error, process.pid

    error, pid = asyncio.run(judge())
    assert isinstance(error, MachineError)
    assert not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the process on Linux; elsewhere the end of stdin does")
def test_a_process_that_computes_ends_when_its_parent_is_killed():
    code = """
import asyncio
from strop.rewards.math import MathVerifier

async def main():
    verifier = MathVerifier(deadline_s=60.0)
    await verifier.verify("p", "q")
    print(*(process.pid for process in verifier._own._processes), flush=True)
    await verifier.verify("3", "10^{10^{10^{10}}}")

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.1)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("gold", ["??", "!", "", "()", r"$\frac{$", r"\frac{1}{2", "1}{2", r"\{1, 2\}}"])
def test_a_gold_that_says_nothing_or_groups_nothing_is_unreadable_before_any_process_is_asked(gold):
    service = Broken()
    assert not asyncio.run(MathVerifier(service).can_read(gold))
    assert service.requests == []


@pytest.mark.parametrize(
    "gold", ["72", "north", r"\text{Evelyn}", "x + 1", r"\frac{1}{2}", r"\{1, 2\}", "(-∞, 2]", "∅", r"\{ \}"]
)
def test_mathematics_and_prose_are_readable(ask, gold):
    assert ask.can_read(gold)
