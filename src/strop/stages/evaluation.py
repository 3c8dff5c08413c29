"""Evaluation: held-out tasks, played like training's rollouts and judged by the same reward, and the votes of their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Self

from pydantic import Field

from strop.evaluation.metrics import ResponseKind, num_sampled_tokens, verdict_of
from strop.evaluation.results import figures_of, problem_of, write_eval
from strop.evaluation.short_answers import read_answer, read_letter
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, StageResult
from strop.rewards.base import Reward, RunService
from strop.rewards.sum import FunctionPart, SumReward
from strop.runs.lineage import weights_digest
from strop.stages.context import StageContext, product_of
from strop.stages.loop.fixed_set import FixedSetKeys, FixedSetStage, play_tasks
from strop.tasks.protocol import Split
from strop.tools.limits import AbsentTool, NoisyTool
from strop.tools.protocol import Tool
from strop.types import Group, Trajectory, derive_seed

_READERS: dict[str, Callable[[Trajectory], str]] = {
    "strop.evaluation.short_answers:exact_match": read_answer,
    "strop.evaluation.short_answers:right_letter": read_letter,
}
"""Our own reward functions that judge answers, and how each reads one; both compare texts."""
_CONDITIONS: dict[str, Callable[[Tool], Tool]] = {"real": lambda tool: tool, "noise": NoisyTool, "none": AbsentTool}


class Voting:
    """The answer of each attempt, where answers that the task's judge takes for the same are one: the votes of maj@k (cons@k).

    `async with` releases what compares answers.

    Args:
        service: compares answers; processes of its own by default.
    """

    def __init__(self, reward: Reward, service: RunService | None = None) -> None:
        judged = reward.replaced()  # whose parts are opened here
        self._verdict = verdict_of(judged)
        self._parts = {name: part for name in self._verdict.parts if (part := judged.answer_part(name)) is not None}
        self._readers: dict[str, Callable[[Trajectory], str | None]] = {}
        for name, part in self._parts.items():
            part.open(service)
            self._readers[name] = part.read_answer
        for name, mine in judged.parts.items() if isinstance(judged, SumReward) else ():
            if isinstance(mine, FunctionPart) and mine.config.function in _READERS:
                self._readers[name] = _READERS[mine.config.function]

    async def votes(self, groups: Sequence[Group]) -> list[list[str]] | None:
        """The answer of each attempt in each group, as the first of those that are the same; "" if there is none.

        An answer is read by the part that says what is right for the task; without such a part there are no answers. None if
        such a part has no answers to compare (`without_answers`).

        Raises:
            MachineError: what compares answers was lost.
        """
        if self.without_answers(groups):
            return None
        return list(await asyncio.gather(*(self._votes_of(group) for group in groups)))

    def without_answers(self, groups: Sequence[Group]) -> list[str]:
        """The parts that say what is right for some of `groups` but compare no answers: programs, a user's own function."""
        judging = dict.fromkeys(name for group in groups if (name := self._part_of(group)) is not None)
        return [name for name in judging if name not in self._readers]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for part in self._parts.values():
            await part.close()

    def _part_of(self, group: Group) -> str | None:
        """The part that says what is right for the group's task."""
        given = {name for scored in group.trajectories for name in scored.reward_parts}
        return next((name for name in self._verdict.parts if name in given), None)

    async def _votes_of(self, group: Group) -> list[str]:
        """Right answers count as one; a wrong one is compared with the different wrong ones before it."""
        name = self._part_of(group)
        part, right = self._parts.get(name or ""), ""
        first_same: dict[str, str] = {}  # of a wrong answer: the first one that is the same
        votes = []
        for scored in group.trajectories:
            answer = "" if name is None else self._readers[name](scored.trajectory)
            if not answer:
                votes.append("")
            elif self._verdict(scored):
                right = right or answer
                votes.append(right)
            else:
                for known in dict.fromkeys(first_same.values()) if answer not in first_same else ():
                    if part is not None and await part.is_same(known, answer):
                        first_same[answer] = known
                        break
                votes.append(first_same.setdefault(answer, answer))
        return votes


