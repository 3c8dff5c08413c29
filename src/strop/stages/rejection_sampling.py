"""Rejection sampling: sample a policy, keep what is right and reads well, write conversations for supervised fine-tuning."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from typing import Self

from pydantic import Field, model_validator

from strop.curation.rules import outcome_of
from strop.errors import TaskError
from strop.evaluation.metrics import require_verdict, verdict_of
from strop.recipe.stage import Product, StageResult
from strop.rewards.base import written
from strop.rewards.language import scripts_of
from strop.stages.context import StageContext, conversation_maker, load_chat, product_of
from strop.stages.loop.fixed_set import FixedSetStage, SampledKeys, play_tasks, why_not_right
from strop.tasks.files import writing_rows
from strop.types import Group, ScoredTrajectory

_CALLS = re.compile(r"<(tool_call|python)>.*?(?:</\1>|\Z)", re.DOTALL)
_EAST_ASIAN = frozenset({"han", "kana"})  # Japanese writes with both


class RejectionSampling(FixedSetStage):
    """Keeps the right rollouts of a policy as conversations to imitate; DeepSeek-R1 (arXiv 2501.12948) section 2.3.

    Which figures R1 used is not published.
    """

    makes = Product.CONVERSATIONS

    class Config(SampledKeys):
        """Keys of `kind = "rejection_sampling"`."""

        max_per_task: int | None = Field(default=None, ge=1, description="Rollouts to keep of a task, at most. Default: all.")
        drop_repeats: bool = Field(default=True, description="Keep only the first of a task's rollouts with the same tokens.")
        max_foreign_share: float = Field(
            default=0.0, ge=0, le=1, description="Largest share of words in another script than most words."
        )
        max_paragraph_chars: int = Field(default=2000, ge=1, description="Longest paragraph, in characters.")
        allow_code_blocks: bool = Field(default=False, description="Keep rollouts with ``` outside of tool calls.")

        @model_validator(mode="after")
        def _has_a_verdict(self) -> Self:
            require_verdict(self.reward, "rollouts are kept if they are right")
            return self

    config: Config

    async def run(self, context: StageContext) -> StageResult:
        """Sample, judge and write the conversations. Raises `TaskError` if nothing is kept."""
        config, directory = self.config, context.directory
        make_row = conversation_maker(context, config.prompt, load_chat(product_of(context.run, config.init)))
        verdict = verdict_of(config.reward)
        why: Counter[str] = Counter()
        num_tasks = num_kept = num_void = 0
        with (
            writing_rows(directory.dropped) as drop,
            writing_rows(directory.kept) as keep,
            writing_rows(directory.outcomes) as add_outcome,
        ):
            async for group in play_tasks(context, config, seed=context.seed("rollouts")):
                num_tasks += 1
                num_void += group.num_void
                add_outcome(asdict(outcome_of(group, verdict)))
                for scored, reason in zip(group.trajectories, reasons(group, config), strict=True):
                    row = make_row(group.task, scored.trajectory)
                    if reason:
                        why[reason.partition(":")[0]] += 1
                        shown = {name: row[name] for name in ("id", "source", "messages")}
                        drop(shown | {"reason": reason, "answer": group.task.answer})
                    else:
                        num_kept += 1
                        keep(row)
        dropped = ", ".join(f"{num} {reason}" for reason, num in why.most_common()) or "none"
        if not num_kept:
            raise TaskError(
                f"stages.{context.name}: no rollout of {num_tasks} tasks is kept: {dropped}. Sample more (k), give it easier"
                f" tasks, or loosen its rules. All reasons are in {directory.dropped}."
            )
        void = f"; {num_void} are void" if num_void else ""
        summary = f"{num_kept} conversations of {num_tasks} tasks kept; dropped: {dropped}{void}"
        return StageResult(summary=summary, product=directory.kept)


def reasons(group: Group, stage: RejectionSampling.Config) -> list[str]:
    """Why each rollout of a group is dropped, in order; empty for one that is kept."""
    found = []
    said: set[tuple[tuple[int, ...], ...]] = set()
    num_kept = 0
    for scored in group.trajectories:
        ids = tuple(turn.completion.ids for turn in scored.trajectory.turns)
        reason = why_rejected(scored, stage)
        if not reason and stage.drop_repeats and ids in said:
            reason = "repeated: the same as one that is kept"
        if not reason and stage.max_per_task is not None and num_kept >= stage.max_per_task:
            reason = f"enough: max_per_task = {stage.max_per_task} of its task are kept"
        if not reason:
            said.add(ids)
            num_kept += 1
        found.append(reason)
    return found


def why_rejected(scored: ScoredTrajectory, stage: RejectionSampling.Config) -> str:
    """What is wrong with a rollout by itself; empty where nothing is."""
    if reason := why_not_right(verdict_of(stage.reward)(scored)):
        return reason
    if scored.trajectory.is_truncated:
        return "truncated: it ran out of tokens"
    text = _CALLS.sub(" ", written(scored.trajectory))
    if not stage.allow_code_blocks and "```" in text:
        return "code block: it has one outside of a tool call"
    apart = "\n\n".join(turn.completion_text for turn in scored.trajectory.turns)  # where a tool has answered, too
    longest = max(len(each.strip()) for each in re.split(r"\n\s*\n", _CALLS.sub("\n\n", apart)))
    if longest > stage.max_paragraph_chars:
        return f"long paragraph: of {longest} characters"
    if (share := foreign_share(text)) > stage.max_foreign_share:
        return f"mixed languages: {share:.1%} of its words are in another script than most"
    return ""


def foreign_share(text: str) -> float:
    """Words in another script than most words of `text`, as a share of all.

    Code, mathematics and single Latin or Greek letters, which name variables, count nowhere.
    """
    scripts = Counter("East Asian" if script in _EAST_ASIAN else script for script in scripts_of(text))
    total = scripts.total()
    return 1 - max(scripts.values()) / total if total else 0.0
