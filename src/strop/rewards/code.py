"""Judges programs by tests of their output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from strop.config import Config
from strop.errors import ConfigError, TaskError
from strop.rewards.base import CLOSING, OPENING, AnswerReward, PositiveWeight, RolloutPart, RunService, final_text
from strop.rollout.prompt import AnswerForm
from strop.run_directory import parse_json
from strop.sandbox.code_tests import CaseOutcome, CodeTest, CodeTestReport, run_tests
from strop.types import Task, Trajectory

SHARE_WEIGHT = 0.1  # of the share in `weighted_sum`, where all tests passed counts 1; open-r1's `cf_scoring.py`

_FENCE = re.compile(r"([^`]*)```+([^`]*)")
_PYTHON = ("python", "py", "python3")
_FORM = '{"tests": [{"input": "3\\n", "output": "9\\n", "subtasks": ["small"]}], "points": {"small": 30}}'


class _Test(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)
    input: str
    output: str
    subtasks: list[str] = []


class ProgramTests(BaseModel):
    """The tests of one task, and the points of their subtasks. A test may belong to several subtasks."""

    model_config = ConfigDict(frozen=True, strict=True)
    tests: list[_Test] = Field(min_length=1)
    points: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    fn_name: str = ""  # the function that is called, with a list of arguments in JSON as input; empty: a program

    @property
    def subtasks(self) -> list[frozenset[str]]:
        """The subtasks of each test. Raises `ValueError` if tests and points do not fit together."""
        for number, test in enumerate(self.tests, start=1):
            if not test.subtasks or not self.points.keys() >= set(test.subtasks):
                raise ValueError(
                    f"test {number} has the subtasks {test.subtasks}; it needs at least one, and each needs points"
                    f" (known: {', '.join(self.points) or 'none'})"
                )
        if unused := self.points.keys() - {name for test in self.tests for name in test.subtasks}:
            raise ValueError(f"subtask {min(unused)!r} has points but no test")
        return [frozenset(test.subtasks) for test in self.tests]

    def score(self, is_passed: Sequence[bool]) -> float:
        """The points of the subtasks all of whose tests passed, as a share of all points.

        open-r1's `ioi_scoring.py`: a subtask scores what its worst test scores. Here a test scores 0 or 1 and nothing is
        rounded; there IOI's graders give fractions of a point, and scores have two decimals. A row of open-r1's data is one
        subtask, whose score is the reward; tasks with several subtasks are weighted by points.
        """
        failed = {name for test, passed in zip(self.tests, is_passed, strict=True) if not passed for name in test.subtasks}
        earned = math.fsum(points for name, points in self.points.items() if name not in failed)
        return earned / math.fsum(self.points.values())


class _Limits(Config):
    wall_s: float = Field(default=4.0, gt=0, le=600, description="Time limit of one test.")
    memory_mib: int = Field(default=512, ge=32, le=2**20, description="Memory limit of one test.")


class CodePart(RolloutPart):
    """Tests of the program in the last fenced block of Python of the last turn.

    The modes are those of huggingface/open-r1, `src/open_r1/rewards.py` and `src/open_r1/utils/competitive_programming`. Its
    `code` is `share`, its `binary_code` is `all`; its `cf_code` is `all` by pass_fail, `share` by partial and `weighted_sum` by
    that name; its `ioi_code` is `subtasks` for a task that has one. Differences:

    - A missing or additional line fails a test; its `code` accepts both.
    - A task without tests is an error, and so is a fault of the backend; there they score None or 0.
    - A rollout without a program scores 0; in its `cf_code` -1.
    - The first failure ends the tests whose result it settles; there a whole batch is awaited.
    """

    class Config(RolloutPart.Config, _Limits):
        weight: PositiveWeight = 1.0
        score: Literal["all", "share", "weighted_sum", "subtasks"] = Field(
            default="all",
            description="all: 1 if every test passed. share: the share that passed. weighted_sum: all + 0.1 x share. subtasks:"
            " points of the subtasks that passed / all points.",
        )
        prelude: str = Field(
            default="",
            pattern=r"^[^\n]*$",
            description="Statements in one line that run before a program, such as the imports of a benchmark.",
        )

    config: Config
    _runner: RunService

    is_verifier = True
    answer_form = AnswerForm.CODE

    def open(self, service: RunService | None) -> None:
        if service is None:
            raise ConfigError("reward.kind = 'code' runs programs, but there is no sandbox to run them in.")
        self._runner = service

    async def report(
        self, code: str, tests: ProgramTests, *, stops: bool, subtasks: Sequence[frozenset[str]] | None = None
    ) -> CodeTestReport:
        """Run `code` on `tests`; if it `stops`, the first failure ends them, or those of its subtasks."""
        return await run_tests(
            self._runner,
            code,
            [CodeTest(stdin=test.input, expected=test.output) for test in tests.tests],
            wall_s=self.config.wall_s,
            memory_mib=self.config.memory_mib,
            stop_at_first_failure=stops,
            subtasks=subtasks,
            function=tests.fn_name,
            prelude=self.config.prelude,
        )

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        mode = self.config.score
        tests = read_tests(task)
        try:
            subtasks = tests.subtasks if mode == "subtasks" else None
        except ValueError as error:
            raise TaskError(
                f"task {task.id!r}: {error}. Write the answer as {_FORM}, or set another score than 'subtasks'."
            ) from error
        code = extract_code(trajectory)
        if code is None:
            return 0.0
        report = await self.report(code, tests, stops=mode in ("all", "subtasks"), subtasks=subtasks)
        if mode == "subtasks":
            return tests.score([case.outcome is CaseOutcome.PASSED for case in report.cases])
        if mode == "share":
            return report.passed_share
        return float(report.is_passed) + (SHARE_WEIGHT * report.passed_share if mode == "weighted_sum" else 0.0)


class CodeReward(AnswerReward):
    """Parts: `accuracy` (all tests passed), `passed` (the share that did), `format` (a code block), `called` (a tool ran).

    If `passed` has no weight, the first failure ends the tests, and `passed` is the share that passed before it.
    """

    class Config(AnswerReward.Config, _Limits):
        """The answer is a program, judged by the tests of its task."""

        parts = ("accuracy", "passed", "format", "called")  # passed is a share, the others are 0 or 1

    config: Config
    part = CodePart

    async def judge(self, task: Task, trajectory: Trajectory) -> Mapping[str, float]:
        tests, code = read_tests(task), extract_code(trajectory)
        if code is None:
            return {"accuracy": 0.0, "passed": 0.0}
        report = await self.answer.report(code, tests, stops=not self.config.weights.get("passed"))
        return {"accuracy": float(report.is_passed), "passed": report.passed_share}

    def has_format(self, trajectory: Trajectory) -> bool:
        return extract_code(trajectory) is not None


def extract_code(trajectory: Trajectory) -> str | None:
    """The last fenced block of Python of the last turn, or else its last block without a language.

    If there is a fence within answer tags, only blocks there count. A block may be indented, and need not be closed. None if
    there is none, or the policy did not end the rollout itself.
    """
    text = final_text(trajectory) or ""
    answer = text.partition(OPENING)[2].rpartition(CLOSING)[0]
    blocks = _blocks(answer if "```" in answer else text)
    of_python, others = ([code for language, code in blocks if language in names] for names in (_PYTHON, ("",)))
    return next(reversed(of_python or others), None)


def _blocks(text: str) -> list[tuple[str, str]]:
    """The language, in lower case, and the text of each fenced block.

    A fence with a language begins a block anywhere, also after text in its line; one without a language ends it likewise.
    """
    found: list[tuple[str, list[str]]] = []
    indent: int | None = None  # of the block that is open
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        before, info = fence.groups() if fence is not None else (line, "")
        is_first, names = not before.strip(), info.split()
        is_opening = (is_first and (indent is None or bool(names))) or (indent is None and len(names) == 1)
        if fence is not None and is_opening:
            indent = len(before) if is_first else 0
            found.append(((names or [""])[0].lower(), []))
        elif indent is not None:
            code = line if names else before
            found[-1][1].append(code[min(indent, len(code) - len(code.lstrip(" \t"))) :])
            indent = indent if fence is None or names else None
    return [(language, "".join(lines)) for language, lines in found]


def read_tests(task: Task) -> ProgramTests:
    """The tests in the task's answer, in one of four forms of JSON.

        [{"input": "3\\n", "output": "9\\n"}, ...]    {"inputs": ["3\\n", ...], "outputs": ["9\\n", ...]}
        {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}
        {"tests": [{"input": "3\\n", "output": "9\\n", "subtasks": ["small"]}, ...], "points": {"small": 30}}

    Raises:
        TaskError: it holds no tests.
    """
    try:
        tree = parse_json(task.answer)
        if isinstance(tree, dict) and "inputs" in tree:
            name = tree.get("fn_name") or ""
            pairs = list(zip(tree["inputs"], tree["outputs"], strict=True))
            if name:
                are_texts = all(isinstance(each, str) for pair in pairs for each in pair)
                pairs = [(_arguments(given), value if are_texts else json.dumps(value)) for given, value in pairs]
            tree = {"tests": [{"input": given, "output": value} for given, value in pairs], "fn_name": name}
        return ProgramTests.model_validate({"tests": tree} if isinstance(tree, list) else tree)
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"task {task.id!r}: its answer holds no tests ({error}). Write JSON, as in {_FORM}.") from error


def _arguments(given: object) -> str:
    """The arguments of a call as a list in JSON. LiveCodeBench has a text with one of them in each line."""
    if isinstance(given, str):
        given = [parse_json(line) for line in given.splitlines()]
    if not isinstance(given, list):
        raise ValueError(f"the arguments of a call are no list: {given!r:.200}")
    return json.dumps(given)
