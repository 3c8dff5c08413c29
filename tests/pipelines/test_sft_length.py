"""How many updates an SFT stage makes: as many as its passes over the demonstrations need, or fewer if `steps` says so."""

import math

import pytest

from scripted_runs import RECIPE, recipe_of, run_recipe
from strop.errors import ConfigError
from strop.run_directory import read_json, read_lines
from strop.stages.context import TRAJECTORY
from strop.stages.conversations import as_demonstration


def rates(tmp_path, **sft):
    """The learning rate of each update of an SFT stage."""
    table = {key: value for key, value in RECIPE["stages"]["sft"].items() if key != "steps"} | sft
    run = run_recipe(tmp_path / "run", recipe_of({"base": RECIPE["stages"]["base"], "sft": table})).run
    return [line["update/learning_rate"] for line in read_lines(run.metrics) if line["stage"] == "sft"]


def optimizer(**keys):
    return {"trainer": {"optimizer": {"lr": 1e-3, "schedule": "cosine"} | keys}}


def test_passes_over_the_demonstrations_and_a_share_of_warm_up_become_updates(tmp_path):
    found = rates(tmp_path, num_demonstrations=10, batch_size=4, epochs=2, **optimizer(warmup_fraction=0.4))
    assert len(found) == 5  # 20 of 4 at a time
    assert found[:3] == pytest.approx([0.5e-3, 1e-3, 1e-3])  # two of five are warm-up; then the cosine begins
    assert found[3:] == pytest.approx([0.75e-3, 0.25e-3])


def test_steps_end_the_passes_early(tmp_path):
    assert len(rates(tmp_path, num_demonstrations=10, batch_size=4, epochs=2, steps=3)) == 3


def test_rows_of_one_length_decide_the_updates_of_a_pass(tmp_path):
    found = rates(tmp_path, num_demonstrations=10, batch_size=4, epochs=1, row_length=16)
    rows = read_lines(tmp_path / "run" / "stages" / "sft" / "data" / "demonstrations.jsonl")
    num_ids = sum(len(as_demonstration(TRAJECTORY.validate_python(row["trajectory"])).ids) for row in rows)
    assert len(found) == math.ceil((num_ids - 1) // 16 / 4)
    summary = read_json(tmp_path / "run" / "stages" / "sft" / "done.json")["summary"]
    assert f"on {(num_ids - 1) // 16} rows of 16 tokens" in summary


def test_a_cosine_that_warm_up_leaves_no_room_for_is_refused_once_the_rows_are_read(tmp_path):
    with pytest.raises(ConfigError, match=r"sft.trainer.optimizer.warmup_updates is 9, but the stage has 5 updates in all"):
        rates(tmp_path, num_demonstrations=10, batch_size=4, epochs=2, **optimizer(warmup_updates=9))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 2} | optimizer(warmup_fraction=0.8), "warmup_fraction makes 2, but the stage has 2 updates in all"),
        ({"steps": None}, "steps and epochs are both missing"),
        (optimizer(warmup_updates=2, warmup_fraction=0.1), "warmup_updates and warmup_fraction are both set"),
    ],
)
def test_a_length_that_is_missing_or_given_twice_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of({"base": RECIPE["stages"]["base"], "sft": RECIPE["stages"]["sft"] | change})
