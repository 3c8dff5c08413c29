"""Runs a program against tests of what it must print for what it is given.

Output is compared line by line, all of it: a missing line fails, and so does one too many. Whitespace at the end of a line and
empty lines at the end of the output are forgiven. All that the program printed counts, to stderr too; the echo of a last
expression does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import MachineError
from strop.sandbox.protocol import CodeRunner, RunOutcome, RunRequest, RunResult

_SPARE_OUTPUT_BYTES = 65_536  # beyond what is expected: for whitespace that is forgiven
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """What the program is given, and what it must print."""

    stdin: str
    expected: str


class CaseOutcome(StrEnum):
    """What became of one test. A fault of ours is none of these: it is raised."""

    PASSED = "passed"
    WRONG_OUTPUT = "wrong_output"
    ERROR = "error"
    TIMEOUT = "timeout"
    KILLED = "killed"
    REJECTED = "rejected"  # the program, or its input, is over a limit of the sandbox
    NOT_RUN = "not_run"  # earlier tests have settled what it counts for


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """`why` is for people and logs: it quotes what was expected, which the writer of the program must not see."""

    outcome: CaseOutcome
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTestReport:
    """One report for each test, in their order."""

    cases: tuple[CaseReport, ...]

    @property
    def num_passed(self) -> int:
        return sum(case.outcome is CaseOutcome.PASSED for case in self.cases)

    @property
    def passed_share(self) -> float:
        """Of all tests; one that was not run did not pass. 0 where there is no test."""
        return self.num_passed / max(1, len(self.cases))

    @property
    def is_passed(self) -> bool:
        """All of them; False where there is no test, since nothing was shown."""
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
    batch_size: int | None = None,
    concurrency: int = 8,
) -> CodeTestReport:
    """Run `code` once for each test. The report depends neither on which run happens to end first nor on batches.

    Args:
        wall_s, memory_mib: of each run.
        stop_at_first_failure: tests after the first, in their order, that fails are reported as not run.
        subtasks: of each test, those that it belongs to, at least one. A subtask fails with the first of its tests; then it is
            the tests all of whose subtasks have failed that are not run. None: all tests make one subtask.
        batch_size: so many tests, in their order, start together, and the next ones when these are done. None: each starts as
            soon as there is room.
        concurrency: runs at once.

    Raises:
        MachineError: the runner was lost, or failed, in a run that counts.
    """
    room = asyncio.Semaphore(concurrency)  # serves in the order of asking, so earlier tests start earlier

    async def run_one(test: CodeTest) -> CaseReport:
        request = RunRequest(
            code=code,
            stdin=test.stdin,
            wall_s=wall_s,
            memory_mib=memory_mib,
            output_bytes=4 * len(test.expected) + _SPARE_OUTPUT_BYTES,
        )
        async with room:
            return _judge(await runner.run(request), test.expected)

    of_tests = [frozenset({"all tests"})] * len(tests) if subtasks is None else subtasks
    failed: set[str] = set()

    def is_settled(index: int) -> bool:
        return stop_at_first_failure and failed.issuperset(of_tests[index])

    cases = [CaseReport(outcome=CaseOutcome.NOT_RUN)] * len(tests)
    waiting = list(range(len(tests)))
    while waiting:
        batch, waiting = waiting[:batch_size], waiting[batch_size:] if batch_size else []
        runs = {index: asyncio.create_task(run_one(tests[index])) for index in batch}
        try:
            for index, run in runs.items():
                if is_settled(index):
                    continue
                cases[index] = await run
                if cases[index].outcome is not CaseOutcome.PASSED:
                    failed |= of_tests[index]
                    for other, other_run in runs.items():
                        if is_settled(other):
                            other_run.cancel()  # it makes room for one that counts
        finally:
            for run in runs.values():
                run.cancel()
            await asyncio.gather(*runs.values(), return_exceptions=True)
        waiting = [index for index in waiting if not is_settled(index)]
    return CodeTestReport(cases=tuple(cases))


def first_difference(expected: str, printed: str) -> str:
    """Which line differs first, and how; empty when none does."""
    wanted, found = _lines(expected), _lines(printed)
    for number, (want, got) in enumerate(zip(wanted, found, strict=False), start=1):
        if want != got:
            return f"line {number}: expected {_shown(want)}, got {_shown(got)}"
    if len(wanted) > len(found):
        return f"line {len(found) + 1}: expected {_shown(wanted[len(found)])}, got the end of the output"
    if len(found) > len(wanted):
        return f"line {len(wanted) + 1}: expected the end of the output, got {_shown(found[len(wanted)])}"
    return ""


def _judge(result: RunResult, expected: str) -> CaseReport:
    match result.outcome:
        case RunOutcome.STDOUT | RunOutcome.ECHO | RunOutcome.EMPTY:
            printed = result.text if result.outcome is RunOutcome.STDOUT else ""
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


def _shown(line: str) -> str:
    return _cut(repr(line))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
