"""What a recipe does about the gap between a sampler's probabilities and the trainer's when it says nothing."""

import pytest

from strop.recipe.recipe import resolve


def method_of(engine, method):
    tree = {"engine": engine, "stages": {"rl": {"kind": "rl", "method": method}, "base": {"kind": "model"}}}
    return resolve(tree)["stages"]["rl"]["method"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_rl_on_a_server_truncates_importance_weights_unless_told_otherwise(kind):
    assert method_of({"kind": kind}, "grpo") == {"kind": "grpo", "mismatch": "truncate_token"}
    assert method_of({"kind": kind}, {"kind": "grpo", "eps": 1e-5})["mismatch"] == "truncate_token"
    assert method_of({"kind": kind}, {"kind": "grpo", "mismatch": "off"})["mismatch"] == "off"


@pytest.mark.parametrize("engine", [{"kind": "torch"}, {}])
def test_rl_on_the_embedded_engine_has_no_weights_unless_asked(engine):
    assert method_of(engine, "grpo") == "grpo"
    assert method_of(engine, {"kind": "grpo", "mismatch": "mask_token"})["mismatch"] == "mask_token"


def test_a_stage_without_a_method_is_left_to_the_message_that_says_so():
    assert resolve({"engine": {"kind": "vllm"}, "stages": {"rl": {"kind": "rl"}}})["stages"]["rl"] == {"kind": "rl"}
