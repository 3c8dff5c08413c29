"""Judges programs by tests of what they print."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from strop.errors import TaskError
from strop.rewards.answers import final_text
from strop.rewards.config import CodeRewardConfig
from strop.rewards.shaping import has_called
from strop.sandbox.code_tests import CodeTest, run_tests
from strop.sandbox.protocol import CodeRunner
from strop.types import Task, Trajectory

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


def extract_code(trajectory: Trajectory) -> str | None:
    """The last closed fenced block of the last turn; None when there is none, or the policy did not end the rollout itself."""
    blocks = _BLOCK.findall(final_text(trajectory) or "")
    return blocks[-1] if blocks else None


def read_tests(task: Task, *, fact: str | None) -> list[CodeTest]:
    """The tests in the task's answer, or in its `fact`, in one of two forms of JSON.

        [{"input": "3\\n", "output": "9\\n"}, ...]    {"inputs": ["3\\n", ...], "outputs": ["9\\n", ...]}

    Raises:
        TaskError: there is no such fact, or it holds no tests.
    """
    if fact is not None and fact not in task.facts:
        known = ", ".join(sorted(task.facts)) or "none"
        raise TaskError(
            f"task {task.id!r} has no fact {fact!r}, where reward.tests_fact says its tests are; its facts: {known}."
            " Carry the column along with tasks.facts."
        )
    text = task.answer if fact is None else task.facts[fact]
    place = "its answer" if fact is None else f"its fact {fact!r}"
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
    if isinstance(tree, dict):
        pairs = list(zip(tree["inputs"], tree["outputs"], strict=True))
    else:
        pairs = [(test["input"], test["output"]) for test in tree]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TypeError("an input or output is no text")
    return pairs
