"""The rows of tasks or conversations that stages pass to each other, one file a stage, and the rows that they drop."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from pydantic import TypeAdapter, ValidationError

from strop.errors import ConfigError, TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys
from strop.rollout.chat_template import ChatFormat
from strop.rollout.prompt import load_prompt
from strop.run_directory import RunDirectory, StageDirectory, is_whole_line, parse_line
from strop.stages.context import StageContext, product_of
from strop.tasks import RowTasks, TaskSource, make_tasks
from strop.tasks.config import (
    TaskConfig,
)
from strop.tasks.protocol import Split
from strop.tasks.row_file import RowFile
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
    """How often each task was solved. The rules `agreement` and `difficulty` of a curation read it."""
    return directory.path / "data" / "outcomes.jsonl"


def rows_of(run: RunDirectory, stage: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that `stage` made. Raises `RunError` as `open_rows` does, when the first is asked for."""
    yield from rows_in(product_of(run, stage))


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's .jsonl, as `read_by_number` reads them."""
    with read_by_number(path) as rows:
        yield from rows


def read_by_number(path: Path) -> RowFile[dict[str, Any]]:
    """Return the rows of a run's .jsonl, without a last line that a kill cut short. A row that is no object is a `RunError`."""
    with path.open("rb") as file:
        lines = ((f"{path}:{number}", line) for number, line in enumerate(file, start=1) if not line.isspace())
        return RowFile(parse_line(line, place) for place, line in lines if line.endswith(b"\n") or is_whole_line(line))


def open_rows(run: RunDirectory, stage: str) -> RowFile[dict[str, Any]]:
    """Return the rows that `stage` made, by number. Raises `RunError` if it is not done, or its file is gone."""
    return read_by_number(product_of(run, stage))


class StageRows:
    """The rows of several stages, one stage after the other, by number. They stay on disk. A context."""

    def __init__(self, run: RunDirectory, stages: Sequence[str]) -> None:
        self.files = {name: open_rows(run, name) for name in stages}
        self.starts = dict(zip(self.files, accumulate(map(len, self.files.values()), initial=0), strict=False))
        """The number of the first row of each stage."""

    def __len__(self) -> int:
        return sum(map(len, self.files.values()))

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        name, row = self.place(number)
        return self.files[name][row]

    def place(self, number: int) -> tuple[str, int]:
        """Return the stage of a row, and its number there. Raises `IndexError` if there is no such row."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        name = list(self.starts)[bisect_right(list(self.starts.values()), number) - 1]
        return name, number - self.starts[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for file in self.files.values():
            file.close()


class _StageTasks:
    """The tasks that stages made. Each row is checked before any is played."""

    def __init__(self, rows: StageRows) -> None:
        self._rows = rows
        for number in range(len(self)):
            self[number]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int, /) -> Task:
        try:
            return TASK.validate_python(self._rows[number])
        except ValidationError as error:
            name, row = self._rows.place(number)
            wrong = ".".join(map(str, error.errors()[0]["loc"]))
            raise TaskError(
                f"row {row + 1} of what stage {name!r} made is no task ({wrong}: {error.errors()[0]['msg']}). Restore its"
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
    tasks = _StageTasks(StageRows(context.run, stages))
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
    prompt, specs = load_prompt(prompt_name), [tool.spec for tool in context.tools()]
    facts = {"prompt": prompt_name, "tokenizer": tokenizer_digest(chat)}

    def make(task: Task, trajectory: Trajectory) -> Row:
        messages = [{"role": each.role, "content": each.text} for each in prompt.fill(task.question, specs)]
        for number, turn in enumerate(trajectory.turns):
            prefill = prompt.prefill if number == 0 else ""
            messages.append({"role": "assistant", "content": prefill + turn.completion_text})
            messages += [{"role": "tool", "content": call.text} for call in turn.calls if turn.observation_ids]
        key = trajectory.key
        rollout = TRAJECTORY.dump_python(trajectory, mode="json")
        for said in rollout["turns"]:  # without what depends on the clock or the load of an engine: these rows repeat
            said["completion"]["cached_tokens"] = 0
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


def open_tasks(recipe: Recipe, name: str, tasks: TaskConfig, *, seed: int, split: Split) -> TaskSource:
    """Return `tasks` of the stage `name`: its own, or others that its schedule brings.

    Raises:
        ConfigError, TaskError: as `make_tasks` does, after the key that says where the rows come from.
    """
    try:
        return make_tasks(tasks, seed=seed, split=split)
    except (ConfigError, TaskError) as error:
        key = "tasks" if tasks == getattr(recipe.stages[name].config, "tasks", tasks) else "schedule.tasks"
        raise type(error)(f"stages.{name}.{key}: {error}") from error
