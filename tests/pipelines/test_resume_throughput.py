"""What a resumed step says of its speed: rollouts that the interrupted try had finished took no time now."""

import pytest

from scripted_runs import make_recipe, run_recipe
from strop.run_directory import read_lines
from strop.stages import rl as rl_stage


def test_rollouts_that_were_finished_before_are_no_throughput_of_the_resumed_step(tmp_path, monkeypatch):
    async def fall_at_the_second(*args, step, **options):
        if step == 2:
            raise KeyboardInterrupt
        return await update(*args, step=step, **options)

    update = rl_stage.update_or_keep
    monkeypatch.setattr(rl_stage, "update_or_keep", fall_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", make_recipe(steps=3, checkpoint_every=1))
    monkeypatch.undo()
    run = run_recipe(tmp_path / "run", make_recipe(steps=3, checkpoint_every=1)).run
    speeds = {line["step"]: line["rollout/tokens_per_s"] for line in read_lines(run.metrics) if line["stage"] == "rl"}
    assert speeds[2] == 0
    assert speeds[1] > 0
    assert speeds[3] > 0
