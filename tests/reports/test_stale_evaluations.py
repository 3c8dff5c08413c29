"""A run of which RL is made anew and its evaluation is not: what the terminal and the page say of that evaluation."""

import io
import re

import pytest
from rich.console import Console

from scripted_runs import make_recipe, run_recipe
from strop.reports.console import ConsoleProgress
from strop.reports.log import read_run


@pytest.fixture
def remade(tmp_path):
    """The run, and what the terminal showed while RL was made anew."""
    shown = io.StringIO()
    run = run_recipe(tmp_path / "run").run
    assert [each.stage for each in read_run(run).before_and_after] == ["before", "after"]
    with ConsoleProgress(Console(file=shown, width=120, color_system=None)) as progress:
        run_recipe(run.path, make_recipe(steps=1), start="rl", until="rl", progress=progress)
    return run, shown.getvalue()


def test_an_evaluation_of_what_was_made_anew_is_marked_and_compared_with_nothing(remade):
    run, shown = remade
    [row] = [line for line in shown.splitlines() if re.match(r"after .*%", line)]
    assert row.startswith("after (stale) ")
    assert "✓ rl: 1 step of grpo, 1 update (" in shown
    page = run.report.read_text(encoding="utf-8")
    assert "<strong>After stage before: accuracy" in page
    assert "Stale, so not compared: after. Rerun with `strop train` and --from after." in page
    assert "Stage before against stage after" not in page
    assert '<th>after <small class="stale" title="rl has another result">stale</small></th>' in page


def test_an_evaluation_that_is_made_anew_too_is_compared_again(remade):
    run, _ = remade
    run_recipe(run.path, make_recipe(steps=1), start="after")
    assert [each.stage for each in read_run(run).before_and_after] == ["before", "after"]
    page = run.report.read_text(encoding="utf-8")
    assert "Stage before against stage after" in page
    assert "stale</small>" not in page
