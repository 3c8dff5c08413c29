"""The shipped presets: every key says where it comes from, has the paper's value, and makes a plan."""

from __future__ import annotations

import re

import pytest
from preset_values import PUBLISHED
from presets import NAMES, ROOT, Leaf, leaves_of, parsed, paths_of, preset_path, resolved, value_at
from typer.testing import CliRunner

from strop.cli import app
from strop.pipelines import plan as plan_module
from strop.rollout.prompt import load_prompt

SOURCE = re.compile(r"^(paper|code|hand-out|ruling|ours)\b")
LISTED = [
    "arpo-sft",
    *("rstar2-sft", "rstar2-stage1", "rstar2-paper", "rstar2-stage3", "rstar2-qwen2.5-32b", "rstar2-grpo-tool"),
    *("rstar2-released", "arpo-reasoning", "arpo-deepsearch-8b", "arpo-deepsearch-14b", "r1-zero", "r1-rl1", "r1-rl2"),
    *("cs336-zero-shot", "cs336-sft", "cs336-expert-iteration", "cs336-grpo", "cs336-grpo-off-policy", "cs336-leaderboard"),
    *("drgrpo-1.5b", "drgrpo-7b", "dapo"),
]


def test_the_presets_are_those_that_are_listed():
    assert sorted(LISTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_key_says_where_its_value_comes_from(name):
    leaves = list(leaves_of(preset_path(name).read_text(encoding="utf-8")))
    assert [leaf.path for leaf in leaves if not SOURCE.match(leaf.source)] == []
    of_lines = [leaf.path for leaf in leaves]
    assert sorted(of_lines) == sorted(paths_of(parsed(name), frozenset(of_lines)))  # no key escapes the lines


def test_a_comment_above_counts_for_the_next_line_alone_and_a_hash_in_a_string_is_none():
    text = '[a]\n# paper, Eq. 1\nx = 1\ny = 2\nz = "# code"\n[[a.b]]\nk.l = 3 # ours\n'
    assert list(leaves_of(text)) == [
        Leaf(path="a.x", source="paper, Eq. 1"),
        Leaf(path="a.y", source=""),
        Leaf(path="a.z", source=""),
        Leaf(path="a.b[0].k.l", source="ours"),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_resolves_to_the_published_values(name):
    found = resolved(name).model_dump(mode="json")
    differing = {
        path: (value_at(found, path), published)
        for path, published in PUBLISHED[name].items()
        if value_at(found, path) != published
    }
    assert differing == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_called_as_its_file_and_its_prompts_are_there(name):
    recipe = resolved(name)
    assert recipe.name == name
    for stage in recipe.stages.values():
        assert load_prompt(stage.prompt).source


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_prints_the_plan_of_every_stage_although_the_model_is_not_here(name, monkeypatch):
    monkeypatch.setattr(plan_module, "_matmul_flops", lambda: 1e11)  # a second for each preset, for estimates nobody reads
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["train", str(preset_path(name).relative_to(ROOT)), "--dry-run"])
    assert result.exit_code == 0, result.output
    for stage in resolved(name).stages:
        assert re.search(rf"^\s*{stage} ", result.output, re.MULTILINE), stage
    assert "NOT FOUND" in result.output
    assert "Nothing was run." in result.output
