"""A rollout that no judge could judge is out of its group, but stays in the tree that its branches hang on."""

from dataclasses import replace
from pathlib import Path

import pytest

from strop.rewards import judge_group
from strop.rewards.sum import EXCLUDED
from strop.stages.loop.async_rollouts import read_closed
from strop.stages.loop.ledger import StepLedger, read_rollouts
from strop.types import Group, RolloutKey, Task

TASK = Task(id="t", question="?", answer="1", source="test")


@pytest.fixture
def played(scripted_run):
    """Three scored rollouts of one task, as they were played."""
    return read_rollouts(scripted_run.run.stage("rl").rollouts(1))[:3]


def as_a_chain(played):
    """Each a branch of the one before it; nobody could judge the second."""
    keys = [RolloutKey(task_index=0, attempt=0, branch=branch) for branch in range(3)]
    chain = []
    for number, scored in enumerate(played):
        parent = {"parent": keys[number - 1], "forked_at": 1} if number else {}
        trajectory = replace(scored.trajectory, key=keys[number], **parent)
        chain.append(replace(scored, trajectory=trajectory, **({"reward_parts": {EXCLUDED: 1.0}} if number == 1 else {})))
    return chain


def test_a_step_that_is_read_again_has_the_tree_that_it_had(played, tmp_path: Path):
    chain = as_a_chain(played)
    as_played = Group(task=TASK, task_index=0, trajectories=tuple(chain), num_void=2)
    judged = judge_group(object(), as_played)
    assert [scored.trajectory.key.branch for scored in judged.trajectories] == [0, 2]
    assert (judged.num_void, [each.key.branch for each in judged.tree]) == (3, [0, 2, 1])
    path = tmp_path / "step-000001.jsonl"
    ledger = StepLedger(path, weights="w", published={0: "w"})
    for scored in chain:
        ledger.finished(scored)
    ledger.closed([judged], figures={}, time_s=1.0)
    ledger.close()
    found = read_closed(path, lambda index: TASK)
    assert found is not None
    [again] = found[0]
    assert judge_group(object(), again) == judged


def test_rollouts_that_a_try_drops_do_not_come_back_with_the_next_one(played, tmp_path: Path):
    path, chain = tmp_path / "step-000001.jsonl", as_a_chain(played)
    first = StepLedger(path, weights="w", published={0: "w"})
    for scored in chain:
        first.finished(scored)
    first.close()
    for reuse in (lambda found: found[:1], lambda found: found):
        ledger = StepLedger(path, weights="v", published={}, reuse=reuse)
        ledger.close()
        assert list(ledger.finished_before) == [chain[0].trajectory.key]
