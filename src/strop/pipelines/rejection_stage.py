"""Rejection sampling: sample a policy, keep what is right and reads well, write conversations for supervised fine-tuning."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from strop.errors import TaskError
from strop.evaluation.verdict import verdict_of
from strop.pipelines.judged import why_not_right
from strop.pipelines.recipe import RejectionSamplingStage
from strop.pipelines.sampled import outcome_row, play_sampled
from strop.pipelines.stage import StageContext, load_chat, model_of
from strop.pipelines.stage_data import (
    RowsWriter,
    as_conversation,
    dropped_path,
    kept_path,
    outcomes_path,
    tokenizer_digest,
)
from strop.rewards.language import scripts_of
from strop.rewards.text import written
from strop.rollout.prompt import load_prompt
from strop.types import Group, ScoredTrajectory, Trajectory

_CALLS = re.compile(r"<(tool_call|python)>.*?(?:</\1>|\Z)", re.DOTALL)
_EAST_ASIAN = frozenset({"han", "kana"})  # Japanese writes with both


async def run_rejection_stage(context: StageContext, stage: RejectionSamplingStage) -> tuple[Path, str]:
    """Sample, judge and write; returns the file of conversations and one sentence about it.

    Raises:
        TaskError: nothing is kept.
    """
    chat = load_chat(model_of(context.run, stage.init))
    prompt = load_prompt(stage.prompt)
    facts = {"prompt": stage.prompt, "tokenizer": tokenizer_digest(chat)}
    specs = [tool.spec for tool in context.tools()]
    why: Counter[str] = Counter()
    verdict = verdict_of(stage.reward)
    num_tasks = num_kept = num_void = 0
    with (
        RowsWriter(dropped_path(context.directory)) as dropped,
        RowsWriter(kept_path(context.directory)) as kept,
        RowsWriter(outcomes_path(context.directory)) as outcomes,
    ):
        async for group in play_sampled(context, stage):
            num_tasks += 1
            num_void += group.num_void
            outcomes.add(outcome_row(group, verdict))
            asked = [{"role": each.role, "content": each.text} for each in prompt.fill(group.task.question, specs)]
            for scored, reason in zip(group.trajectories, reasons(group, stage), strict=True):
                row = as_conversation(group.task, scored.trajectory, question=asked, prefill=prompt.prefill, facts=facts)
                if reason:
                    told = {name: row[name] for name in ("id", "source", "messages")}
                    dropped.add(told | {"reason": reason, "answer": group.task.answer})
                    why[reason.partition(":")[0]] += 1
                else:
                    kept.add(row)
                    num_kept += 1
    if not num_kept:
        found = "; ".join(f"{reason} ({num})" for reason, num in why.most_common(3))
        raise TaskError(
            f"stages.{context.name}: no rollout of {num_tasks} tasks is kept: {found}. Sample more (k), give it easier tasks,"
            f" or loosen its rules. All reasons are in {dropped_path(context.directory)}."
        )
    found = "".join(f", {num} {reason}" for reason, num in why.most_common()) or " none"
    void = f"; {num_void} are void" if num_void else ""
    return kept_path(context.directory), f"{num_kept} conversations of {num_tasks} tasks kept; dropped{found}{void}"


def reasons(group: Group, stage: RejectionSamplingStage) -> list[str]:
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


def why_rejected(scored: ScoredTrajectory, stage: RejectionSamplingStage) -> str:
    """What is wrong with a rollout by itself; empty where nothing is."""
    if reason := why_not_right(verdict_of(stage.reward)(scored)):
        return reason
    if scored.trajectory.is_truncated:
        return "truncated: it ran out of tokens"
    text = _CALLS.sub(" ", written(scored.trajectory))
    if not stage.allow_code_blocks and "```" in text:
        return "code block: it has one outside of a tool call"
    longest = max(map(len, _paragraphs(scored.trajectory)))
    if stage.max_paragraph_chars is not None and longest > stage.max_paragraph_chars:
        return f"long paragraph: of {longest} characters"
    if stage.max_foreign_share is not None and (share := foreign_share(text)) > stage.max_foreign_share:
        return f"mixed languages: {share:.1%} of its words are in another script than most"
    return ""


def _paragraphs(trajectory: Trajectory) -> list[str]:
    """Between empty lines, calls, and turns: where a tool has answered, another paragraph begins."""
    apart = "\n\n".join(turn.completion_text for turn in trajectory.turns)
    return [each.strip() for each in re.split(r"\n\s*\n", _CALLS.sub("\n\n", apart))]


def foreign_share(text: str) -> float:
    """Words in another script than most words of `text`, as a share of all.

    Code, mathematics and single Latin or Greek letters, which name variables, count nowhere.
    """
    scripts = Counter("East Asian" if script in _EAST_ASIAN else script for script in scripts_of(text))
    total = scripts.total()
    return 1 - max(scripts.values()) / total if total else 0.0
