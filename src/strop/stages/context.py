"""What every stage gets, its metrics, and what stages pass to each other: models, tasks, conversations."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from strop.engine.protocol import InferenceEngine
from strop.errors import ConfigError, ModelError, RunError, TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys, Stage
from strop.reports.trackers import Progress, Tracker
from strop.rewards import RunService
from strop.rollout.chat_template import ChatFormat
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import Calls
from strop.run_directory import LineWriter, RunDirectory, StageDirectory, cut_back, iter_lines, read_json
from strop.tasks import RowTasks, TaskSource, make_tasks
from strop.tasks.files import RowFile
from strop.tasks.protocol import Split
from strop.tools.protocol import Tool
from strop.types import Task, Trajectory, derive_seed

Row: TypeAlias = Mapping[str, Any]
TASK = TypeAdapter(Task)
TRAJECTORY = TypeAdapter(Trajectory)
EngineFactory: TypeAlias = Callable[..., Awaitable[Sequence[InferenceEngine]]]
"""Opens the engines that sample from a model directory, as `strop.engine.opening.open_engines` does. The caller closes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One stage of one run: what it shares with the others, and its own place."""

    name: str
    stage: Stage
    recipe: Recipe
    run: RunDirectory
    runner: RunService
    tools: Sequence[Tool]
    open_engines: EngineFactory
    progress: Progress
    trackers: Sequence[Tracker]
    events: LineWriter

    @property
    def directory(self) -> StageDirectory:
        return self.run.stage(self.name)

    def seed(self, *parts: int | str) -> int:
        """A seed of this run and stage."""
        return derive_seed("run", self.recipe.seed, self.name, *parts)

    def event(self, event: str, **facts: Any) -> None:
        """Append to the run's events."""
        self.events.append({"event": event, "stage": self.name, "time": time.time(), **facts})

    def started(self, total: int, done: int) -> None:
        """Show that the stage has begun, and that `done` of its `total` steps are done."""
        self.progress.stage_started(self.name, self.stage.kind, total, done)

    def warn(self, text: str) -> None:
        """Tell the user now, and keep it for the report."""
        self.event("warning", text=text)
        self.progress.warning(text, stage=self.name)


class StageMetrics:
    """A stage's part of metrics.jsonl and updates.jsonl: appends each step, and shows it.

    Steps after the checkpoint that a run resumes from, number `done_steps`, are cut off.
    """

    def __init__(self, context: StageContext, *, done_steps: int) -> None:
        self.steps: list[Mapping[str, Any]] = cut_back(context.run.metrics, context.name, done_steps)
        """What each step got, those of earlier tries too."""
        self.last: Mapping[str, Any] = self.steps[-1] if self.steps else {}
        """What the last step before this try got; empty when there was none."""
        cut_back(context.run.updates, context.name, done_steps)
        self._context = context

    def append(self, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, Any]] = ()) -> None:
        """`metrics` of the step as a whole; `updates` of each of its updates, where it may have several.

        Figures that are not finite are left out, since JSON has none.
        """
        metrics = _finite(metrics)
        of_step = {"stage": self._context.name, "step": step}
        self.steps.append({**of_step, **metrics})
        run = self._context.run
        # Updates first, so that a step that has its line has those of its updates too.
        for path, lines in ((run.updates, [of_step | _finite(update) for update in updates]), (run.metrics, self.steps[-1:])):
            if lines:  # not every stage has a table of updates
                with closing(LineWriter(path)) as writer:
                    for line in lines:
                        writer.append(line)
        for tracker in self._context.trackers:
            tracker.log(metrics, step=step, stage=self._context.name)
        self._context.progress.step(metrics, step)


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if not isinstance(value, float) or math.isfinite(value)}


def product_of(run: RunDirectory, stage: str) -> Path:
    """Return the model directory or the file of rows that `stage` made. Raises `RunError` if it is not there."""
    done = read_json(run.stage(stage).done)
    path = run.path / str(done.get("model") or done["data"])
    if not path.exists():
        raise RunError(
            f"{path}: missing, although stage {stage!r} is done. Restore it, or rerun that stage with --from {stage}."
        )
    return path


def load_chat(model: Path) -> ChatFormat:
    """The tokenizer of a model directory as a chat format. Raises `ModelError`."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no tokenizer that transformers can load: {error}. Save one there with tokenizer.save_pretrained."
        ) from error
    return ChatFormat(tokenizer)


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
    prompt, specs, digest = load_prompt(prompt_name), [tool.spec for tool in context.tools], tokenizer_digest(chat)

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
            "prompt": prompt_name,
            "tokenizer": digest,
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
