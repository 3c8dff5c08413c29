"""Damaged files of a finished run: report, analysis and resume take them, or name the place."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JUNK, SECONDS, fuzz, survives
from hypothesis import strategies as st

from scripted_runs import make_recipe
from strop.analysis.read import read_analysis
from strop.errors import RunError
from strop.pipeline.sweep_file import toml_value
from strop.recipe.load import recipe_of
from strop.reports.page import write_report
from strop.run_directory import RunDirectory, packed
from strop.runs.resume import select

DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 10**6)),
    st.tuples(st.just("flip"), st.integers(0, 10**6)),
    st.tuples(st.just("remove"), st.just(0)),
    st.tuples(st.just("directory"), st.just(0)),
    st.tuples(
        st.just("write"), st.one_of(JUNK.map(toml_value), st.sampled_from(["[" * 3000, "9" * 5000, '"\\ud800"', "{}", "null"]))
    ),
    st.tuples(st.just("append"), JUNK.map(toml_value)),
)


def damage(path: Path, how: str, what: Any) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[: what % (len(content) + 1)])
    elif how == "flip" and content:
        content[what % len(content)] ^= 1 << what % 8
        path.write_bytes(content)
    elif how in ("remove", "directory"):
        path.unlink()
        if how == "directory":
            path.mkdir()
    elif how == "write":
        path.write_text(what, encoding="utf-8")
    elif how == "append":
        path.write_bytes(content + what.encode() + b"\n")


@pytest.mark.skipif(not SECONDS, reason="each example copies a run; `make fuzz` runs it")
def test_a_damaged_run_is_read_or_the_damage_has_a_place(scripted_run: Any, tmp_path: Path) -> None:
    whole = scripted_run.run.path
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.json*") if path.is_file())

    def check(drawn: tuple[Path, tuple[str, Any]]) -> None:
        file, (how, what) = drawn
        path = tmp_path / "run"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        damage(path / file, how, what)
        run, places = RunDirectory(path), {str(path)}
        survives(lambda: write_report(run), places=places)
        survives(lambda: read_analysis(run, stage=None, steps=None), places={*places, "rl", "stage"})
        survives(lambda: recipe_of(run), places=places)
        survives(lambda: select(run, make_recipe(), "strop train scripted.toml", until=None, start=()), places=places)

    fuzz(st.tuples(st.sampled_from(files), DAMAGE), check)


def test_rollouts_of_an_evaluation_that_cannot_be_read_are_one_error(scripted_run: Any, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(scripted_run.run.path, run.path)
    path = run.stage("before").rollouts(0)
    damage(packed(path), "directory", 0)
    with pytest.raises(RunError, match=re.escape(str(path))):
        write_report(run)


def test_a_last_rollout_that_a_kill_cut_short_is_left_out_of_the_report(scripted_run: Any, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(scripted_run.run.path, run.path)
    path = run.stage("before").rollouts(0)
    path.write_bytes(gzip.decompress(packed(path).read_bytes()).splitlines()[0][:-20])
    write_report(run)
