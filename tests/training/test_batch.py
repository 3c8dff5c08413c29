import math
from dataclasses import replace

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation, Mismatch
from strop.algorithms.method import Column, Decision, LossInputs, Selection
from strop.algorithms.policy_loss import Loss
from strop.training import pack
from strop.training.batch import World, microbatches, shares, split_by_group
from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    Trajectory,
    Turn,
)


def completion(ids, logprobs, is_forced=None):
    return Completion(
        ids=ids,
        logprobs=logprobs,
        entropies=(),
        is_forced=is_forced or (False,) * len(ids),
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )


def turn(ids, logprobs, observation_ids=(), is_forced=None):
    return Turn(
        completion=completion(ids, logprobs, is_forced),
        calls=(),
        observation_ids=observation_ids,
        completion_text="",
        observation_text="",
    )


def selection(task_index, trajectories, kept=None):
    scored = tuple(
        ScoredTrajectory(
            trajectory=Trajectory(
                key=RolloutKey(task_index=task_index, attempt=attempt),
                task_id="t",
                prompt_ids=prompt,
                turns=turns,
                stop_reason=StopReason.ANSWERED,
            ),
            reward=0.0,
            reward_parts={},
        )
        for attempt, (prompt, turns) in enumerate(trajectories)
    )
    decisions = tuple(Decision(is_kept=is_kept, reason="", figures={}) for is_kept in kept or [True] * len(scored))
    task = Task(id="t", question="?", answer="1", source="by hand")
    return Selection(group=Group(task=task, task_index=task_index, trajectories=scored), decisions=decisions)


def ones(selections):
    return [[torch.ones(len(scored.trajectory.ids)) for scored in each.kept] for each in selections]


TALKING = ((1, 2), (turn((3, 4), (-0.5, -0.6), observation_ids=(5, 6)), turn((7, 8), (-0.7, -0.8), is_forced=(False, True))))
SHORT = ((1,), (turn((9,), (-0.9,)),))


def test_only_tokens_that_the_policy_sampled_are_trained_on():
    chosen = [selection(0, [TALKING])]
    batch = pack(chosen, ones(chosen), aggregation=Aggregation.TOKEN_MEAN, temperature=0.7)
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    # Prompt, observation and the forced last token are not.
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, False, True, False]]
    assert batch.loss_weights[0].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 0, 0, 1 / 3, 0])
    assert batch.advantages.tolist() == [[0, 0, 1, 1, 0, 0, 1, 0]]
    assert batch.sampled_logprobs[0].tolist() == pytest.approx([0, 0, -0.5, -0.6, 0, 0, -0.7, -0.8])
    assert batch.temperature == 0.7


def test_the_gradient_of_a_completion_of_two_versions_is_that_of_each_token_against_the_weights_that_sampled_it():
    """Four tokens of a vocabulary of four: versions 1 and 2 sampled two each, and the policy is a free table of logits.

    d loss / d logit of an id = -(advantage / 4) * min(pi_old / pi_sampled, 2) * ((1 if it is the token) - pi_old(id)).
    """
    policy = [[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.1, 0.1, 0.1, 0.7]]
    ids, sampled = (0, 1, 2, 3), (0.8, 0.05, 0.5, 0.5)  # the first two by version 1, the others by version 2
    weights = [0.5 / 0.8, 2.0, 0.25 / 0.5, 0.7 / 0.5]  # 0.2 / 0.05 is above the cap
    spliced = turn(ids, tuple(map(math.log, sampled)))
    spliced = replace(spliced, completion=replace(spliced.completion, spans=((1, 2), (2, 2))))
    chosen = [selection(0, [((1,), (spliced,))])]
    batch = pack(chosen, [[torch.full((5,), 1.5)]], aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)
    logits = torch.tensor([policy[0], *policy]).log().requires_grad_()  # of each position of the row; the prompt's is masked
    logprobs = logits.log_softmax(-1).gather(-1, batch.ids[0, :, None]).T
    inputs = LossInputs(
        loss_mask=batch.loss_mask,
        advantages=batch.advantages,
        sampled_logprobs=batch.sampled_logprobs,
        entropies=torch.zeros(1, 5),
        columns={Column.OLD_LOGPROBS: logprobs.detach()},
    )
    method = GRPO(loss=Loss.CLIP, mismatch=Mismatch.TRUNCATE_TOKEN, mismatch_cap=2.0)
    (batch.loss_weights * method.token_loss(logprobs, inputs)).sum().backward()
    expected = [
        [-1.5 / 4 * weight * ((index == token) - p) for index, p in enumerate(row)]
        for token, weight, row in zip(ids, weights, policy, strict=True)
    ]
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0] * 4, *expected]), rtol=0, atol=1e-6)


