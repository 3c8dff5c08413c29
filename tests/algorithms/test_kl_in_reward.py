"""The KL penalty of group methods in the reward instead of the loss."""

import math
from dataclasses import replace

import pytest
import torch

from strop.algorithms.arpo import ARPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column, RewardedRows
from strop.config import validate
from strop.errors import ConfigError
from strop.stages.loop.updates import scored_advantages
from strop.training.batch import pack, split_by_group

METHOD = GRPO(kl_coefficient=0.1, kl_in="reward", advantage="mean_centered")


def of_task(group, index):
    trajectories = tuple(
        replace(each, trajectory=replace(each.trajectory, key=replace(each.trajectory.key, task_index=index)))
        for each in group.trajectories
    )
    return replace(group, task_index=index, trajectories=trajectories)


def test_the_penalty_of_a_rollout_is_the_sum_of_its_log_ratios():
    rows = RewardedRows(
        rewards=torch.tensor([1.0, 0.0]),
        loss_mask=torch.tensor([[False, True, True], [False, True, False]]),
        columns={
            Column.OLD_LOGPROBS: torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, math.nan]]),
            Column.REFERENCE_LOGPROBS: torch.tensor([[7.0, -1.5, -4.0], [7.0, -2.0, math.nan]]),
        },
    )
    assert METHOD.penalties(rows).tolist() == pytest.approx([0.1 * (0.5 + 2.0), 0.1 * -1.0])
    assert GRPO(kl_coefficient=0.1).penalties(rows) is None


def test_it_is_not_in_the_loss_as_well_and_the_columns_are_scored_before_the_first_update():
    assert METHOD.kl_in_loss == 0.0
    assert METHOD.estimates_need == {Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS}
    assert (GRPO(kl_coefficient=0.1).kl_in_loss, GRPO(kl_coefficient=0.1).estimates_need) == (0.1, frozenset())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kl_in": "reward"}, "method.kl_in is reward but method.kl_coefficient is 0"),
        (
            {"kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"},
            "method.kl_estimator is 'k1' but method.kl_in is 'reward', where the log-ratio itself stands",
        ),
    ],
)
def test_a_setting_without_an_effect_is_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        validate(GRPO.Config, settings, place="here")


def test_tokens_that_are_scored_once_cannot_be_penalized_in_each_rollout():
    settings = {"kl_in": "reward", "kl_coefficient": 0.1, "shared_token_weight": "once"}
    with pytest.raises(ConfigError, match="which scores a shared token in one rollout only"):
        validate(ARPO.Config, settings, place="here")


def test_rewards_are_compared_without_their_penalty(make_group):
    groups = [of_task(make_group([1.0, 0.0]), 0), of_task(make_group([1.0, 1.0]), 1)]
    selections = [METHOD.select(group, group_size=2, seed=0) for group in groups]
    parts = split_by_group(selections, 2)
    alone = METHOD.advantages(selections)
    batches = [pack(part, [alone[place]], aggregation=METHOD.aggregation, temperature=1.0) for place, part in enumerate(parts)]
    gaps = [[2.0, -1.0], [0.5, 4.0]]  # log π/π_ref at every token of a rollout
    scored = []
    for batch, of_rows in zip(batches, gaps, strict=True):
        old = torch.zeros_like(batch.sampled_logprobs) + torch.tensor(of_rows)[:, None]
        columns = {Column.OLD_LOGPROBS: old, Column.REFERENCE_LOGPROBS: torch.zeros_like(old)}
        scored.append(type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"columns": columns}))
    judged, advantages = scored_advantages(METHOD, selections, parts, scored, alone)
    for group, selection, batch, of_rows, of_group in zip(groups, selections, judged, gaps, advantages, strict=True):
        num_sampled = [sum(each.trajectory.loss_mask) for each in group.trajectories]
        left = [each.reward - 0.1 * gap * num for each, gap, num in zip(group.trajectories, of_rows, num_sampled, strict=True)]
        expected = [value - sum(left) / 2 for value in left]
        for row, (value, tokens) in enumerate(zip(expected, of_group, strict=True)):
            assert tokens.tolist() == pytest.approx([value] * len(selection.kept[row].trajectory.ids))
            assert batch.advantages[row][batch.loss_mask[row]].tolist() == pytest.approx([value] * num_sampled[row])
            assert not batch.advantages[row][~batch.loss_mask[row]].any()
    assert [each.reward for each in groups[0].trajectories] == [1.0, 0.0]  # what is logged stays


def test_without_a_penalty_nothing_changes(make_group):
    method = GRPO()
    selections = [method.select(make_group([1.0, 0.0]), group_size=2, seed=0)]
    alone = method.advantages(selections)
    batches = [pack(selections, alone, aggregation=method.aggregation, temperature=1.0)]
    assert scored_advantages(method, selections, [selections], batches, alone) == (batches, alone)
