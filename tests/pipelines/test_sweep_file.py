"""What a sweep file may say, and how its mistakes are named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.pipeline.sweep_file import load_sweep, toml_value

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "recipes" / "sweeps").glob("*.toml"))
TINY = Path(__file__).parent / "tiny.toml"
LR = "stages.rl.trainer.optimizer.lr"


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "sweep.toml"
        path.write_text(f'recipe = "{TINY}"\n' + text)
        return load_sweep(path, overrides)

    return load


def mistake(load, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_grid_is_an_arm_for_each_combination(load):
    sweep = load(f'[grid]\n"{LR}" = [1e-4, 3e-4]\n"stages.rl.epochs" = [1, 2]\n')
    assert [arm.name for arm in sweep.arms] == [
        "lr-0.0001-epochs-1",
        "lr-0.0001-epochs-2",
        "lr-0.0003-epochs-1",
        "lr-0.0003-epochs-2",
    ]
    stage = sweep.arms[3].recipes[0].stages["rl"]
    assert (stage.config.trainer.optimizer.lr, stage.config.epochs) == (3e-4, 2)


def test_named_arms_change_several_keys_together_and_cross_a_grid(load):
    sweep = load(
        'seeds = [3, 4]\n[arms.plain]\n[arms.no_std]\n"stages.rl.method" = { kind = "grpo", advantage = "mean_centered" }\n'
        '"stages.rl.steps" = 1\n[grid]\n"stages.rl.epochs" = [1, 2]\n'
    )
    assert [arm.name for arm in sweep.arms] == ["plain-epochs-1", "plain-epochs-2", "no_std-epochs-1", "no_std-epochs-2"]
    recipe = sweep.arms[3].recipes[4]
    assert recipe.stages["rl"].config.method.config.advantage == "mean_centered"
    assert (recipe.stages["rl"].config.steps, recipe.stages["rl"].config.epochs, recipe.seed) == (1, 2, 4)
    assert recipe.name == "no_std-epochs-2-seed-4"


def test_keys_that_end_alike_are_told_apart_in_names(load):
    sweep = load(f'[grid]\n"{LR}" = [1e-4]\n"stages.sft.trainer.optimizer.lr" = [1e-3]\n')
    assert [arm.name for arm in sweep.arms] == ["stages.rl.trainer.optimizer.lr-0.0001-stages.sft.trainer.optimizer.lr-0.001"]


def test_what_every_arm_has_comes_before_its_own_changes(load):
    sweep = load(f'set = {{ "stages.rl.steps" = 1, "{LR}" = 0.5 }}\n[arms.a]\n[arms.b]\n"{LR}" = 0.25\n', "stages.rl.steps=2")
    assert [arm.recipes[0].stages["rl"].config.trainer.optimizer.lr for arm in sweep.arms] == [0.5, 0.25]
    assert {arm.recipes[0].stages["rl"].config.steps for arm in sweep.arms} == {2}  # the command line beats the file


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_a_value_written_as_toml_is_read_as_itself(value):
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


def test_stage_and_result_are_the_last_that_say_anything(load):
    sweep = load("")
    assert (sweep.stage, sweep.result) == ("rl", "after.accuracy")


def test_every_arm_that_is_no_recipe_is_named_with_its_key_and_the_nearest_one(load):
    text = '[arms.right]\n[arms.typo]\n"stages.rl.grup_size" = 4\n[arms.odd]\n"stages.rl.updates_per_step" = 3\n'
    said = mistake(load, text)
    assert "arm 'typo': " in said
    assert "stages.rl.grup_size: unknown key. Did you mean 'group_size'?" in said
    assert "arm 'odd': " in said
    assert "no multiple of updates_per_step = 3" in said
    assert "arm 'right'" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[arms.a]\n"stages.lr.steps" = 4', "arm 'a': stages.lr.steps: the recipe has no stage 'lr'. Did you mean 'rl'?"),
        ('[grid]\n"stages.rl.epochs" = 2', "grid.stages.rl.epochs"),
        ('[grid]\n"stages.rl.epochs" = []', "grid.stages.rl.epochs"),
        ('[grid]\n"stages.rl.epochs" = [1, 1]', "two arms have the name 'epochs-1'"),
        ('[grid]\n"sampling" = [{ max_tokens = 2 }]', "grid.sampling"),
        ('[grid]\n"threads" = [1]\n[arms.a]\nthreads = 2', "arms.a sets threads, which the grid varies"),
        ("[arms.a]\nseed = 2", "arms.a.seed: the sweep sets this key. Write seeds = [0, 1]."),
        ('[arms."a/b"]', "arms.a/b"),
        ("seeds = []", "seeds: "),
        ("sedes = [1]", "sedes: unknown key. Did you mean 'seeds'?"),
        ('result = "later.accuracy"', "There are before.accuracy, after.accuracy."),
        ('stage = "after"', "stage is 'after', but the stages that train, in every arm, are: sft, rl."),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place_and_the_remedy(load, text, said):
    assert said in mistake(load, text)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_that_come_along_are_whole(path):
    sweep = load_sweep(path)
    assert len(sweep.arms) > 1
    assert len(sweep.file.seeds) >= 3
    assert sweep.result
    assert sweep.file.description
