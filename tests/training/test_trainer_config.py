import pytest
import torch
from pydantic import ValidationError

from strop.training import OptimizerConfig, TrainerConfig
from strop.training.config import Schedule
from strop.training.optimizer import learning_rate


def test_warm_up_rises_in_equal_steps_to_the_learning_rate():
    config = OptimizerConfig(lr=1.0, warmup_updates=4)
    assert [learning_rate(config, update, None) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_learning_rate_to_its_final_fraction():
    config = OptimizerConfig(lr=1.0, schedule=Schedule.COSINE, final_lr_fraction=0.1, warmup_updates=2)
    rates = [learning_rate(config, update, 6) for update in (1, 2, 4, 6, 100)]
    # Halfway: 0.1 + 0.9 / 2.
    assert rates == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize("total_updates", [None, 5])
def test_a_cosine_needs_to_know_where_it_ends(total_updates):
    config = OptimizerConfig(schedule=Schedule.COSINE, warmup_updates=5)
    with pytest.raises(ValueError, match="larger than the warm-up"):
        learning_rate(config, 5, total_updates)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (float("nan"), 0.9)])
def test_betas_of_an_average_that_never_forgets_or_grows_are_refused(betas):
    with pytest.raises(ValidationError, match="betas"):
        OptimizerConfig(betas=betas)
    assert OptimizerConfig(betas=(0.0, 0.99)).betas == (0.0, 0.99)  # RMSprop


@pytest.mark.parametrize(
    ("settings", "num_devices", "device"),
    [
        ({}, 0, "cpu"),
        ({}, 1, "cuda"),
        ({"device": "cpu"}, 1, "cpu"),
        ({"workers": 2}, 1, "cpu"),
        ({"workers": 2}, 2, "cuda"),
        ({"optimizer": {"moments": "disk"}}, 1, "cpu"),
    ],
)
def test_a_trainer_computes_where_the_embedded_engine_does(monkeypatch, settings, num_devices, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    assert TrainerConfig.model_validate(settings).torch_device == torch.device(device)
