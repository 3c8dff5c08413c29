"""Takes finished stages over from a run whose recipe begins alike, so that arms of one seed share their cold start.

What a stage makes follows from the recipe's root, the stages before it, and itself (law 8): equal ones make equal models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from strop.pipelines.claim import alone_in, differences
from strop.runs import RunDirectory, read_lines, write_directory, write_text

Resolved = Mapping[str, Any]
"""A `Recipe` as JSON, as the manifest of a run holds it."""


def num_common(one: Resolved, other: Resolved) -> int:
    """How many stages two recipes have in common, from the first on; keys that change no result may differ."""
    roots = [{key: value for key, value in each.items() if key not in ("name", "stages")} for each in (one, other)]
    if differences(*roots):
        return 0
    num = 0
    for (name, stage), (other_name, other_stage) in zip(one["stages"].items(), other["stages"].items(), strict=False):
        if name != other_name or differences({"stages": {name: stage}}, {"stages": {name: other_stage}}):
            break
        num += 1
    return num


def num_done(run: RunDirectory, recipe: Resolved, *, growing: Collection[str] = ()) -> int:
    """How many stages of `recipe` are finished in `run`, from the first on; those that are `growing` are not."""
    num = 0
    for name in recipe["stages"]:
        if name in growing or not run.stage(name).done.exists():
            break
        num += 1
    return num


def take_over(run: RunDirectory, source: RunDirectory, recipe: Resolved, *, num: int) -> None:
    """Put the first `num` stages of `source` into `run`, which has its manifest already; those that it has done stay.

    Files are linked where the file system can: a finished stage is never written to again.

    Raises:
        RunError: another process is running there, or the disk is full.
    """
    with alone_in(run):
        for name in list(recipe["stages"])[num_done(run, recipe) : num]:
            _take_lines(run.metrics, source.metrics, name)
            if run.updates.exists() or source.updates.exists():
                _take_lines(run.updates, source.updates, name)
            _take_lines(run.events, source.events, name)
            write_directory(run.stage(name).path, partial(_link, source.stage(name).path))


def _take_lines(path: Path, source: Path, stage: str) -> None:
    """The lines of `stage` in `path` become those of `source`."""
    lines = [line for line in read_lines(path) if line["stage"] != stage]
    lines += [line for line in read_lines(source) if line["stage"] == stage]
    write_text(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def _link(source: Path, directory: Path) -> None:
    shutil.copytree(source, directory, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
