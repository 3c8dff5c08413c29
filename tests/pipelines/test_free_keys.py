"""Which keys of a recipe may differ when a run goes on, and that the docs list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.engine.config import EngineConfig, SglangConfig, VllmConfig
from strop.runs.manifest import differences

FREE_OF_ENGINES = {
    *("replicas", "slots", "stall_timeout_s", "devices", "own_process", "python", "addresses"),
    *("start_timeout_s", "kv_mib", "sleep"),
}
BOUND = {
    *("kind", "dtype", "device", "threads", "deterministic", "decode", "tensor_parallel", "eager"),  # round another way
    *("arguments", "environment", "max_length"),  # may do so, or decide what fits
}


@pytest.mark.parametrize("config", [EngineConfig, VllmConfig, SglangConfig])
def test_of_every_key_of_an_engine_it_is_decided_whether_a_run_goes_on_with_another(config):
    assert set(config.model_fields) <= FREE_OF_ENGINES | BOUND
    for name in config.model_fields:
        found = differences({"engine": {name: 1}}, {"engine": {name: 2}})
        assert bool(found) == (name in BOUND), name


def between(path, one=1, other=2):
    """The differences of two recipes in the key at `path`."""
    trees = []
    for value in (one, other):
        tree = value
        for name in reversed(path.split(".")):
            tree = {name: tree}
        trees.append(tree)
    return differences(*trees)


@pytest.mark.parametrize("key", ["worker_timeout_s"])
def test_what_only_waits_or_gives_up_may_differ_in_a_trainer(key):
    assert between(f"stages.rl.trainer.{key}") == []


def test_how_old_rollouts_may_be_may_differ_but_not_whether_they_are_played_ahead():
    assert between("stages.rl.async_rollouts.max_staleness") == []
    assert between("stages.rl.async_rollouts.too_old", "drop", "wait") == []
    assert len(between("stages.rl.async_rollouts", None, {"max_staleness": 1})) == 1


@pytest.mark.parametrize("of", ["optimizer", "critic.optimizer"])
def test_where_moments_lie_may_differ(of):
    assert between(f"stages.rl.trainer.{of}.moments", "memory", "disk") == []
    assert len(between(f"stages.rl.trainer.{of}.lr")) == 1


SERVICE = ("url", "key_env", "timeout_s", "retries", "max_running", "cache")


@pytest.mark.parametrize("of", ["scorer", "judge.service"])
def test_how_a_service_is_reached_and_how_patiently_may_differ_and_the_page_says_so(of):
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    for key in SERVICE:
        assert between(f"stages.rl.reward.parts.helpful.{of}.{key}") == [], key
        assert f"`{key}`" in page


@pytest.mark.parametrize("place", ["scorer.model", "judge.service.model", "judge.score_prompt", "judge.tries", "weight"])
def test_what_a_service_is_asked_may_not_differ(place):
    assert len(between(f"stages.rl.reward.parts.helpful.{place}")) == 1


def test_servers_that_strop_started_may_be_given_by_address_in_the_next_try():
    started = {"engine": {"python": "/a/bin/python", "addresses": [], "replicas": 2}}
    given = {"engine": {"python": None, "addresses": ["http://127.0.0.1:8000"], "replicas": 1}}
    assert differences(started, given) == []


@pytest.mark.parametrize(
    "path", ["engine.slots.more", "other.engine.replicas", "stages.rl.trainer.workers", "sandbox.wall_s", "seed"]
)
def test_a_key_that_decides_over_results_is_told_even_if_it_resembles_a_free_one(path):
    assert between(path) == [(path, 1, 2)]
