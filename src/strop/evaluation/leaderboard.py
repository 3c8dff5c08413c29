"""Finds the results of evaluations below some directories and ranks them within their benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import RunError
from strop.evaluation.results import find_results, place_of, why_stale
from strop.run_directory import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One evaluation. `result` is its result.json."""

    benchmark: str
    name: str  # of the run, followed by the stage if the run has several evaluations of the benchmark
    place: Path
    result: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.result["accuracy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Benchmarks by name, each with the best entry first; and the reasons why damaged or stale results are left out."""

    benchmarks: Mapping[str, Sequence[Entry]]
    left_out: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmarks": {
                name: [{"name": each.name, "place": str(each.place), **each.result} for each in entries]
                for name, entries in self.benchmarks.items()
            },
            "left_out": list(self.left_out),
        }


def gather(directories: Sequence[Path]) -> Leaderboard:
    """Return every finished evaluation below `directories`. Damaged and stale ones are listed in `left_out`.

    Raises:
        RunError: a directory does not exist, or none holds an evaluation.
    """
    for directory in directories:
        if not directory.exists():
            raise RunError(f"{directory}: no such directory. Give directories that hold runs.")
    paths = dict.fromkeys(path.resolve() for directory in directories for path in find_results(directory))
    entries, left_out = [], []
    for path in paths:
        try:
            entries.append(_entry(path))
        except RunError as error:
            left_out.append(str(error))
    if not entries:
        reasons = "; ".join(left_out) or "there is no eval/result.json"
        raise RunError(f"{', '.join(map(str, directories))}: no evaluation to show: {reasons}. Run `strop eval` first.")
    entries = _with_stages(entries)
    entries.sort(key=lambda each: (each.benchmark, -each.accuracy, each.name, str(each.place)))
    names = dict.fromkeys(each.benchmark for each in entries)
    return Leaderboard(
        benchmarks={name: [each for each in entries if each.benchmark == name] for name in names}, left_out=left_out
    )


def _with_stages(entries: Sequence[Entry]) -> list[Entry]:
    """Add the stage to the name where a run has several evaluations of a benchmark."""
    counts = Counter((each.benchmark, _run_of(each.place)) for each in entries)
    return [
        replace(each, name=f"{each.name}/{each.place.name}") if counts[each.benchmark, _run_of(each.place)] > 1 else each
        for each in entries
    ]


def _entry(path: Path) -> Entry:
    result = read_json(path)
    if not isinstance(result, dict) or not isinstance(result.get("accuracy"), int | float):
        raise RunError(f"{path}: cannot be ranked, since it has no 'accuracy': no reward says what is right")
    place = place_of(path)
    if because := why_stale(path):
        raise RunError(f"{path}: stale, so it is not ranked: {because}. Rerun it: `strop train` with --from {place.name}")
    return Entry(
        benchmark=str(result.get("benchmark") or result.get("stage") or "unnamed"),
        name=str(result.get("run") or _run_of(place).name),
        place=place,
        result=result,
    )


def _run_of(place: Path) -> Path:
    """Return the run directory of a stage."""
    return place.parent.parent if place.parent.name == "stages" else place
