"""When a run that teaches nothing stops, and when it goes on."""

from __future__ import annotations

from strop.pipelines.rl_stage import is_mostly_right


def test_a_policy_that_is_mostly_right_is_no_reason_to_give_up():
    assert is_mostly_right({"rollout/accuracy": 0.98})
    assert not is_mostly_right({"rollout/accuracy": 0.0})
    assert not is_mostly_right({"rollout/accuracy": 0.5})
