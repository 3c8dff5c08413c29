"""Which temperatures a recipe may ask for."""

from __future__ import annotations

import pytest

from strop.config import validate
from strop.engine.protocol import LOWEST_TEMPERATURE
from strop.errors import ConfigError
from strop.recipe.schedule import SamplingSwitch
from strop.rollout.player import SamplingConfig
from strop.stages.loop.training_stage import ValidationConfig

NEEDED = {ValidationConfig: {"every_steps": 1}}


@pytest.mark.parametrize("config", [SamplingConfig, SamplingSwitch, ValidationConfig])
@pytest.mark.parametrize("temperature", [0.0, LOWEST_TEMPERATURE, 2.0])
def test_the_likeliest_token_and_what_float32_can_divide_by_are_taken(config, temperature):
    assert validate(config, {"temperature": temperature} | NEEDED.get(config, {}), place="a").temperature == temperature


@pytest.mark.parametrize("config", [SamplingConfig, SamplingSwitch, ValidationConfig])
def test_a_temperature_that_magnifies_rounding_is_refused_with_the_arithmetic(config):
    with pytest.raises(ConfigError, match=r"temperature.* 0.001 is between 0 and 0.01.* 0.062 / 0.001 = 62 nats.* Use 0 "):
        validate(config, {"temperature": 0.001} | NEEDED.get(config, {}), place="a")


@pytest.mark.parametrize("temperature", [-1.0, float("inf"), float("nan")])
def test_what_is_no_temperature_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        validate(SamplingConfig, {"temperature": temperature}, place="a")


def test_the_arithmetic_is_that_of_bfloat16():
    torch = pytest.importorskip("torch")
    logits = torch.linspace(16, 32, 10_001)[:-1]
    assert (logits.bfloat16().float() - logits).abs().max().item() == pytest.approx(0.0625, rel=0.02)