def test_rows_stand_in_canonical_order_whatever_closed_first():
    first, second = selection(0, [SHORT, TALKING]), selection(1, [TALKING, SHORT])
    in_order = pack([first, second], ones([first, second]), aggregation=Aggregation.GROUP_TOKEN_MEAN, temperature=1.0)
    as_closed = pack([second, first], ones([second, first]), aggregation=Aggregation.GROUP_TOKEN_MEAN, temperature=1.0)
    assert in_order.lengths.tolist() == [2, 8, 8, 2]
    for name in ("ids", "lengths", "loss_mask", "loss_weights", "advantages", "sampled_logprobs"):
        assert torch.equal(getattr(in_order, name), getattr(as_closed, name))


def test_dropped_rollouts_are_not_in_the_batch_and_weigh_nothing():
    chosen = [selection(0, [TALKING, SHORT], kept=[False, True])]
    batch = pack(chosen, ones(chosen), aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)
    assert batch.ids.tolist() == [[1, 9]]
    assert batch.loss_weights.tolist() == [[0, 1]]


def test_an_update_of_which_nothing_was_kept_is_a_batch_of_no_rows():
    chosen = [selection(0, [SHORT], kept=[False])]
    batch = pack(chosen, ones(chosen), aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)
    assert batch.ids.shape == (0, 1)
    assert batch.num_loss_tokens == 0
    assert microbatches(batch, 100) == []


def test_advantages_of_another_length_than_the_trajectory_are_refused():
    with pytest.raises(ValueError, match="row 0 has 2 ids"):
        pack([selection(0, [SHORT])], [[torch.ones(3)]], aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def test_mini_batches_are_runs_of_whole_groups_as_even_as_can_be():
    groups = [selection(index, [SHORT]) for index in (4, 2, 0, 3, 1)]
    parts = split_by_group(groups, 2)
    assert [[each.group.task_index for each in part] for part in parts] == [[0, 1, 2], [3, 4]]


def test_there_are_never_more_mini_batches_than_groups_that_kept_something():
    groups = [selection(0, [SHORT]), selection(1, [SHORT], kept=[False]), selection(2, [SHORT])]
    assert [[each.group.task_index for each in part] for part in split_by_group(groups, 16)] == [[0], [2]]
    assert split_by_group([], 4) == []


def test_micro_batches_hold_their_budget_of_padded_tokens_and_are_cut_after_the_last_trained_token(make_batch):
    batch = make_batch((9, 14, 11, 7, 14, 8))  # the row of 7 ends on an observation: its last trained token is the 5th
    parts = microbatches(batch, 28)
    assert [part.rows.tolist() for part in parts] == [[3, 5, 0], [2, 1], [4]]  # 3 * 9 = 27; 2 * 14 = 28
    assert [tuple(part.batch.ids.shape) for part in parts] == [(3, 9), (2, 14), (1, 14)]
    assert sum(part.batch.loss_weights.sum().item() for part in parts) == pytest.approx(1.0)


def test_a_row_beyond_the_budget_goes_by_itself_and_one_without_trained_tokens_not_at_all(make_batch):
    batch = make_batch((3, 14, 9))
    assert [part.rows.tolist() for part in microbatches(batch, 5)] == [[2], [1]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("max_tokens", [14, 30, 1000])
def test_ranks_share_every_row_once_and_have_as_many_micro_batches_each(make_batch, size, max_tokens):
    batch = make_batch((9, 14, 11, 7, 14, 8))
    of_ranks = [shares(batch, max_tokens, True, World(rank, size)) for rank in range(size)]
    assert len({len(parts) for parts in of_ranks}) == 1
    parts = [part for parts in of_ranks for part in parts if part.batch.num_loss_tokens]
    assert sorted(row for part in parts for row in part.rows.tolist()) == [0, 1, 2, 3, 4, 5]
    assert sum(part.batch.loss_weights.sum().item() for part in parts) == pytest.approx(1.0)
    blank = [part for parts in of_ranks for part in parts if not part.batch.num_loss_tokens]
    assert all(not part.batch.loss_weights.any() for part in blank)


def test_one_micro_batch_is_made_several_so_that_every_rank_has_work(make_batch):
    batch = make_batch((20, 20, 20, 20))
    assert [len(shares(batch, 1000, True, World(rank, 2))[0].rows) for rank in range(2)] == [2, 2]
