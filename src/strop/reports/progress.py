"""What a pipeline tells whoever watches it run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Progress(Protocol):
    """Follows a run. Calls come from one thread, in order."""

    def stage_entered(self, name: str) -> None:
        """From here on everything is for this stage; it may take a while until `stage_started` tells how many steps it has."""

    def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
        """`done_steps` of `total_steps` were done by an earlier try."""

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Step `step` of the stage is done; `metrics` is what the run log got, or empty."""

    def stage_finished(self, name: str, summary: str) -> None: ...

    def note(self, text: str) -> None:
        """Something else than a step happened in the stage, as its recipe asks."""

    def warning(self, text: str, *, stage: str = "") -> None:
        """`stage` is the one that it is about; empty where it is about the run."""

    def finished(self, results: Sequence[Mapping[str, Any]], report: Path) -> None:
        """The run is done; `results` are those of its evaluations, in order."""


class Silent:
    """Nobody watches."""

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
