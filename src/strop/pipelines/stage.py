"""What every stage is given, and what it builds the same way: tools, players, a tokenizer, a place to write."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from strop.engine.config import EngineConfig, SglangConfig, VllmConfig
from strop.engine.opening import Detokenizer
from strop.engine.protocol import InferenceEngine
from strop.errors import ModelError, RunError
from strop.pipelines.recipe import Recipe, RlStage, Stage
from strop.reports.progress import Progress
from strop.reports.trackers import Tracker
from strop.rewards.service import RunService
from strop.rollout.branching import Branching
from strop.rollout.chat import ChatFormat
from strop.rollout.environment import ToolEnvironments, ToolObserverFactory
from strop.rollout.fleet import Fleet
from strop.rollout.play import Judge, Player
from strop.rollout.prompt import load_prompt
from strop.rollout.protocol import Reward
from strop.runs import LineWriter, RunDirectory, StageDirectory, read_json, read_lines, write_text
from strop.seeds import derive_seed
from strop.tools.protocol import Tool


class EngineFactory(Protocol):
    """Opens the engines that sample from a model directory, as many as `config` says; whoever asked closes them."""

    async def __call__(
        self,
        model_directory: Path,
        config: EngineConfig | VllmConfig | SglangConfig,
        *,
        detokenize: Detokenizer,
        logs: Path,
        names: Sequence[str],
    ) -> Sequence[InferenceEngine]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One stage of one run: what it shares with the others, and its own place."""

    name: str
    recipe: Recipe
    run: RunDirectory
    runner: RunService
    toolbox: Sequence[Tool]
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

    def warn(self, text: str) -> None:
        """Tell the user now, and keep it for the report."""
        self.event("warning", text=text)
        self.progress.warning(text, stage=self.name)

    def metrics(self, *, done_steps: int) -> StageMetrics:
        """This stage's part of metrics.jsonl and updates.jsonl, cut back to `done_steps`."""
        return StageMetrics(self, done_steps)

    def tools(self) -> list[Tool]:
        return list(self.toolbox)


class StageMetrics:
    """Appends the metrics of each step, and shows them. Steps after the checkpoint that a run resumes from are cut off."""

    def __init__(self, context: StageContext, done_steps: int) -> None:
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

        Figures that are not finite are left out: JSON has none, and what made them so is told by the updates that it spoilt.
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


def cut_back(path: Path, stage: str, done_steps: int) -> list[Mapping[str, Any]]:
    """Take the stage's lines of later steps off `path`; returns those of it that stay."""
    lines = read_lines(path)
    kept = [line for line in lines if line["stage"] != stage or line["step"] <= done_steps]
    if len(kept) < len(lines):
        write_text(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))
    return [line for line in kept if line["stage"] == stage]


def model_of(run: RunDirectory, stage: str) -> Path:
    """The model directory that `stage` made. Raises `RunError` when the stage is not done, or its directory is gone."""
    path = run.path / str(read_json(run.stage(stage).done)["model"])
    if not path.exists():
        raise RunError(
            f"{path}: missing, though stage {stage!r} is done. Restore it, or run that stage anew with --from {stage}."
        )
    return path


def weights_digest(model: Path) -> str:
    """A digest of the weight files of a model directory."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


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


def make_player(
    stage: Stage,
    *,
    engine: InferenceEngine | Fleet,
    chat: ChatFormat,
    tools: Sequence[Tool],
    reward: Reward,
    observe: ToolObserverFactory | None = None,
) -> Player:
    """Everything that the stage's tasks are played with."""
    environments = ToolEnvironments(chat, load_prompt(stage.prompt), tools, stage.limits, observe)
    return Player(
        engine=engine,
        environments=environments,
        judge=Judge(reward=reward, weights=stage.reward.weights),
        sampling=stage.sampling,
        stop_ids=chat.stop_ids,
        stop_strings=environments.stop_strings,
        branching=branching_of(stage, chat),
    )


def branching_of(stage: Stage, chat: ChatFormat) -> Branching | None:
    """Where the stage's rollouts fork; None where they do not."""
    config = stage.branching if isinstance(stage, RlStage) else None
    return None if config is None else Branching(config=config, vocab_size=len(chat.tokenizer))
