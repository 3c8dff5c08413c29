"""Programs against tests of what they print, on the real sandbox."""

import asyncio

import pytest

from faulty_sandbox import FaultySandbox
from strop.errors import MachineError
from strop.sandbox import LocalSandbox, RunOutcome, SandboxConfig, ScriptedSandbox, scripted_result
from strop.sandbox.code_tests import CaseOutcome, CodeTest, first_difference, run_tests

PASSED, WRONG, NOT_RUN = CaseOutcome.PASSED, CaseOutcome.WRONG_OUTPUT, CaseOutcome.NOT_RUN
SQUARES = [CodeTest(stdin=f"{number}\n", expected=f"{number * number}\n") for number in range(1, 6)]


@pytest.fixture(scope="module")
def run():
    """Runs tests on one sandbox: it takes a second to start."""
    with asyncio.Runner() as runner:
        sandbox = LocalSandbox(SandboxConfig(max_running=4))
        yield lambda code, tests, **options: runner.run(run_tests(sandbox, code, tests, **options))
        runner.run(sandbox.close())


def outcomes(report):
    return [case.outcome for case in report.cases]


def test_a_right_program_passes_every_test(run):
    report = run("print(int(input()) ** 2)", SQUARES)
    assert outcomes(report) == [PASSED] * 5
    assert report.is_passed
    assert report.passed_share == 1.0


def test_tests_after_the_first_failure_are_not_run(run):
    code = "n = int(input())\nprint(n * n if n != 3 else 0)"
    report = run(code, SQUARES)
    assert outcomes(report) == [PASSED, PASSED, WRONG, NOT_RUN, NOT_RUN]
    assert report.cases[2].why == "line 1: expected '9', got '0'"
    assert (report.num_passed, report.passed_share, report.is_passed) == (2, 0.4, False)
    assert outcomes(run(code, SQUARES, stop_at_first_failure=False)) == [PASSED, PASSED, WRONG, PASSED, PASSED]


@pytest.mark.parametrize(
    ("code", "outcome", "why"),
    [
        ("print(1 / 0)", CaseOutcome.ERROR, "ZeroDivisionError: division by zero"),
        ("print(1); raise SystemExit(3)", CaseOutcome.ERROR, "The program exited with code 3."),
        ("while True: pass", CaseOutcome.TIMEOUT, ""),
        ("while True: print('1' * 10_000)", CaseOutcome.KILLED, "output"),
        ("int(input()) ** 2", WRONG, "line 1: expected '1', got the end of the output"),  # an echo is no output
        ("x = 1", WRONG, "line 1: expected '1', got the end of the output"),
        ("print(1, 2)", WRONG, "line 1: expected '1', got '1 2'"),
        ("x = '\0'", CaseOutcome.REJECTED, "the code holds a NUL character"),
    ],
)
def test_what_a_program_does_instead_is_told(run, code, outcome, why):
    (case,) = run(code, SQUARES[:1], wall_s=0.5).cases
    assert (case.outcome, case.why) == (outcome, why)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint('warming up', file=sys.stderr)\nprint(int(input()) ** 2)",
        "import os\nos.write(2, b'from below')\nprint(int(input()) ** 2)",
        "import warnings\nwarnings.warn('careful')\nprint(int(input()) ** 2)",
        '"""Squares."""\r\nfrom __future__ import annotations; import sys\r\nsys.stderr.write("!")\r\nprint(int(input()) ** 2)',
        "\ufeffimport sys\nsys.stderr.write('!')\nprint(int(input()) ** 2)",
    ],
)
def test_output_to_stderr_does_not_matter(run, code):
    assert run(code, SQUARES[:2]).is_passed


def test_a_prelude_runs_before_the_program_and_its_function(run):
    prelude = "from collections import *; import sys; sys.setrecursionlimit(30_000)"
    program = "def depth(n):\n    return n and 1 + depth(n - 1)\n\nprint(depth(20_000), Counter('aa')['a'])"
    assert run(program, [CodeTest(stdin="", expected="20000 2")], prelude=prelude).is_passed
    function = "def f():\n    return Counter('aa')['a']"
    assert run(function, [CodeTest(stdin="[]", expected="2")], function="f", prelude=prelude).is_passed


CALLS = [CodeTest(stdin="[2, [3, 4]]", expected="[6, 8]"), CodeTest(stdin='[1, ["a"]]', expected='["a"]')]
TIMES = "def times(n, values):\n    return [n * each for each in values]\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (TIMES, [PASSED, PASSED]),
        (
            "class Solution:\n" + "".join(f"    {line}\n" for line in TIMES.replace("(n", "(self, n").splitlines()),
            [PASSED, PASSED],
        ),
        (TIMES + "print('[6, 8]', end='')", [PASSED, PASSED]),  # what else it prints does not matter
        (TIMES.replace("[n *", "tuple(n *").replace("values]", "values)"), [PASSED, PASSED]),
        ("def times(n: int, values: List[int]) -> List[int]:\n    return [n * each for each in values]", [PASSED, PASSED]),
        (
            "from __future__ import annotations\nimport dataclasses\n\n@dataclasses.dataclass\nclass Two:\n    n: int\n\n"
            + TIMES,
            [PASSED, PASSED],
        ),
        (TIMES + "if __name__ == '__main__':\n    print(int(input()))", [PASSED, PASSED]),
        ("def times(n, values):\n    return [6, 8]", [PASSED, WRONG]),
        ("def times(n, values):\n    print([6, 8])", [WRONG, WRONG]),
        ("def other(n, values):\n    return [6, 8]", [CaseOutcome.ERROR, CaseOutcome.ERROR]),
        ("print('[6, 8]')\nraise SystemExit", [PASSED, WRONG]),
    ],
)
def test_a_function_is_called_with_the_arguments_of_each_test(run, code, expected):
    assert outcomes(run(code, CALLS, function="times", stop_at_first_failure=False)) == expected


