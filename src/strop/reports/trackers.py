"""What follows a run: its progress, and copies of the run log in other tools, which are optional extras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from strop.errors import UserError
from strop.run_directory import RunDirectory


class Progress:
    """Follows a run, and shows nothing of it by itself. Calls come from one thread, in order."""

    def stage_entered(self, name: str) -> None:
        """A stage starts to prepare; `stage_started` follows when its number of steps is known."""

    def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
        """`done_steps` of `total_steps` were done before a resume."""

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Step `step` of the stage is done; `metrics` is the line of the run log, or empty."""

    def stage_finished(self, name: str, summary: str) -> None:
        """The stage is done; `summary` is one sentence."""

    def note(self, text: str) -> None:
        """Something other than a step happened, as the recipe asks."""

    def warning(self, text: str, *, stage: str = "") -> None:
        """A warning about `stage`, or about the run if it is empty."""

    def finished(self, results: Sequence[Mapping[str, Any]], report: Path) -> None:
        """The run is done; `results` are those of its evaluations, in order."""


class Tracker(Protocol):
    """One experiment in another tool."""

    def log(self, metrics: Mapping[str, float], *, step: int, stage: str) -> None:
        """The metrics of one step of one stage. Each stage counts its own steps."""

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in a directory; `tensorboard --logdir` shows them. Tags are stage/metric."""

    def __init__(self, directory: Path) -> None:
        """Raises `UserError` when TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("tensorboard") from error
        self._writer: Any = SummaryWriter(log_dir=str(directory))  # its types differ from release to release

    def log(self, metrics: Mapping[str, float], *, step: int, stage: str) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(f"{stage}/{key}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of the project `strop` at Weights & Biases, resumed under the same name. Keys are stage/metric.

    Metrics of validation have stage/eval_step as their x-axis, all others stage/train_step. Both hold the step of the stage.
    """

    def __init__(self, name: str, recipe: Mapping[str, Any], directory: Path) -> None:
        """Raises `UserError` when wandb is not installed."""
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("wandb") from error
        directory.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project="strop", name=name, id=name, resume="allow", config=dict(recipe), dir=str(directory)
        )
        self._defined: set[str] = set()

    def log(self, metrics: Mapping[str, float], *, step: int, stage: str) -> None:
        row: dict[str, float] = {f"{stage}/train_step": step}
        for key, value in metrics.items():
            name, axis = f"{stage}/{key}", f"{stage}/{'eval' if key.startswith('validation/') else 'train'}_step"
            if name not in self._defined:
                self._run.define_metric(name, step_metric=axis)
                self._defined.add(name)
            row |= {name: value, axis: step}
        self._run.log(row)

    def close(self) -> None:
        self._run.finish()


def make_trackers(
    kinds: Sequence[Literal["tensorboard", "wandb"]], *, run: RunDirectory, name: str, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers that a recipe asks for, in its order.

    Raises:
        UserError: one of them is not installed; the message names the extra.
    """
    return [
        TensorBoardTracker(run.path / kind) if kind == "tensorboard" else WandbTracker(name, recipe, run.path / kind)
        for kind in kinds
    ]


def _not_installed(extra: str) -> UserError:
    return UserError(
        f"trackers: {extra!r} is asked for, but it is not installed. pip install 'strop[{extra}]', or take it off the recipe's"
        " trackers: metrics.jsonl and report.html hold the same figures."
    )
