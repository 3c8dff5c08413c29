import sys
from types import ModuleType, SimpleNamespace

import pytest

from strop.errors import UserError
from strop.reports.trackers import make_trackers
from strop.run_directory import RunDirectory


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_an_error_that_names_the_extra(kind, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install 'strop\[{kind}\]'"):
        make_trackers([kind], run=RunDirectory(tmp_path), name="demo", recipe={})


def test_no_tracker_is_made_unless_asked_for(tmp_path):
    assert make_trackers([], run=RunDirectory(tmp_path), name="demo", recipe={}) == []


def test_tensorboard_gets_stage_and_metric_as_one_tag(monkeypatch, tmp_path):
    calls = []
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda log_dir: SimpleNamespace(
        add_scalar=lambda *scalar: calls.append(scalar), close=lambda: calls.append("closed")
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (tracker,) = make_trackers(["tensorboard"], run=RunDirectory(tmp_path), name="demo", recipe={})
    tracker.log({"rollout/accuracy": 0.5}, step=3, stage="rl")
    tracker.close()
    assert calls == [("rl/rollout/accuracy", 0.5, 3), "closed"]


def test_wandb_has_an_axis_for_training_and_one_for_validation_of_each_stage(monkeypatch, tmp_path):
    calls = []
    module = ModuleType("wandb")
    module.init = lambda **settings: SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=calls.append,
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tracker,) = make_trackers(["wandb"], run=RunDirectory(tmp_path), name="demo", recipe={"seed": 1})
    tracker.log({"rollout/accuracy": 0.5}, step=1, stage="rl")
    tracker.log({"rollout/accuracy": 0.5, "validation/accuracy": 0.25}, step=2, stage="rl")
    tracker.log({"validation/accuracy": 0.75}, step=1, stage="sft")
    tracker.close()
    assert calls == [
        ("rl/rollout/accuracy", "rl/train_step"),
        {"rl/rollout/accuracy": 0.5, "rl/train_step": 1},
        ("rl/validation/accuracy", "rl/eval_step"),
        {"rl/rollout/accuracy": 0.5, "rl/train_step": 2, "rl/validation/accuracy": 0.25, "rl/eval_step": 2},
        ("sft/validation/accuracy", "sft/eval_step"),
        {"sft/validation/accuracy": 0.75, "sft/train_step": 1, "sft/eval_step": 1},
        "finished",
    ]