@pytest.mark.parametrize(
    ("value", "is_passed"), [("3", True), ("[3]", True), ("[3, 4]", False), ("[[3]]", False), ("3.0000000000001", True)]
)
def test_a_value_also_passes_as_the_only_one_of_a_list(run, value, is_passed):
    assert run("def f():\n    return 3", [CodeTest(stdin="[]", expected=value)], function="f").is_passed == is_passed


@pytest.mark.parametrize(
    ("expected", "printed", "difference"),
    [
        ("1\n2\n", "1\n2\n", ""),
        ("1\n2", "1\n2\n", ""),
        ("1\n2\n", "1  \r\n2\t\n\n", ""),  # whitespace at the end of lines, empty lines at the end
        ("", "", ""),
        ("1\n2\n", "1\n", "line 2: expected '2', got the end of the output"),
        ("1\n", "1\n2\n", "line 2: expected the end of the output, got '2'"),
        ("", "1", "line 1: expected the end of the output, got '1'"),
        ("1\n2\n", "1\n\n2\n", "line 2: expected '2', got ''"),
        ("1", " 1", "line 1: expected '1', got ' 1'"),
        ("1.0", "1", "line 1: expected '1.0', got '1'"),
        ("a\nb\nc", "a\nB\nC", "line 2: expected 'b', got 'B'"),
        ("x" * 99, "y", f"line 1: expected '{'x' * 76}..., got 'y'"),
    ],
)
def test_the_first_line_that_differs_is_named(expected, printed, difference):
    assert first_difference(expected, printed) == difference


def test_a_long_output_is_compared_to_its_end(run):
    expected = "".join(f"{number}\n" for number in range(60_000))
    test = CodeTest(stdin="", expected=expected)
    assert run("for n in range(60_000): print(n)", [test]).is_passed
    (case,) = run("for n in range(60_000): print(n if n != 59_998 else 0)", [test]).cases
    assert case.why == "line 59999: expected '59998', got '0'"


def test_the_report_does_not_depend_on_which_run_ends_first():
    async def judge(latency_s):
        async def answer_late(request):
            await asyncio.sleep(latency_s[request.stdin])
            return scripted_result("wrong")

        class Late(ScriptedSandbox):
            async def run(self, request):
                return await answer_late(request)

        tests = [CodeTest(stdin=name, expected="right") for name in "abc"]
        return await run_tests(Late(answer={}), "", tests)

    for latency_s in ({"a": 0.03, "b": 0.0, "c": 0.01}, {"a": 0.0, "b": 0.01, "c": 0.02}):
        assert outcomes(asyncio.run(judge(latency_s))) == [WRONG, NOT_RUN, NOT_RUN]


ODD, EVEN, ANY = (frozenset(names.split()) for names in ("odd", "even", "odd even"))


def stopping(right, **options):
    """What became of the tests of a program that knows only the squares of `right`, and the inputs that it was started with."""
    sandbox = ScriptedSandbox(answer=lambda request: str(int(request.stdin) ** 2 * (request.stdin.strip() in right)))
    report = asyncio.run(run_tests(sandbox, "", SQUARES, **options))
    return outcomes(report), "".join(request.stdin.strip() for request in sandbox.requests)


def test_tests_after_the_first_failed_one_do_not_count():
    assert stopping("1345") == ([PASSED, WRONG, NOT_RUN, NOT_RUN, NOT_RUN], "12345")
    assert stopping("1345", stop_at_first_failure=False) == ([PASSED, WRONG, PASSED, PASSED, PASSED], "12345")


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ("12345", [PASSED, PASSED, PASSED, PASSED, PASSED]),
        ("2345", [WRONG, PASSED, NOT_RUN, PASSED, NOT_RUN]),  # 1 ends what is only odd
        ("145", [PASSED, WRONG, WRONG, NOT_RUN, NOT_RUN]),  # 2 ends what is only even, 3 the rest
        ("1245", [PASSED, PASSED, WRONG, PASSED, NOT_RUN]),
        ("", [WRONG, WRONG, NOT_RUN, NOT_RUN, NOT_RUN]),
    ],
)
def test_a_test_is_left_out_where_all_its_subtasks_have_failed(right, expected):
    assert stopping(right, subtasks=[ODD, EVEN, ODD, EVEN, ODD])[0] == expected


def test_a_test_of_two_subtasks_runs_while_one_of_them_may_pass():
    outcomes, _ = stopping("2345", subtasks=[ODD, EVEN, ANY, EVEN, ODD])
    assert outcomes == [WRONG, PASSED, PASSED, PASSED, NOT_RUN]


@pytest.mark.parametrize("outcome", [RunOutcome.OVERLOADED, RunOutcome.INTERNAL])
def test_our_faults_are_no_failed_test(outcome):
    sandbox = ScriptedSandbox(answer=lambda _: scripted_result("", outcome, reason="as scripted"))
    with pytest.raises(MachineError, match="as scripted"):
        asyncio.run(run_tests(sandbox, "", SQUARES))
    with pytest.raises(MachineError, match="died after 2 requests"):
        asyncio.run(run_tests(FaultySandbox(answer=lambda request: str(int(request.stdin) ** 2), dies_after=2), "", SQUARES))


def test_no_test_is_no_proof():
    report = asyncio.run(run_tests(ScriptedSandbox(answer={}), "print(1)", []))
    assert not report.is_passed
    assert report.passed_share == 0.0
