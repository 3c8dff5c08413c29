"""Rows of conversations as demonstrations: exactly as they were sampled for a model of the same tokenizer, else told anew.

What was never sampled, but written down, is another module's: written.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.pipelines.demonstrations import as_demonstration, play_demonstrations
from strop.pipelines.recipe import DemonstrationsStage
from strop.pipelines.stage import StageContext, load_chat, model_of
from strop.pipelines.stage_data import TASK, TRAJECTORY, RowsWriter, as_conversation, kept_path, tokenizer_digest
from strop.pipelines.stage_tasks import open_tasks
from strop.pipelines.written import as_written_demonstration
from strop.rollout.call_format import make_call_format
from strop.rollout.chat import ChatFormat
from strop.rollout.prompt import load_prompt
from strop.tools.protocol import Tool
from strop.training.sft import Demonstration, Segment
from strop.types import Task, Trajectory


async def run_demonstrations_stage(context: StageContext, stage: DemonstrationsStage) -> tuple[Path, str]:
    """Play and write; returns the file of conversations and one sentence about it."""
    chat = load_chat(model_of(context.run, stage.init))
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    source = open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    prompt, specs = load_prompt(stage.prompt), [tool.spec for tool in context.tools()]
    facts = {"prompt": stage.prompt, "tokenizer": tokenizer_digest(chat)}
    num = 0
    with RowsWriter(kept_path(context.directory)) as file:
        async for each in play_demonstrations(context, stage, stage.demonstrator, chat, num=stage.num_demonstrations):
            task = source.task(each.key.task_index)
            asked = [{"role": one.role, "content": one.text} for one in prompt.fill(task.question, specs)]
            file.add(as_conversation(task, each, question=asked, prefill=prompt.prefill, facts=facts))
            num += 1
    return kept_path(context.directory), f"{num} demonstrations"


def as_demonstrations(rows: Iterable[Mapping[str, Any]], chat: ChatFormat, tools: Sequence[Tool]) -> Iterator[Demonstration]:
    """Each row, as it is asked for, with the provenance of its tokens.

    Ids are the truth (law 1) for the tokenizer that they are of. A student with another one cannot be trained on them: it
    gets the same words under its own template, each text encoded once, as a demonstrator's are.
    """
    own, specs = tokenizer_digest(chat), [tool.spec for tool in tools]
    for row in rows:
        if "trajectory" not in row:
            calls = make_call_format(load_prompt(str(row["prompt"])).calls, specs)
            yield as_written_demonstration(row, chat, calls)
            continue
        trajectory = TRAJECTORY.validate_python(row["trajectory"])
        if row["tokenizer"] == own:
            yield as_demonstration(trajectory)
        else:
            yield told_anew(TASK.validate_python(row["task"]), trajectory, str(row["prompt"]), chat, tools)


def told_anew(task: Task, trajectory: Trajectory, prompt_name: str, chat: ChatFormat, tools: Sequence[Tool]) -> Demonstration:
    """A rollout in the ids of another tokenizer."""
    prompt, specs = load_prompt(prompt_name), [tool.spec for tool in tools]
    calls = make_call_format(prompt.calls, specs)
    segments = [Segment(ids=prompt.ids(chat, task.question, specs), is_demonstrator=False)]
    for turn in trajectory.turns:
        said = chat.completion_ids(turn.completion_text)
        goes_on = bool(turn.observation_ids) and calls.continues_turn
        said = said[:-1] if goes_on else said
        segments.append(Segment(ids=said, is_demonstrator=True))
        if turn.observation_ids:
            observed = chat.observation_ids(
                [call.text for call in turn.calls],
                completion_ended=not goes_on,
                wrapper=calls.wrapper,
                continues_turn=calls.continues_turn,
            )
            segments.append(Segment(ids=observed, is_demonstrator=False))
    return Demonstration(segments=tuple(segment for segment in segments if segment.ids))
