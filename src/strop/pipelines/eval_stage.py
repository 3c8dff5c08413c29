"""Evaluation: held-out tasks, played like training's rollouts and judged by the same reward."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import MachineError
from strop.evaluation.controls import AbsentTool, NoisyTool
from strop.evaluation.results import figures_of, problem_of, write_eval
from strop.evaluation.summary import num_sampled_tokens
from strop.evaluation.verdict import verdict_of
from strop.evaluation.votes import Voting
from strop.pipelines.engines import open_fleet, write_timeline
from strop.pipelines.growth import forget
from strop.pipelines.ledger import StepLedger
from strop.pipelines.recipe import EvalStage, Recipe
from strop.pipelines.room import check_engines
from strop.pipelines.stage import StageContext, load_chat, make_player, model_of, weights_digest
from strop.pipelines.stage_tasks import open_tasks
from strop.rewards import judge_group, make_reward
from strop.rollout.play import play
from strop.runs import LineWriter, StageDirectory, read_json, read_lines, write_json, write_text
from strop.seeds import derive_seed
from strop.tasks.config import Columns, HubConfig, JsonlConfig, ParquetConfig, PythonTasksConfig
from strop.tools.protocol import Tool
from strop.types import Group, ScoredTrajectory, Task

_SHARED_COLUMNS = frozenset(("arpo-eval", "arpo-mix", "flashrag", "strop", "tulu3-math"))
"""Data sets that are a form of rows, in which files of many benchmarks are written: the file says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What an evaluation found: what `result.json` holds, and the lines of `problems.jsonl`."""

    figures: dict[str, Any]
    problems: tuple[dict[str, Any], ...]


async def run_eval_stage(context: StageContext, stage: EvalStage) -> str:
    """Evaluate, write `eval/`, and return one sentence about it."""
    result = await evaluate(context, stage, model_of(context.run, stage.init))
    write_eval(context.directory.evaluation.parent, result.figures, result.problems)
    forget(context.directory)
    figures = result.figures
    errors = f", tool errors {figures['tool_error_rate']:.1%}" if "tool_error_rate" in figures else ", no tool calls"
    of = f"(avg@{figures['k']} of {figures['num_tasks']} tasks)"
    if "accuracy" not in figures:
        return f"reward {figures['reward_mean']:.3f} {of}{errors}; no part of the reward says what is right"
    unjudged = figures["num_tasks_without_verdict"]
    without = f", {unjudged} of them without a verdict" if unjudged else ""
    if below := figures["num_tasks_below_k"]:
        without += f", {below} with fewer attempts than that and in no pass@k"
    return (
        f"accuracy {figures['accuracy']:.3f} [{figures['accuracy_low']:.3f}, {figures['accuracy_high']:.3f}]"
        f" {of}{without}{errors}"
    )


async def evaluate(context: StageContext, stage: EvalStage, model: Path) -> EvalResult:
    """Play `num_tasks` x `k` rollouts of the model in `model`; those that an interrupted try finished are taken over.

    Tasks and seeds do not depend on the stage's name, so that two evaluations of one recipe compare the same problems.

    Raises:
        MachineError: every rollout is void.
    """
    chat = load_chat(model)
    tasks = tasks_of(context.recipe, context.name, stage)
    context.progress.stage_started(context.name, stage.kind, len(tasks), 0)
    fleet = await open_fleet(context, model, chat)
    reward = make_reward(stage.reward, context.runner)
    voting = Voting(stage.reward, context.runner)
    groups: list[Group] = []
    started = time.perf_counter()
    weights = weights_digest(model)
    try:
        check_engines(context.recipe, context.name, stage, chat, context.tools(), fleet)
        path = context.directory.rollouts(0)
        _leave_out_changed(context.directory, tasks)
        clock = TriesClock(context.directory.evaluation.with_name("clock.jsonl"), weights=weights, started=started)
        with closing(clock), closing(_Ledger(path, weights, fleet.policy_version, clock)) as ledger:
            tools = _under_condition(context.tools(), stage.tools)
            playing = play(
                tasks,
                make_player(stage, engine=fleet, chat=chat, tools=tools, reward=reward, observe=ledger),
                num_rollouts=stage.k,
                seed=derive_seed("eval", context.recipe.seed, "rollouts"),
                observer=ledger,
                finished=ledger.finished_before,
            )
            async for group in playing:
                groups.append(judge_group(reward, group))
                context.progress.step({}, len(groups))
        write_timeline(context, 0, fleet.last_batch)
        groups.sort(key=lambda group: group.task_index)
        _tell_of_void(context, path.with_suffix(".ledger.jsonl"), groups)
        votes = await voting.votes(groups)
    finally:
        await fleet.close()
        await reward.close()
        await voting.close()
    figures = summarise(stage, groups, seed=context.recipe.seed, votes=votes) | {"stage": context.name}
    if votes is None and "accuracy" in figures:
        parts = voting.without_answers(groups)
        figures["maj_at_k_missing"] = f"no answers to compare: {', '.join(parts)}"
    figures |= {
        "time_s": clock.before_s + time.perf_counter() - started,
        "tokens": num_sampled_tokens(groups),
        "num_taken_over": len(ledger.finished_before),
    }
    figures |= _identity(context, stage, weights)
    verdict = verdict_of(stage.reward)
    lines = [problem_of(group, None if votes is None else votes[at], verdict) for at, group in enumerate(groups)]
    return EvalResult(figures=figures, problems=tuple(lines))


class TriesClock:
    """How long the tries of an evaluation played whose rollouts it takes over, each up to the last that it finished.

    Tokens are counted over all tries, so the time is, too.
    """

    def __init__(self, path: Path, *, weights: str, started: float) -> None:
        """`started` is the moment of this try, as `time.perf_counter` told it."""
        tries: dict[int, float] = {}
        lines = read_lines(path)
        for line in lines:
            if line["weights"] == weights:  # what was sampled from others is played again
                tries[line["try"]] = line["time_s"]
        self.before_s = math.fsum(tries.values())
        self._number = max((int(line["try"]) for line in lines), default=0) + 1
        self._weights, self._started = weights, started
        self._writer = LineWriter(path)

    def tick(self) -> None:
        """A rollout of this try is finished."""
        elapsed = time.perf_counter() - self._started
        self._writer.append({"try": self._number, "weights": self._weights, "time_s": elapsed})

    def close(self) -> None:
        self._writer.close()


class _Ledger(StepLedger):
    """A ledger with a clock beside it."""

    def __init__(self, path: Path, weights: str, policy_version: int, clock: TriesClock) -> None:
        super().__init__(path, weights=weights, policy_version=policy_version)
        self._clock = clock

    def finished(self, scored: ScoredTrajectory) -> None:
        super().finished(scored)
        self._clock.tick()


def tasks_of(recipe: Recipe, name: str, stage: EvalStage) -> list[tuple[int, Task]]:
    """The problems of the evaluation `name` with their indices. Raises as `open_tasks` does."""
    source = open_tasks(recipe, name, stage.tasks, seed=derive_seed("eval", recipe.seed), split=stage.split)
    num_tasks = stage.num_tasks if source.num_tasks is None else min(stage.num_tasks, source.num_tasks)
    return [(index, source.task(index)) for index in range(num_tasks)]


def changed_tasks(directory: StageDirectory, tasks: Sequence[tuple[int, Task]]) -> set[int]:
    """Indices of tasks that are not what they were when the evaluation in `directory` began; empty where none did."""
    before = _recorded_tasks(directory)
    return {index for index, task in tasks if before.get(str(index), _digest(task)) != _digest(task)}


def summarise(
    stage: EvalStage, groups: Sequence[Group], *, seed: int, votes: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """The figures of an evaluation, with what it was asked for."""
    figures = figures_of(groups, seed=seed, k=stage.k, votes=votes, verdict=verdict_of(stage.reward))
    return {"k": stage.k, "tools": stage.tools, "temperature": stage.sampling.temperature, **figures}


def benchmark_of(stage: EvalStage) -> str:
    """What the problems are called in tables: a subset, the published data set, the file with its folder, or the generator."""
    tasks = stage.tasks
    if isinstance(tasks, HubConfig) and tasks.subset is not None and tasks.dataset is not None:
        return tasks.subset
    is_told_by_file = isinstance(tasks, JsonlConfig | ParquetConfig) and tasks.dataset in _SHARED_COLUMNS
    if isinstance(tasks, Columns) and tasks.dataset is not None and not is_told_by_file:
        return tasks.dataset
    match tasks:
        case JsonlConfig() | ParquetConfig():
            path = tasks.path if stage.split == "train" or tasks.test_path is None else tasks.test_path
            return "/".join(path.with_suffix("").parts[-2:])
        case PythonTasksConfig():
            return tasks.source
        case _:
            return str(getattr(tasks, "name", None) or tasks.kind)


def _identity(context: StageContext, stage: EvalStage, weights: str) -> dict[str, Any]:
    """What was evaluated on what, for comparisons and tables."""
    engine = context.recipe.engine
    return {
        "benchmark": benchmark_of(stage),
        "model": weights,
        "run": context.recipe.name,
        "engine": engine.kind,
        "dtype": engine.dtype,
        "prompt": stage.prompt,
        "max_tokens": stage.sampling.max_tokens,
        "max_turns": stage.limits.max_turns,
        "reward": stage.reward.model_dump(mode="json"),
    }


def _leave_out_changed(directory: StageDirectory, tasks: Sequence[tuple[int, Task]]) -> None:
    """Let go of finished rollouts whose tasks are no longer what they were, and then write down what the tasks are now.

    In this order a kill leaves nothing that was judged by an older answer beside a record of the newer one.
    """
    if changed := changed_tasks(directory, tasks):
        path = directory.rollouts(0)
        lines = [line for line in read_lines(path) if line["rollout"]["trajectory"]["key"]["task_index"] not in changed]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    write_json(_tasks_record(directory), _recorded_tasks(directory) | {str(index): _digest(task) for index, task in tasks})


def _recorded_tasks(directory: StageDirectory) -> dict[str, str]:
    path = _tasks_record(directory)
    return dict(read_json(path)) if path.exists() else {}


def _tasks_record(directory: StageDirectory) -> Path:
    return directory.evaluation.with_name("tasks.json")


def _digest(task: Task) -> str:
    said = "\0".join([task.question, task.answer, *(f"{name}={value}" for name, value in sorted(task.facts.items()))])
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def _tell_of_void(context: StageContext, ledger: Path, groups: Sequence[Group]) -> None:
    """Warn of what no one could judge, with the reason met most often. Raises `MachineError` where that is everything."""
    num_void, num_judged = sum(group.num_void for group in groups), sum(len(group.trajectories) for group in groups)
    if not num_void:
        return
    reasons = Counter(str(line["reason"]) for line in read_lines(ledger) if line["event"] == "voided").most_common(1)
    why = reasons[0][0] if reasons else "the reward could not judge them"
    if not num_judged:
        raise MachineError(
            f"stages.{context.name}: every rollout of {len(groups)} tasks is void, so nothing is known of the model. The reason"
            f" met most often: {why.rstrip('.')}. All reasons are in {ledger}."
        )
    context.warn(f"{num_void} rollouts are void and count in no figure. The reason met most often: {why.rstrip('.')}.")


def _under_condition(tools: Sequence[Tool], condition: str) -> list[Tool]:
    match condition:
        case "noise":
            return [NoisyTool(tool) for tool in tools]
        case "none":
            return [AbsentTool(tool) for tool in tools]
        case _:
            return list(tools)
