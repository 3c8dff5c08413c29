"""What a resumed step says of its speed: rollouts that the interrupted try had finished took no time now."""

import pytest

from scripted_runs import make_recipe, run_recipe
from strop.run_directory import read_lines
from strop.stages import rl as rl_stage


def test_rollouts_that_were_finished_before_are_no_throughput_of_the_resumed_step(tmp_path, monkeypatch):
    async def fall_at_the_second(context, batch, coroutine, *, step):
        if step == 2:
            coroutine.close()
            raise KeyboardInterrupt
        return await update(context, batch, coroutine, step=step)

    update = rl_stage.keep_skipped
    monkeypatch.setattr(rl_stage, "keep_skipped", fall_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", make_recipe(steps=3, checkpoint_every=1))
    monkeypatch.undo()
    run = run_recipe(tmp_path / "run", make_recipe(steps=3, checkpoint_every=1)).run
    speeds = {line["step"]: line["rollout/tokens_per_s"] for line in read_lines(run.metrics) if line["stage"] == "rl"}
    assert speeds[2] == 0
    assert speeds[1] > 0
    assert speeds[3] > 0
