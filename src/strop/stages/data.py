"""The rows of tasks or conversations that stages pass to each other, one file a stage, and the rows that they drop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from strop.errors import ConfigError, TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys
from strop.rollout.chat_template import ChatFormat
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import Calls
from strop.run_directory import RunDirectory, StageDirectory, iter_lines
from strop.stages.context import StageContext, product_of
from strop.tasks import RowTasks, TaskSource, make_tasks
from strop.tasks.files import RowFile
from strop.tasks.protocol import Split
from strop.types import Task, Trajectory

Row: TypeAlias = Mapping[str, Any]
TASK = TypeAdapter(Task)
TRAJECTORY = TypeAdapter(Trajectory)


def kept_path(directory: StageDirectory) -> Path:
    """What a data stage makes."""
    return directory.path / "data" / "kept.jsonl"


def dropped_path(directory: StageDirectory) -> Path:
    """What a data stage drops, with reasons."""
    return directory.path / "data" / "dropped.jsonl"


def outcomes_path(directory: StageDirectory) -> Path:
    """How often each task was solved. The rule `agreement` of a curation reads it."""
    return directory.path / "data" / "outcomes.jsonl"


def _tasks_of(run: RunDirectory, stages: Sequence[str]) -> Iterator[Task]:
    for name in stages:
        for number, row in enumerate(iter_lines(product_of(run, name)), start=1):
            try:
                yield TASK.validate_python(row)
            except ValidationError as error:
                wrong = ".".join(map(str, error.errors()[0]["loc"]))
                raise TaskError(
                    f"row {number} of what stage {name!r} made is no task ({wrong}: {error.errors()[0]['msg']}). Restore its"
                    f" file, or rerun it with --from {name}."
                ) from error


def tasks_to_play(context: StageContext, stage: PlayedKeys) -> TaskSource:
    """Return the tasks of the stages in `data`, one stage after the other; without `data`, those of `tasks`.

    Raises:
        TaskError: there are none, or one of their rows is no task.
    """
    seed = stage.task_seed(context.recipe.seed, context.name)
    if stage.has_own_tasks:
        return open_tasks(context.recipe, context.name, stage.tasks, seed=seed, split=stage.played_split)
    stages: Sequence[str] = getattr(stage, "data", ())
    tasks = RowFile(_tasks_of(context.run, stages))  # each row is checked before any is played
    if not len(tasks):
        raise TaskError(
            f"stages.{context.name}.data: {', '.join(stages)} kept no task, so there is nothing to roll out. Loosen what they"
            " keep (a filter's min_right and max_right), or leave data out."
        )
    return RowTasks(tasks, seed=seed)


def tokenizer_digest(chat: ChatFormat) -> str:
    """Equal for two models that write every conversation with the same ids: one vocabulary and one template."""
    vocabulary = sorted(chat.tokenizer.get_vocab().items())
    said = json.dumps([vocabulary, chat.tokenizer.chat_template], ensure_ascii=False)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def conversation_maker(context: StageContext, prompt_name: str, chat: ChatFormat) -> Callable[[Task, Trajectory], Row]:
    """Return a function that makes a row of conversations from a rollout: its messages, and the rollout with its ids.

    Args:
        prompt_name: the prompt of the rollouts.
        chat: the tokenizer of their ids.
    """
    prompt, specs = load_prompt(prompt_name), [tool.spec for tool in context.tools]
    facts = {"prompt": prompt_name, "tokenizer": tokenizer_digest(chat)}

    def make(task: Task, trajectory: Trajectory) -> Row:
        messages = [{"role": each.role, "content": each.text} for each in prompt.fill(task.question, specs)]
        for number, turn in enumerate(trajectory.turns):
            prefill = prompt.prefill if number == 0 or prompt.calls is not Calls.TAGS else ""  # there a turn continues
            messages.append({"role": "assistant", "content": prefill + turn.completion_text})
            messages += [{"role": "tool", "content": call.text} for call in turn.calls if trajectory.is_answered(number)]
        key = trajectory.key
        rollout = TRAJECTORY.dump_python(trajectory, mode="json")
        for said in rollout["turns"]:  # without what depends on the clock or the load of an engine: these rows repeat
            said["completion"] |= {"cached_tokens": 0, "drafted_tokens": 0}
            for call in said["calls"]:
                call["duration_s"] = 0.0
        return {
            "id": f"{task.id}#{key.attempt}" + (f".{key.branch}" if key.branch else ""),
            "source": task.source,
            "messages": messages,
            "facts": dict(task.facts),
            "task": TASK.dump_python(task, mode="json"),
            "trajectory": rollout,
            **facts,
        }

    return make


def open_tasks(recipe: Recipe, name: str, tasks: TaskSource, *, seed: int, split: Split, key: str = "") -> TaskSource:
    """Return `tasks` of the stage `name`: its own, others that its schedule brings, or those that `key` names.

    Raises:
        ConfigError, TaskError: as `make_tasks` does, after the key that says where the rows come from.
    """
    try:
        return make_tasks(tasks, seed=seed, split=split)
    except (ConfigError, TaskError) as error:
        key = key or ("tasks" if tasks == getattr(recipe.stages[name].config, "tasks", tasks) else "schedule.tasks")
        raise type(error)(f"stages.{name}.{key}: {error}") from error
