"""The shipped presets: every key says where it comes from, has the paper's value, and makes a plan."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from preset_values import DEVIATIONS, GRAPHS, LIMIT_KEYS, METHOD_KEYS, PARTS, PUBLISHED, SWITCHES, UNPUBLISHED, UPDATES
from presets import NAMES, ROOT, Leaf, differing, leaves_of, parsed, paths_of, preset_path, resolved, unlisted, value_at
from typer.testing import CliRunner

from strop.algorithms.policy_loss import Loss
from strop.cli import app
from strop.pipelines import plan as plan_module
from strop.pipelines.recipe import RlStage
from strop.pipelines.schedule import Done, due
from strop.rollout.prompt import load_prompt

SOURCE = re.compile(r"^(paper|code|hand-out|ruling|ours)\b")
LISTED = [
    "arpo-sft",
    *("rstar2-sft", "rstar2-stage1", "rstar2-paper", "rstar2-stage3", "rstar2-qwen2.5-32b", "rstar2-grpo-tool"),
    *("rstar2-released", "arpo-reasoning", "arpo-deepsearch-8b", "arpo-deepsearch-14b", "r1-zero", "r1-rl1", "r1-rl2"),
    *("cs336-zero-shot", "cs336-sft", "cs336-expert-iteration", "cs336-grpo", "cs336-grpo-off-policy", "cs336-leaderboard"),
    *("drgrpo-1.5b", "drgrpo-7b", "dapo", "rstar2-pipeline", "r1-pipeline"),
]
UNUSED = {
    "model": ("tasks", "prompt", "sampling", "limits", "reward", "trainer"),
    "conversations": ("tasks", "sampling", "limits", "reward", "trainer"),
    "sft": ("tasks", "limits", "reward"),
    "filter": ("trainer",),
    "eval": ("trainer",),
}
"""By kind of stage: tables that every stage may have, and that are none of its business in these presets."""


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
def test_every_key_of_a_preset_is_in_the_table_of_published_values_or_says_why_not(name):
    assert [path for path in unlisted(parsed(name), PUBLISHED[name]) if not re.fullmatch("|".join(UNPUBLISHED), path)] == []


def test_a_key_that_is_in_no_table_is_found_wherever_it_stands():
    tree = {
        "sampling": {"temperature": 1.0, "max_tokens": 9},
        "stages": {
            "rl": {"method": {"loss": "clip", "eps": 1e-6}, "schedule": [{"at_step": 2}], "limits": {"max_turns": 3}},
            "base": {"path": "models/mine"},
        },
    }
    published = {"stages.rl.sampling.temperature": 1.0, "stages.rl.method.loss": "clip", "stages.rl.limits": {"max_turns": 3}}
    missing = ["sampling.max_tokens", "stages.rl.method.eps", "stages.rl.schedule[0].at_step", "stages.rl.limits.max_turns"]
    assert unlisted(tree, published) == missing


@pytest.mark.parametrize("pattern", UNPUBLISHED)
def test_what_may_be_missing_in_the_table_is_missing_somewhere(pattern):
    assert any(re.fullmatch(pattern, path) for name in NAMES for path in unlisted(parsed(name), PUBLISHED[name]))


@pytest.mark.parametrize("name", NAMES)
def test_what_makes_a_method_is_in_the_table_even_where_a_preset_leaves_it_to_a_default(name):
    for stage_name, stage in resolved(name).stages.items():
        if isinstance(stage, RlStage):
            clips = ("clip_low", "clip_high") if stage.method.loss is Loss.CLIP else ()
            wanted = {f"stages.{stage_name}.method.{key}" for key in (*METHOD_KEYS, *clips)}
            if "tools" in parsed(name):
                wanted |= {f"stages.{stage_name}.limits.{key}" for key in LIMIT_KEYS}
            assert wanted - set(PUBLISHED[name]) == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_of_a_preset_stand_on_each_other_as_its_source_says(name):
    graph = {}
    for stage_name, stage in resolved(name).stages.items():
        inputs = ", ".join(each.stage for each in stage.inputs())
        graph[stage_name] = stage.kind + (f"({inputs})" if inputs else "")
    assert graph == GRAPHS[name]


@pytest.mark.parametrize(("whole", "stage"), [(whole, stage) for whole, parts in PARTS.items() for stage in parts])
def test_a_stage_of_a_whole_program_is_that_of_the_preset_that_has_it_alone(whole, stage):
    preset, name = PARTS[whole][stage]
    one, other = resolved(whole).stages[stage], resolved(preset).stages[name]
    where = ["init", "data", r"reward\.parts\.\w+\.scorer\.(path|stage)"]  # what makes it a part: on what it stands
    where += [rf"{table}\b.*" for table in UNUSED.get(one.kind, ())]
    changed = differing(one.model_dump(mode="json"), other.model_dump(mode="json"))
    assert [path for path in changed if not re.fullmatch("|".join(where), path)] == []


def test_every_rl_stage_of_a_whole_program_is_one_of_another_preset():
    stages = {(whole, name) for whole in PARTS for name, stage in resolved(whole).stages.items() if isinstance(stage, RlStage)}
    assert stages == {
        ("rstar2-pipeline", "stages_1_2"),
        ("rstar2-pipeline", "stage_3"),
        ("r1-pipeline", "rl1"),
        ("r1-pipeline", "rl2"),
    }
    assert all(stage in PARTS[whole] for whole, stage in stages)


def test_updates_are_as_many_as_published_but_for_the_deviations_that_are_named():
    found = {}
    for (name, stage_name), published_updates in UPDATES.items():
        stage = resolved(name).stages[stage_name]
        found[name, stage_name, "updates"] = (published_updates, stage.num_updates)
        entry, published = SWITCHES[name, stage_name]
        assert stage.schedule[entry].at_update == published
        each = stage.updates_per_step * stage.epochs
        begun = (Done(steps=step, updates=step * each) for step in range(stage.steps))
        switched = next(done.updates for done in begun if stage.schedule[entry].is_reached(done))
        found[name, stage_name, "switch"] = (published, switched)
    assert {key: pair for key, pair in found.items() if pair[0] != pair[1]} == {
        key: (published, ours) for key, (published, ours, _) in DEVIATIONS.items()
    }


@pytest.mark.parametrize(("name", "stage_name"), [("r1-rl2", "rl"), ("r1-pipeline", "rl2")])
def test_the_second_rl_stage_of_r1_keeps_the_last_400_updates_for_general_data_and_each_new_reference(name, stage_name):
    stage = resolved(name).stages[stage_name]
    each = stage.updates_per_step
    moments = [Done(steps=step, updates=step * each) for step in range(stage.steps + 1)]
    general = [done for done in moments[:-1] if stage.at(done).tasks != stage.tasks]
    assert len(general) * each == 400
    refreshed = [after.updates for before, after in pairwise(moments) if due([stage.schedule[1]], before, after)]
    assert refreshed == [400, 800, 1200, 1600]


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
