"""Runs a program against tests of its output for given inputs, or of the values that one of its functions returns.

The whole output is compared line by line: a missing line fails, and so does an extra one. Whitespace at the end of a line and
empty lines at the end of the output do not matter. Neither do output to stderr and the echo of a last expression.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from strop.errors import MachineError
from strop.sandbox.protocol import CodeRunner, RunOutcome, RunRequest, RunResult

_SPARE_OUTPUT_BYTES = 65_536  # beyond the expected output, for whitespace that does not matter
_MAX_SHOWN_CHARS = 80
_WITHOUT_STDERR = "import os as _os; _os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 2)"  # a sandbox has one stream for both
# Starter code of LeetCode has annotations without their imports; what is for a run as a program must not read the arguments.
_AS_MODULE = (
    "; import sys; sys.modules['tested'] = sys.modules[__name__]; __name__ = 'tested'; from typing import *;"  # for dataclasses
    " import collections, functools, heapq, itertools, math"
)
_CALL = """

def _call_tested_function(name):
    import json, sys
    function = globals().get(name) or getattr(Solution(), name)
    value = function(*json.load(sys.stdin))
    print()
    print(json.dumps(value, default=list))

_call_tested_function({name!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """The input of a program and the output that it must print; of a function, its arguments and its value, as JSON."""

    stdin: str
    expected: str


class CaseOutcome(StrEnum):
    """The outcome of one test. A fault of the sandbox is raised instead."""

    PASSED = "passed"
    WRONG_OUTPUT = "wrong_output"
    ERROR = "error"
    TIMEOUT = "timeout"
    KILLED = "killed"
    REJECTED = "rejected"  # the program or its input is over a limit of the sandbox
    NOT_RUN = "not_run"  # earlier tests have decided the result


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """The outcome of one test. `why` quotes the expected output, so the policy must not see it."""

    outcome: CaseOutcome
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTestReport:
    """One report for each test, in order."""

    cases: tuple[CaseReport, ...]

    @property
    def num_passed(self) -> int:
        return sum(case.outcome is CaseOutcome.PASSED for case in self.cases)

    @property
    def passed_share(self) -> float:
        """Share of all tests, including those that did not run. 0 if there is no test."""
        return self.num_passed / max(1, len(self.cases))

    @property
    def is_passed(self) -> bool:
        """Whether all tests passed; False if there is no test."""
        return bool(self.cases) and self.num_passed == len(self.cases)


async def run_tests(
    runner: CodeRunner,
    code: str,
    tests: Sequence[CodeTest],
    *,
    wall_s: float = 4.0,
    memory_mib: int = 512,
    stop_at_first_failure: bool = True,
    subtasks: Sequence[frozenset[str]] | None = None,
    function: str = "",
    prelude: str = "",
    concurrency: int = 8,
) -> CodeTestReport:
    """Run `code` once for each test. The report does not depend on which run ends first.

    Args:
        wall_s, memory_mib: limits of each run.
        stop_at_first_failure: tests after the first failed one are reported as not run.
        subtasks: the subtasks of each test, at least one. A subtask fails with the first of its tests; a test whose subtasks
            have all failed does not run. None: all tests are one subtask.
        function: the name of the function to call, or of a method of the program's class `Solution`; empty: the program's
            output is tested. What it prints does not matter. A value also passes if the expected one is a list of it.
        prelude: statements in one line that run before the program.
        concurrency: runs at once.

    Raises:
        MachineError: the runner was lost or failed in a run that counts.
    """
    start = _WITHOUT_STDERR + _AS_MODULE * bool(function) + f"; {prelude}" * bool(prelude)
    code = _begun_with(start, code) + (_CALL.format(name=function) if function else "")
    room = asyncio.Semaphore(concurrency)  # first come, first served, so earlier tests start earlier

    async def run_one(test: CodeTest) -> CaseReport:
        request = RunRequest(
            code=code,
            stdin=test.stdin,
            wall_s=wall_s,
            memory_mib=memory_mib,
            output_bytes=4 * len(test.expected) + _SPARE_OUTPUT_BYTES,
        )
        async with room:
            return _judge(await runner.run(request), test.expected, is_value=bool(function))

    of_tests = [frozenset({"all tests"})] * len(tests) if subtasks is None else subtasks
    failed: set[str] = set()

    def is_settled(index: int) -> bool:
        return stop_at_first_failure and failed.issuperset(of_tests[index])

    cases = [CaseReport(outcome=CaseOutcome.NOT_RUN)] * len(tests)
    runs = [asyncio.create_task(run_one(test)) for test in tests]
    try:
        for index, run in enumerate(runs):
            if is_settled(index):
                continue
            cases[index] = await run
            if cases[index].outcome is not CaseOutcome.PASSED:
                failed |= of_tests[index]
                for other, other_run in enumerate(runs):
                    if is_settled(other):
                        other_run.cancel()  # to make room for one that counts
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    return CodeTestReport(cases=tuple(cases))


def first_difference(expected: str, printed: str) -> str:
    """Describe the first line that differs; empty if none does."""
    for number, (want, got) in enumerate(zip_longest(_lines(expected), _lines(printed)), start=1):
        if want != got:
            return f"line {number}: expected {_shown(want)}, got {_shown(got)}"
    return ""


def _begun_with(start: str, code: str) -> str:
    """`code` after the line `start`, which comes behind imports from `__future__`: they must be first."""
    lines = code.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    num_before = 0
    if "__future__" in code:
        try:
            body = ast.parse("\n".join(lines)).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return code  # it fails as it is
        ends = [each.end_lineno for each in body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
        num_before = max((end or 0 for end in ends), default=0)
    return "\n".join([*lines[:num_before], start, *lines[num_before:]])


def _is_same_value(expected: str, printed: str) -> bool:
    try:
        value, wanted = json.loads(_lines(printed)[-1]), json.loads(expected)
    except (ValueError, IndexError, RecursionError):
        return False
    return _is_close(wanted, value) or _is_close(wanted, [value])


def _is_close(wanted: object, value: object) -> bool:
    if isinstance(wanted, list) and isinstance(value, list):
        return len(wanted) == len(value) and all(map(_is_close, wanted, value))
    if isinstance(wanted, float) and isinstance(value, float | int):
        return math.isclose(wanted, value, rel_tol=1e-9)
    return wanted == value


def _judge(result: RunResult, expected: str, *, is_value: bool) -> CaseReport:
    match result.outcome:
        case RunOutcome.STDOUT | RunOutcome.ECHO | RunOutcome.EMPTY:
            printed = result.text if result.outcome is RunOutcome.STDOUT else ""
            if is_value:
                why = "" if _is_same_value(expected, printed) else f"expected {_cut(expected)}, got {_cut(printed.strip())}"
            else:
                why = first_difference(expected, printed)
            return CaseReport(outcome=CaseOutcome.WRONG_OUTPUT if why else CaseOutcome.PASSED, why=why)
        case RunOutcome.ERROR:
            lines = _lines(result.text)
            return CaseReport(outcome=CaseOutcome.ERROR, why=_cut(lines[-1] if lines else f"exit code {result.exit_code}"))
        case RunOutcome.TIMEOUT | RunOutcome.KILLED | RunOutcome.REJECTED:
            return CaseReport(outcome=CaseOutcome(result.outcome.value), why=result.reason)
        case RunOutcome.OVERLOADED | RunOutcome.INTERNAL:
            raise MachineError(f"a code test could not be run: {result.outcome}: {result.reason}")


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _shown(line: str | None) -> str:
    return "the end of the output" if line is None else _cut(repr(line))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
