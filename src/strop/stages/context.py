"""What every stage gets, and what all stages build in one way: tools, players, a tokenizer, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from strop.engine.protocol import InferenceEngine
from strop.errors import ModelError, RunError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Stage
from strop.reports.trackers import Tracker
from strop.rewards import RunService
from strop.rollout.chat_template import ChatFormat
from strop.run_directory import LineWriter, RunDirectory, StageDirectory, cut_back, read_json
from strop.tools.protocol import Tool
from strop.types import derive_seed

EngineFactory: TypeAlias = Callable[..., Awaitable[Sequence[InferenceEngine]]]
"""Opens the engines that sample from a model directory, as `strop.engine.opening.open_engines` does. The caller closes them."""


class Progress(Protocol):
    """Follows a run. Calls come from one thread, in order."""

    def stage_entered(self, name: str) -> None:
        """A stage starts to prepare; `stage_started` follows when its number of steps is known."""

    def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
        """`done_steps` of `total_steps` were done before a resume."""

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Step `step` of the stage is done; `metrics` is the line of the run log, or empty."""

    def stage_finished(self, name: str, summary: str) -> None: ...

    def note(self, text: str) -> None:
        """Something other than a step happened, as the recipe asks."""

    def warning(self, text: str, *, stage: str = "") -> None:
        """A warning about `stage`, or about the run if it is empty."""

    def finished(self, results: Sequence[Mapping[str, Any]], report: Path) -> None:
        """The run is done; `results` are those of its evaluations, in order."""


class Silent:
    """Implements `Progress` and shows nothing."""

    def stage_entered(self, name: str) -> None:
        pass

    def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
        pass

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def stage_finished(self, name: str, summary: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def warning(self, text: str, *, stage: str = "") -> None:
        pass

    def finished(self, results: Sequence[Mapping[str, Any]], report: Path) -> None:
        pass


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
        self._writer = LineWriter(context.run.metrics)
        self._updates_writer: LineWriter | None = None  # not every stage has a table of updates

    def append(self, step: int, metrics: Mapping[str, float], updates: Sequence[Mapping[str, Any]] = ()) -> None:
        """`metrics` of the step as a whole; `updates` of each of its updates, where it may have several.

        Figures that are not finite are left out, since JSON has none.
        """
        metrics = _finite(metrics)
        of_step = {"stage": self._context.name, "step": step}
        if updates and self._updates_writer is None:
            self._updates_writer = LineWriter(self._context.run.updates)
        for update in updates:  # first, so that a step that has its line has those of its updates too
            assert self._updates_writer is not None
            self._updates_writer.append(of_step | _finite(update))
        self.steps.append({**of_step, **metrics})
        self._writer.append(self.steps[-1])
        for tracker in self._context.trackers:
            tracker.log(metrics, step=step, stage=self._context.name)
        self._context.progress.step(metrics, step)

    def close(self) -> None:
        self._writer.close()
        if self._updates_writer is not None:
            self._updates_writer.close()


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
