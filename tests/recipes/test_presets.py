"""The shipped presets: every key says where it comes from, has the paper's value, and makes a plan."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from preset_values import DEVIATIONS, PUBLISHED, SWITCHES, UPDATES
from presets import NAMES, leaves_of, parsed, paths_of, preset_path, resolved, value_at

from strop.pipeline import plan as plan_module
from strop.recipe.schedule import Done
from strop.rollout.prompt import load_prompt

SOURCE = re.compile(r"^(paper|code|hand-out|ruling|ours)\b")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_says_where_its_value_comes_from(name):
    leaves = list(leaves_of(preset_path(name).read_text(encoding="utf-8")))
    assert [leaf.path for leaf in leaves if not SOURCE.match(leaf.source)] == []
    of_lines = [leaf.path for leaf in leaves]
    assert sorted(of_lines) == sorted(paths_of(parsed(name), frozenset(of_lines)))  # no key escapes the lines


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_resolves_to_the_published_values_and_makes_a_plan(name, monkeypatch):
    found = resolved(name).model_dump(mode="json")
    differing = {
        path: (value_at(found, path), published)
        for path, published in PUBLISHED[name].items()
        if value_at(found, path) != published
    }
    assert differing == {}
    monkeypatch.setattr(plan_module, "_matmul_flops", lambda: 1e11)
    assert [stage.name for stage in plan_module.plan(resolved(name))] == list(resolved(name).stages)


def test_updates_are_as_many_as_published_but_for_the_deviations_that_are_named():
    found = {}
    for (name, stage_name), published_updates in UPDATES.items():
        stage = resolved(name).stages[stage_name].config
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
    stage = resolved(name).stages[stage_name].config
    each = stage.updates_per_step
    moments = [Done(steps=step, updates=step * each) for step in range(stage.steps + 1)]
    general = [done for done in moments[:-1] if stage.at(done).tasks != stage.tasks]
    assert len(general) * each == 400
    refreshed = [after.updates for before, after in pairwise(moments) if stage.schedule[1].is_due(before, after)]
    assert refreshed == [400, 800, 1200, 1600]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_called_as_its_file_and_its_prompts_are_there(name):
    recipe = resolved(name)
    assert recipe.name == name
    for stage in recipe.stages.values():
        if hasattr(stage.config, "prompt"):
            assert load_prompt(stage.config.prompt).source
