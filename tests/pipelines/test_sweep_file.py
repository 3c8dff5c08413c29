"""What a sweep file may say, and how its mistakes are named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.pipelines.sweep_file import load_sweep, toml_value

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
    assert (stage.trainer.optimizer.lr, stage.epochs) == (3e-4, 2)


def test_named_arms_change_several_keys_together_and_cross_a_grid(load):
    sweep = load(
        'seeds = [3, 4]\n[arms.plain]\n[arms.no_std]\n"stages.rl.method" = { name = "grpo", advantage = "mean_centered" }\n'
        '"stages.rl.steps" = 1\n[grid]\n"stages.rl.epochs" = [1, 2]\n'
    )
    assert [arm.name for arm in sweep.arms] == ["plain-epochs-1", "plain-epochs-2", "no_std-epochs-1", "no_std-epochs-2"]
    recipe = sweep.arms[3].recipes[4]
    assert recipe.stages["rl"].method.advantage == "mean_centered"
    assert (recipe.stages["rl"].steps, recipe.stages["rl"].epochs, recipe.seed) == (1, 2, 4)
    assert recipe.name == "no_std-epochs-2-seed-4"


def test_keys_that_end_alike_are_told_apart_in_names(load):
    sweep = load(f'[grid]\n"{LR}" = [1e-4]\n"stages.sft.trainer.optimizer.lr" = [1e-3]\n')
    assert [arm.name for arm in sweep.arms] == ["rl.trainer.optimizer.lr-0.0001-sft.trainer.optimizer.lr-0.001"]


def test_what_every_arm_has_comes_before_its_own_changes(load):
    sweep = load(f'set = {{ "stages.rl.steps" = 1, "{LR}" = 0.5 }}\n[arms.a]\n[arms.b]\n"{LR}" = 0.25\n', "stages.rl.steps=2")
    assert [arm.recipes[0].stages["rl"].trainer.optimizer.lr for arm in sweep.arms] == [0.5, 0.25]
    assert {arm.recipes[0].stages["rl"].steps for arm in sweep.arms} == {2}  # the command line beats the file


def test_the_words_of_a_run_are_those_of_strop_train(load):
    sweep = load(f'seeds = [7]\n[set]\nthreads = 1\n[grid]\n"{LR}" = [1e-5]\n')
    words = ["--set", "threads=1", "--set", f"{LR}=1e-05", "--set", "seed=7", "--name", "lr-1e-05-seed-7"]
    assert sweep.words(sweep.arms[0], 7) == [str(TINY), *words]


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_a_value_written_as_toml_is_read_as_itself(value):
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


def test_without_arms_there_is_one_with_several_seeds(load):
    sweep = load("seeds = [0, 1]")
    assert [arm.name for arm in sweep.arms] == ["base"]
    assert list(sweep.arms[0].recipes) == [0, 1]


def test_stage_and_result_are_the_last_that_say_anything(load):
    sweep = load("")
    assert (sweep.stage, sweep.result) == ("rl", "after.accuracy")


def test_controls_are_not_what_arms_are_compared_by(load):
    assert load('[set]\n"stages.after.tools" = "none"\n').result == "before.accuracy"


def test_every_arm_that_is_no_recipe_is_named_with_its_key_and_the_nearest_one(load):
    text = '[arms.right]\n[arms.typo]\n"stages.rl.grup_size" = 4\n[arms.odd]\n"stages.rl.updates_per_step" = 3\n'
    said = mistake(load, text)
    assert "arm 'typo': " in said
    assert "stages.rl.grup_size: unknown key. Did you mean 'group_size'?" in said
    assert "arm 'odd': " in said
    assert "Nearest that do: updates_per_step = 2" in said
    assert "arm 'right'" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[arms.a]\n"stages.lr.steps" = 4', "arm 'a': stages.lr.steps: the recipe has no stage 'lr'. Did you mean 'rl'?"),
        ("[arms.a]\nstages.rl.steps = 4", 'arms.a.stages is a table, which would replace all of stages. Write whole keys'),
        ('[grid]\n"stages.rl.epochs" = 2', "grid.stages.rl.epochs"),
        ('[grid]\n"stages.rl.epochs" = []', "grid.stages.rl.epochs is empty: give it the values to try."),
        ('[grid]\n"stages.rl.epochs" = [1, 1]', "two arms would be called 'epochs-1'"),
        ('[grid]\n"sampling" = [{ max_tokens = 2 }]', "grid.sampling: {'max_tokens': 2} cannot be part of a name."),
        ('[grid]\n"threads" = [1]\n[arms.a]\nthreads = 2', "arms.a sets threads, which the grid varies"),
        ("[arms.a]\nseed = 2", "arms.a.seed: the sweep sets it itself. Write seeds = [0, 1]."),
        ("[arms.a]\n[arms.b]", "arms 'a' and 'b' are the same recipe."),
        ('[arms."a/b"]', "arms.a/b: names a directory"),
        ("seeds = [1, 1]", "the same seed twice is the same run twice"),
        ("seeds = []", "seeds: "),
        ("sedes = [1]", "sedes: unknown key. Did you mean 'seeds'?"),
        ('result = "later.accuracy"', "There are before.accuracy, after.accuracy."),
        ('stage = "after"', "stage is 'after', but the stages that train, in every arm, are: sft, rl."),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place_and_the_remedy(load, text, said):
    assert said in mistake(load, text)


def test_a_file_that_is_not_there_is_called_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"lr\.toml: no such sweep file"):
        load_sweep(tmp_path / "lr.toml")


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('recipe = "tinny.toml"')
    with pytest.raises(ConfigError, match=r"tinny\.toml: no such recipe"):
        load_sweep(path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_that_come_along_are_whole(path):
    sweep = load_sweep(path)
    assert len(sweep.arms) > 1
    assert len(sweep.file.seeds) >= 3
    assert sweep.result
    assert sweep.file.description