class Eval(FixedSetStage):
    """avg@k on held-out tasks, played like training's rollouts."""

    makes = Product.EVALUATION

    class Config(FixedSetKeys):
        """Keys of `kind = "eval"`."""

        may_truncate = True
        split: Split = Field(default="test", description="Part of `tasks` that is played.")
        num_tasks: int = Field(default=100, ge=1, description="Number of tasks, the first of them.")
        k: int = Field(default=4, ge=1, description="Rollouts of each task.")
        tools: Literal["real", "noise", "none"] = Field(
            default="real", description="Controls: results with other digits (`noise`), or no tool (`none`)."
        )

        @property
        def played_split(self) -> Split:
            return self.split

        @property
        def num_first_tasks(self) -> int:
            return self.num_tasks

        def task_seed(self, seed: int, name: str) -> int:
            """Does not depend on the stage's name, so that two evaluations of one recipe compare the same problems."""
            return derive_seed("eval", seed)

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        estimate = super().plan(name, recipe, machine)
        return replace(estimate, arithmetic=f"{estimate.arithmetic}, tools {self.config.tools}")

    async def run(self, context: StageContext) -> StageResult:
        """Play `num_tasks` x `k` rollouts, and write `eval/`. Raises `MachineError` if every rollout is void."""
        config, started = self.config, time.perf_counter()
        weights = weights_digest(product_of(context.run, config.init))
        playing_with = replace(context, tools=[_CONDITIONS[config.tools](tool) for tool in context.tools])
        seed = derive_seed("eval", context.recipe.seed, "rollouts")
        playing = play_tasks(playing_with, config, weights=weights, seed=seed, tasks_at_once=config.num_tasks)
        groups = [group async for group in playing]
        async with Voting(config.reward, context.runner) as voting:
            votes = await voting.votes(groups)
        figures = summarise(config, groups, seed=context.recipe.seed, votes=votes)
        if votes is None and "accuracy" in figures:
            figures["maj_at_k_missing"] = f"no answers to compare: {', '.join(voting.without_answers(groups))}"
        figures |= {"time_s": time.perf_counter() - started, "tokens": num_sampled_tokens(groups)}
        figures |= identity(context, config.init, config.tasks.benchmark(config.split), weights) | {
            "prompt": config.prompt,
            "max_tokens": config.sampling.max_tokens,
            **({} if config.sampling.truncation is None else asdict(config.sampling.truncation)),
            "max_turns": config.limits.max_turns,
            "reward": config.model_dump(mode="json", include={"reward"})["reward"],
        }
        verdict = verdict_of(config.reward)
        problems = [problem_of(group, None if votes is None else votes[at], verdict) for at, group in enumerate(groups)]
        write_eval(context.directory.evaluation.parent, figures, problems)
        return StageResult(summary=_in_words(figures))


def summarise(
    stage: Eval.Config, groups: Sequence[Group], *, seed: int, votes: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Return the figures of an evaluation, with the keys that they depend on."""
    figures = figures_of(groups, seed=seed, k=stage.k, votes=votes, verdict=verdict_of(stage.reward))
    return {"k": stage.k, "tools": stage.tools, "temperature": stage.sampling.temperature, **figures}


def _in_words(figures: Mapping[str, Any]) -> str:
    void = f"; {figures['num_void']} rollouts are void ({figures['void_fraction']:.1%})" if figures["num_void"] else ""
    void += ". Too many for a final figure: evaluate again" if not figures["is_final"] else ""
    errors = f", tool errors {figures['tool_error_rate']:.1%}" if "tool_error_rate" in figures else ", no tool calls"
    of = f"(avg@{figures['k']} of {figures['num_tasks']} tasks)"
    if "accuracy" not in figures:
        unsaid = "no part of the reward says what is right (a function does with right_above)"
        return f"reward {figures['reward_mean']:.3f} {of}{errors}; {unsaid}{void}"
    unjudged, below = figures["num_tasks_without_verdict"], figures["num_tasks_below_k"]
    missing = f", {unjudged} of them without a verdict" if unjudged else ""
    missing += f", {below} with fewer attempts than that and in no pass@k" if below else ""
    interval, kinds = f"[{figures['accuracy_low']:.3f}, {figures['accuracy_high']:.3f}]", figures["kinds"]
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ResponseKind if kind in kinds)
    # Shown where there are more kinds of responses than right and wrong.
    counts = f": {counts}" if kinds.keys() & {ResponseKind.WELL_FORMED, ResponseKind.UNFORMED} else ""
    return f"accuracy {figures['accuracy']:.3f} {interval} {of}{counts}{missing}{errors}{void}"


def identity(context: StageContext, init: str, benchmark: str, weights: str) -> dict[str, Any]:
    """What was evaluated on what, for comparisons and tables."""
    engine = context.recipe.engine
    return {
        "stage": context.name,
        "init": init,
        "benchmark": benchmark,
        "model": weights,
        "run": context.recipe.name,
        "engine": engine.kind,
        "dtype": engine.dtype,
    }
