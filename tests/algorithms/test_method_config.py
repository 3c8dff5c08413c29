import pytest

from strop.algorithms.grpo import GRPO
from strop.algorithms.grpo_roc import GRPORoC
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Method
from strop.config import Config, validate
from strop.errors import ConfigError


class Recipe(Config):
    method: Method


def test_a_method_may_be_named_by_its_name_alone():
    assert validate(Recipe, {"method": "grpo_roc"}, place="r.toml").method == GRPORoC()


def test_the_settings_of_a_method_stand_in_its_table():
    tree = {"method": {"kind": "grpo", "aggregation": "sequence_mean", "clip_high": 0.2}}
    assert validate(Recipe, tree, place="r.toml").method == GRPO(aggregation=Aggregation.SEQUENCE_MEAN, clip_high=0.2)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("grop", "'grop' is not one of grpo, grpo_roc, arpo, ppo. Did you mean 'grpo'?"),
        ({"kind": "grpo_rock"}, "Did you mean 'grpo_roc'?"),
        ({"kind": "grpo", "clip_hihg": 1.0}, "Did you mean 'clip_high'?"),
        ({"clip_high": 1.0}, "method.kind: required, but not set; one of grpo, grpo_roc, arpo, ppo"),
        ({"kind": "grpo", "aggregation": "constant"}, "method.constant is not set"),
        ({"kind": "grpo", "constant": 3000}, "Remove it"),
        ({"kind": "grpo_roc", "oversample": 0.5}, "oversample"),
        ({"kind": "grpo", "normalize_std": False}, "method.normalize_std: unknown key"),
        ({"kind": "grpo", "advantage": "mean_centred"}, "'mean_centered'"),
        ({"kind": "grpo", "loss": "no_clip", "clip_high": 0.2}, "method.clip_high is 0.2 but method.loss is 'no_clip'"),
        ({"kind": "grpo_roc", "loss": "cispo", "dual_clip": 3.0}, "method.dual_clip is 3.0 but method.loss is 'cispo'"),
        ({"kind": "grpo", "loss": "policy_gradient", "ratio": "sequence"}, "method.ratio is 'sequence' but"),
        ({"kind": "grpo", "kl_estimator": "k1"}, "method.kl_coefficient is 0. Remove it, or set kl_coefficient = 0.001"),
        ({"kind": "grpo", "mismatch_cap": 3.0}, "method.mismatch is 'off'. Remove it, or set mismatch"),
        ({"kind": "grpo", "dual_clip": 1.0}, "greater than 1"),
    ],
)
def test_a_mistake_in_a_method_is_named_with_its_remedy(method, message):
    with pytest.raises(ConfigError) as error:
        validate(Recipe, {"method": method}, place="r.toml")
    assert message in str(error.value)
