"""updates.jsonl: each update of a step by itself, once, whatever a kill left behind."""

import pytest

from scripted_runs import RECIPE, lines_of, make_recipe, recipe_of, run_recipe, untimed
from strop.run_directory import LineWriter, RunDirectory, read_lines
from strop.stages import context as stage_module

SEVERAL = {"steps": 3, "tasks_per_step": 4, "updates_per_step": 2, "epochs": 2, "checkpoint_every": 1}
MEANS = ("update/loss", "update/grad_norm", "policy/entropy_nats", "policy/ratio", "policy/ratio_p99", "policy/sampler_kl_nats")


def rows_of(run, step=None):
    return [untimed(row) for row in read_lines(run.updates) if step in (None, row["step"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("updates") / "run", make_recipe(**SEVERAL)).run


def test_every_update_of_a_step_has_a_row_and_their_means_are_the_steps_metrics(whole):
    steps = lines_of(whole)
    rows = rows_of(whole)
    assert [(row["stage"], row["role"]) for row in rows] == [("rl", "policy")] * len(rows)
    assert len(rows) > len(steps)
    made = [row["update"] for row in rows if row["update/skipped"] == 0]
    assert made == list(range(1, len(made) + 1))
    for line in steps:
        mine = rows_of(whole, line["step"])
        assert [row["place"] for row in mine] == list(range(1, len(mine) + 1))
        for key in MEANS:
            assert sum(row[key] for row in mine) / len(mine) == pytest.approx(line[key]), key
        assert max(row["policy/ratio_max"] for row in mine) == line["policy/ratio_max"]
    first, *later = rows_of(whole, 1)
    assert first["policy/ratio"] == first["policy/ratio_p01"] == first["policy/ratio_max"] == 1.0  # on policy
    assert any(row["policy/ratio"] != 1.0 for row in later)
    timed = read_lines(whole.updates)[0]
    assert {"update/tokens_per_s", "machine/flop_utilisation", "machine/peak_memory_mib"} <= timed.keys()


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_kill_among_the_rows_of_a_step_neither_loses_nor_doubles_one(whole, tmp_path, monkeypatch, num_rows):
    class Falling(LineWriter):
        def append(self, value):
            if value.get("stage") == "rl" and value.get("step") == 2 and value.get("place", 9) > num_rows:
                raise KeyboardInterrupt
            super().append(value)

    monkeypatch.setattr(stage_module, "LineWriter", Falling)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, make_recipe(**SEVERAL))
    assert len(rows_of(run, 2)) == num_rows
    monkeypatch.undo()
    run_recipe(run.path, make_recipe(**SEVERAL))
    assert rows_of(run) == rows_of(whole)


def test_an_update_that_was_skipped_has_a_row_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 9)
    settings = {"optimizer": {"lr": 1e36}}
    recipe = make_recipe(steps=2, epochs=2, give_up_after=9, trainer=settings)
    run = run_recipe(tmp_path / "run", recipe).run
    first, *others = rows_of(run)
    assert first["update/skipped"] == 0
    skipped = [row for row in others if row["update/skipped"] == 1]
    assert skipped
    assert all(row["update"] == 1 and "gradient norm is" in row["why_skipped"] for row in skipped)
    assert all("update/loss" not in row for row in skipped)
    last = lines_of(run)[-1]
    assert last["update/skipped"] == 2


def test_expert_iteration_has_a_row_for_each_of_its_batches(tmp_path):
    expert = {"kind": "expert_iteration", "init": "sft", "steps": 1, "tasks_per_step": 4, "group_size": 6, "batch_size": 4}
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")} | {"expert": expert | {"epochs": 2}}
    run = run_recipe(tmp_path / "run", recipe_of(stages)).run
    [line] = lines_of(run, "expert")
    rows = rows_of(run)
    assert len(rows) == 2 * -(-int(line["groups/rollouts_used"]) // 4) > 2
    assert sum(row["update/loss"] for row in rows) / len(rows) == pytest.approx(line["update/loss"])
