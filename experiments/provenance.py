"""What the results of an experiment were made of: seconds of its runs, the commit of the code, libraries, the processor."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from strop.run_directory import RunDirectory, read_json, read_lines

CODE = ("src", "recipes", "experiments", ":(exclude)experiments/results")
"""What results are made by, as git names it; what only tells of them is left out."""
LIBRARIES = ("strop", "torch")


def provenance(runs: Iterable[RunDirectory], root: Path) -> dict[str, Any]:
    """Of finished runs, and of the code in `root` as it is when their results are written, which may be after they ran."""
    runs = list(runs)
    return {"seconds": seconds_of(runs), "code": code_of(root), "versions": versions_of(runs), "processor": processor()}


def provenance_of_call(began: float, root: Path, libraries: Iterable[str]) -> dict[str, Any]:
    """The same of a program without runs that began at `began`, by `time.monotonic`."""
    seconds = {"wall": time.monotonic() - began}
    versions = {name: version(name) for name in libraries}
    return {"seconds": seconds, "code": code_of(root), "versions": versions, "processor": processor()}


def processor() -> str:
    path = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", path.read_text(encoding="utf-8")) if path.exists() else []
    return names[0] if names else platform.processor()


def seconds_of(runs: Iterable[RunDirectory]) -> dict[str, float]:
    """Of all stages: `of_runs` added up, `wall` as long as one was under way at least, so without pauses between two calls.

    Stages that several runs share, having been made once, count once. Of a stage that was interrupted its last try counts.
    """
    spans = sorted({span for run in runs for span in _spans(run)})
    wall, until = 0.0, float("-inf")
    for begin, end, _ in spans:
        wall += max(0.0, end - max(begin, until))
        until = max(until, end)
    return {"of_runs": sum(end - begin for begin, end, _ in spans), "wall": wall}


def _spans(run: RunDirectory) -> list[tuple[float, float, str]]:
    """Begin, end and name of each finished stage. One that was taken over from another run has its very times."""
    ends = {line["stage"]: float(line["time"]) for line in read_lines(run.events) if line["event"] == "stage_finished"}
    seconds = {stage: float(read_json(run.stage(stage).done)["time_s"]) for stage in ends if run.stage(stage).done.exists()}
    return [(ends[stage] - seconds[stage], ends[stage], stage) for stage in seconds]


def versions_of(runs: Iterable[RunDirectory]) -> dict[str, str]:
    """Of `LIBRARIES`, with which the runs were begun; several where they differ."""
    found = [read_json(run.manifest)["versions"] for run in runs]
    return {name: ", ".join(sorted({versions[name] for versions in found})) for name in LIBRARIES}


def code_of(root: Path) -> dict[str, Any]:
    """The commit, and whether the code differs from it; "unknown" where git or its history is missing."""
    is_checkout = (root / ".git").exists()  # else git would answer for a repository that lies around it
    commit = _git(root, "rev-parse", "HEAD") if is_checkout else None
    if commit is None:
        return {"commit": "unknown"}
    return {"commit": commit, "is_dirty": bool(_git(root, "status", "--porcelain", "--", *CODE))}


def _git(root: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
