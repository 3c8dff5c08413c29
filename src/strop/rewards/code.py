"""Judges programs by tests of what they print."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from strop.errors import TaskError
from strop.rewards.answers import final_text
from strop.rewards.config import CodeRewardConfig
from strop.rewards.shaping import has_called
from strop.rewards.subtasks import read_subtasks, text_of_tests
from strop.rewards.sum_config import CodePart
from strop.sandbox.code_tests import CaseOutcome, CodeTest, run_tests
from strop.sandbox.protocol import CodeRunner
from strop.types import Task, Trajectory

SHARE_WEIGHT = 0.1  # of the share in `weighted_sum`, beside 1 for all tests; open-r1's `cf_scoring.py`

_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class CodeReward:
    """Parts: `accuracy` (all tests passed), `passed` (the share that did), `format` (a code block), `called` (a tool ran).

    Where `passed` has no weight the first failure ends the tests, and `passed` is the share that passed before it.

    Args:
        runner: where the programs run.
    """

    def __init__(self, config: CodeRewardConfig, runner: CodeRunner) -> None:
        self.config = config
        self._runner = runner

    async def __call__(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        tests = read_tests(task, fact=self.config.tests_fact)
        code = extract_code(trajectory)
        parts = {"accuracy": 0.0, "passed": 0.0, "format": float(code is not None), "called": float(has_called(trajectory))}
        if code is not None:
            report = await run_tests(
                self._runner,
                code,
                tests,
                wall_s=self.config.wall_s,
                memory_mib=self.config.memory_mib,
                stop_at_first_failure=not self.config.weights.get("passed"),
            )
            parts |= {"accuracy": float(report.is_passed), "passed": report.passed_share}
        return parts

    async def close(self) -> None:
        """Nothing to end: the runner belongs to whoever opened it."""


def code_part(part: CodePart, runner: CodeRunner) -> Callable[[Task, Trajectory], Awaitable[float]]:
    """What the tests of a rollout's program are worth to `part`: a function of a task and a rollout.

    The modes are those of huggingface/open-r1, `src/open_r1/rewards.py` and `src/open_r1/utils/competitive_programming`. Its
    `code` is `share`, its `binary_code` is `all`; its `cf_code` is `all` by pass_fail, `share` by partial and `weighted_sum` by
    that name, each with `no_code` = -1; its `ioi_code` is `subtasks` for a task that has one. Where we depart:

    - A line too few or too many fails a test; its `code` lets both pass.
    - A task without tests is refused, and a fault of the backend is raised; there they score None or 0.
    - The first failure of a batch ends what it settles; there the whole batch is awaited.

    Args:
        runner: where the programs run.
    """

    async def score(task: Task, trajectory: Trajectory) -> float:
        tests = read_tests(task, fact=part.tests_fact)
        subtasks = read_subtasks(task, fact=part.tests_fact) if part.score == "subtasks" else None
        code = extract_code(trajectory)
        if code is None:
            return part.no_code
        report = await run_tests(
            runner,
            code,
            tests,
            wall_s=part.wall_s,
            memory_mib=part.memory_mib,
            stop_at_first_failure=part.score in ("all", "subtasks"),
            subtasks=None if subtasks is None else subtasks.of_tests,
            batch_size=part.test_batch_size,
        )
        if subtasks is not None:
            return subtasks.score([case.outcome is CaseOutcome.PASSED for case in report.cases])
        if part.score == "share":
            return report.passed_share
        return float(report.is_passed) + (SHARE_WEIGHT * report.passed_share if part.score == "weighted_sum" else 0.0)

    return score


def extract_code(trajectory: Trajectory) -> str | None:
    """The last closed fenced block of the last turn; None when there is none, or the policy did not end the rollout itself."""
    blocks = _BLOCK.findall(final_text(trajectory) or "")
    return blocks[-1] if blocks else None


def read_tests(task: Task, *, fact: str | None) -> list[CodeTest]:
    """The tests in the task's answer, or in its `fact`, in one of three forms of JSON.

        [{"input": "3\\n", "output": "9\\n"}, ...]    {"inputs": ["3\\n", ...], "outputs": ["9\\n", ...]}
        {"tests": [{"input": "3\\n", "output": "9\\n", "subtasks": ["small"]}, ...], "points": {"small": 30}}

    Raises:
        TaskError: there is no such fact, or it holds no tests.
    """
    text, place = text_of_tests(task, fact=fact)
    try:
        tests = [CodeTest(stdin=stdin, expected=expected) for stdin, expected in _pairs(json.loads(text))]
    except (ValueError, KeyError, TypeError) as error:
        tests = []
        reason = f" ({type(error).__name__}: {error})"
    else:
        reason = ""
    if not tests:
        raise TaskError(
            f'task {task.id!r}: {place} holds no tests{reason}. Write JSON: [{{"input": "3\\n", "output": "9\\n"}}], or'
            ' {"inputs": [...], "outputs": [...]}.'
        )
    return tests


def _pairs(tree: Any) -> list[tuple[str, str]]:
    if isinstance(tree, dict) and "tests" not in tree:
        pairs = list(zip(tree["inputs"], tree["outputs"], strict=True))
    else:
        tests = tree["tests"] if isinstance(tree, dict) else tree
        pairs = [(test["input"], test["output"]) for test in tests]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TypeError("an input or output is no text")
    return pairs
