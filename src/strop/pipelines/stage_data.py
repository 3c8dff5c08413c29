"""The data that stages hand to each other: rows of tasks or of conversations, one file a stage, and what was dropped."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from pydantic import TypeAdapter, ValidationError

from strop.errors import RunError, TaskError
from strop.pipelines.recipe import RolloutStage, SampledStage
from strop.pipelines.row_files import RowFile
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_tasks import open_tasks
from strop.rollout.chat import ChatFormat
from strop.runs import RunDirectory, StageDirectory, read_json, writing_to
from strop.tasks import RowTasks, TaskSource
from strop.types import Task, Trajectory

Row: TypeAlias = Mapping[str, Any]
TASK = TypeAdapter(Task)
TRAJECTORY = TypeAdapter(Trajectory)


def kept_path(directory: StageDirectory) -> Path:
    """What a data stage hands on."""
    return directory.path / "data" / "kept.jsonl"


def dropped_path(directory: StageDirectory) -> Path:
    """What it does not, with reasons."""
    return directory.path / "data" / "dropped.jsonl"


def outcomes_path(directory: StageDirectory) -> Path:
    """How often each task was solved: what the rules `agreement` and `difficulty` of a curation read."""
    return directory.path / "data" / "outcomes.jsonl"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with RowsWriter(path) as file:
        for row in rows:
            file.add(row)


class RowsWriter:
    """Writes rows as they come, so that no more of them than one are in memory; the file is there whole, or not at all.

    A context: left by an exception, it leaves no file, and one that was there before stays.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")

    def __enter__(self) -> Self:
        with writing_to(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("w", encoding="utf-8")
        return self

    def add(self, row: Row) -> None:
        with writing_to(self._path):
            self._file.write(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            with writing_to(self._path), self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def rows_of(run: RunDirectory, stage: str) -> Iterator[dict[str, Any]]:
    """The rows that `stage` made, one at a time. Raises `RunError` as `open_rows` does, when the first is asked for."""
    with open_rows(run, stage) as rows:
        yield from rows


def open_rows(run: RunDirectory, stage: str) -> RowFile:
    """The rows that `stage` made, by number. Raises `RunError` when it is not done, or its file is gone."""
    path = run.path / str(read_json(run.stage(stage).done)["data"])
    if not path.exists():
        raise RunError(
            f"{path}: missing, though stage {stage!r} is done. Restore it, or run that stage anew with --from {stage}."
        )
    return RowFile(path)


def tasks_to_play(context: StageContext, stage: RolloutStage | SampledStage) -> TaskSource:
    """The tasks of the stages in `data`, one set after the other; without any, the training tasks of `tasks`.

    Raises:
        TaskError: there are none, or a row of them is no task.
    """
    if not stage.data:
        return open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    tasks = _StageTasks(context.run, stage.data)
    if not len(tasks):
        raise TaskError(
            f"stages.{context.name}.data: {', '.join(stage.data)} kept no task, so there is nothing to roll out. Loosen what"
            " they keep (a filter's min_right and max_right), or leave data out."
        )
    return RowTasks(tasks, seed=context.seed("tasks"))


class _StageTasks:
    """The tasks that some stages made, one set after the other, left on disk. Each row is read once before any is played."""

    def __init__(self, run: RunDirectory, stages: Sequence[str]) -> None:
        self._files = [(name, open_rows(run, name)) for name in stages]
        self._starts = list(accumulate((len(rows) for _, rows in self._files), initial=0))
        for number in range(len(self)):
            self[number]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int, /) -> Task:
        """Raises `IndexError` where there is no such task, and `TaskError` where its row is none."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = bisect_right(self._starts, number) - 1
        name, rows = self._files[place]
        number -= self._starts[place]
        try:
            return TASK.validate_python(rows[number])
        except ValidationError as error:
            wrong = ".".join(map(str, error.errors()[0]["loc"]))
            raise TaskError(
                f"row {number + 1} of what stage {name!r} made is no task ({wrong}: {error.errors()[0]['msg']}). Restore its"
                f" file, or run it anew with --from {name}."
            ) from error


def tokenizer_digest(chat: ChatFormat) -> str:
    """Equal for two models that write every conversation with the same ids: one vocabulary and one template."""
    vocabulary = sorted(chat.tokenizer.get_vocab().items())
    said = json.dumps([vocabulary, chat.tokenizer.chat_template], ensure_ascii=False)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def as_conversation(task: Task, trajectory: Trajectory, *, question: Sequence[Row], prefill: str, facts: Row) -> dict[str, Any]:
    """A rollout as a row of conversations: messages for whoever reads such, and the rollout itself, ids and all.

    Args:
        question: the messages before the first turn.
        prefill: what was put into the policy's mouth; it belongs to the first turn's text.
        facts: which tokenizer and prompt the ids are of.
    """
    messages = [dict(each) for each in question]
    for number, turn in enumerate(trajectory.turns):
        messages.append({"role": "assistant", "content": (prefill if number == 0 else "") + turn.completion_text})
        messages += [{"role": "tool", "content": call.text} for call in turn.calls if turn.observation_ids]
    key = trajectory.key
    rollout = TRAJECTORY.dump_python(trajectory, mode="json")
    for said in rollout["turns"]:  # what a clock or the load of an engine said is in rollouts/; these rows repeat (law 8)
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
