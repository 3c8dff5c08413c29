import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import group_of, grow

from strop.algorithms.arpo import ARPO, hard_advantages
from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation, RatioLevel
from strop.algorithms.method import Column, LossInputs
from strop.config import validate
from strop.errors import ConfigError
from strop.training.batch import pack
from strop.types import StopReason

FORKED = {1: (0, 2), 2: (1, 3)}  # 0: a b c d e; 1: a b F G; 2: a b F H


def selected(method, sizes, rewards, parents=FORKED, cut_off=()):
    tree = grow(sizes, parents)
    for row in cut_off:
        tree[row] = replace(tree[row], stop_reason=StopReason.LENGTH)
    return method.select(group_of(tree, rewards), group_size=len(sizes), seed=0)


def test_hard_credit_of_a_shared_token_is_the_mean_over_all_who_share_it():
    tree = grow([5, 2, 1], FORKED)
    first, second, third = (tokens.tolist()[2:] for tokens in hard_advantages(tree, [3.0, 0.0, -1.0]))
    mean_of_all, mean_of_two = pytest.approx(2 / 3), -0.5
    assert first == [mean_of_all, mean_of_all, 3.0, 3.0, 3.0]
    assert second == [mean_of_all, mean_of_all, mean_of_two, 0.0]
    assert third == [mean_of_all, mean_of_all, mean_of_two, -1.0]


def test_soft_credit_is_each_rollouts_own_on_all_its_tokens():
    selection = selected(ARPO(), [5, 2, 1], [1.0, 0.0, 0.0])
    of_each = ARPO().advantages([selection])[0]
    assert [set(tokens.tolist()) == {tokens[0].item()} for tokens in of_each] == [True] * 3


def test_the_trees_of_an_advantage_are_those_of_rollouts_from_the_prompt():
    first, second, branch = grow([5, 4, 2], {2: (0, 2)})
    branch = replace(branch, key=replace(first.key, branch=1))
    method = ARPO(advantage="tree", eps=0.0)
    selection = method.select(group_of([first, branch, second], [1.0, 0.0, 0.0]), group_size=3, seed=0)
    advantages = [tokens[0].item() for tokens in method.advantages([selection])[0]]
    # Group: mean 1/3, std 0.5773503; the tree of two: +-0.7071068
    assert advantages == pytest.approx([1.1547005 + 0.7071068, -0.5773503 - 0.7071068, -0.5773503], abs=1e-6)


@pytest.mark.parametrize("credit", ["soft", "hard"])
@pytest.mark.parametrize("weight", ["per_descendant", "once"])
def test_without_branches_everything_is_that_of_grpo(credit, weight):
    group = group_of(grow([4, 2, 3, 1]), [1.0, 0.0, 0.5, 0.0])
    arpo, grpo = ARPO(credit=credit, shared_token_weight=weight), GRPO(clip_high=0.2)
    batches = []
    for method in (arpo, grpo):
        selection = method.select(group, group_size=4, seed=0)
        batches.append(packed(method, selection))
    for name in ("ids", "loss_mask", "loss_weights", "advantages"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
    inputs = inputs_of(batches[0], torch.zeros_like(batches[0].advantages))
    logprobs = torch.linspace(-1, 1, inputs.loss_mask.numel()).reshape(inputs.loss_mask.shape)
    assert torch.equal(arpo.token_loss(logprobs, inputs), grpo.token_loss(logprobs, inputs))


def test_a_token_that_counts_once_is_trained_on_in_the_first_rollout_that_has_it():
    method = ARPO(shared_token_weight="once")
    selection = selected(method, [5, 2, 1], [1.0, 0.0, 0.0])
    masks = [mask[2:] for mask in selection.loss_masks]
    assert masks == [[True] * 5, [False, False, True, True], [False, False, False, True]]
    assert [decision.figures["shared_tokens"] for decision in selection.decisions] == [0.0, 2.0, 3.0]
    weights = packed(method, selection).loss_weights
    assert weights[weights > 0].tolist() == pytest.approx([1 / 8] * 8)  # eight tokens were sampled


CHAIN = {1: (0, 3), 2: (1, 5)}  # 0: a b c d e f; 1: a b c G H I J; 2: a b c G H K


@pytest.mark.parametrize("left_out", ["cut off and filtered", "excluded by its judge"])
def test_a_branch_and_its_grandparent_share_whatever_became_of_the_parent(left_out):
    """Rollout 1, through which 2 hangs on 0, is not learnt from: credit and count of a, b and c are those of 0 and 2 both."""
    method = ARPO(credit="hard", shared_token_weight="once", overlong_filter=True, eps=0.0)
    tree = grow([6, 4, 1, 2], CHAIN)
    if left_out == "cut off and filtered":
        tree[1] = replace(tree[1], stop_reason=StopReason.LENGTH)
        group = group_of(tree, [1.0, 1.0, 0.0, 0.0])
    else:
        group = group_of([tree[0], *tree[2:]], [1.0, 0.0, 0.0], excluded=[tree[1]])
    selection = method.select(group, group_size=4, seed=0)
    assert [scored.trajectory.key.attempt for scored in selection.kept] == [0, 2, 3]
    first, second, third = (tokens.tolist()[2:] for tokens in method.advantages([selection])[0])
    high, low = 2 / math.sqrt(3), -1 / math.sqrt(3)  # rewards 1, 0, 0: mean 1/3, unbiased std 1/sqrt(3)
    assert first == pytest.approx([(high + low) / 2] * 3 + [high] * 3)
    assert second == pytest.approx([(high + low) / 2] * 3 + [low] * 3)
    assert third == pytest.approx([low] * 2)
    assert [mask[2:] for mask in selection.loss_masks] == [[True] * 6, [False] * 3 + [True] * 3, [True] * 2]


def test_hard_and_soft_credit_are_equal_whoever_of_the_tree_is_filtered():
    settings = {"overlong_filter": True, "parents": CHAIN, "rewards": (1.0, 1.0, 0.0, 0.5), "sizes": (6, 4, 1, 2)}
    for row in range(4):
        assert difference(cut_off=(row,), **settings) < 1e-6


def test_what_was_dropped_shares_nothing():
    """Of a tree whose root was cut off and filtered, the branches share with each other alone."""
    method = ARPO(credit="hard", shared_token_weight="once", eps=0.0)
    selection = selected(method, [5, 2, 1], [1.0, 0.0, 1.0])
    rest = type(selection)(group=group_of(grow([5, 2, 1], FORKED)[1:], [0.0, 1.0]), decisions=selection.decisions[1:])
    first, second = (tokens.tolist()[2:] for tokens in method.advantages([rest])[0])
    high = math.sqrt(0.5)
    assert first == pytest.approx([0.0, 0.0, 0.0, -high])
    assert second == pytest.approx([0.0, 0.0, 0.0, high])


def packed(method, selection):
    return pack(
        [selection],
        method.advantages([selection]),
        aggregation=method.aggregation,
        temperature=1.0,
        constant=method.constant,
    )


def inputs_of(batch, old_logprobs):
    return LossInputs(
        loss_mask=batch.loss_mask,
        advantages=batch.advantages.double(),
        sampled_logprobs=old_logprobs,
        entropies=torch.zeros_like(old_logprobs),
        columns={Column.OLD_LOGPROBS: old_logprobs},
    )


def tiny_policy():
    """A next-token model whose logits depend on the whole prefix, so that a shared token has one log-prob in every row."""
    generator = torch.Generator().manual_seed(5)
    embeddings = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(6, 80, generator=generator, dtype=torch.float64)

    def logprobs(parameters, ids):
        states = torch.tanh(parameters[0][ids].cumsum(1))
        scores = (states @ parameters[1])[:, :-1].log_softmax(-1)
        return torch.nn.functional.pad(scores.gather(2, ids[:, 1:, None]).squeeze(2), (1, 0))

    return logprobs, (embeddings, head)


def gradient(method, selection, *, drift=0.0):
    """Of the update's loss; off policy by `drift` times a fixed number for each token, the same in every row that has it."""
    batch = packed(method, selection)
    logprobs, start = tiny_policy()
    parameters = [value.clone().requires_grad_() for value in start]
    policy = logprobs(parameters, batch.ids)
    old = policy.detach() + drift * torch.sin(batch.ids.double())
    loss = (batch.loss_weights.double() * method.token_loss(policy, inputs_of(batch, old))).sum()
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])


def difference(sizes=(5, 2, 4), rewards=(1.0, 0.0, 0.25), *, drift=0.0, parents=FORKED, cut_off=(), **settings):
    """Between hard and soft credit, relative to the gradient."""
    of_each = []
    for credit in ("hard", "soft"):
        method = ARPO(credit=credit, **settings)
        of_each.append(gradient(method, selected(method, sizes, rewards, parents, cut_off), drift=drift))
    return ((of_each[0] - of_each[1]).norm() / of_each[1].norm()).item()


def test_hard_and_soft_credit_have_equal_gradients_at_ratio_one_under_token_mean():
    assert difference() < 1e-6
    assert difference(aggregation=Aggregation.GROUP_TOKEN_MEAN) < 1e-6
    assert difference(aggregation=Aggregation.CONSTANT, constant=7) < 1e-6


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.floats(-1, 1.1), min_size=4, max_size=4).filter(lambda each: max(each) - min(each) > 0.01),
    sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    parents=st.tuples(st.integers(0, 0), st.integers(0, 1), st.integers(0, 2)),
)
def test_they_are_equal_on_every_tree(rewards, sizes, parents):
    tree = {row: (parent, 1) for row, parent in enumerate(parents, start=1)}
    assert difference(sizes, rewards, parents=tree) < 1e-5  # advantages of a batch are float32


def test_they_are_equal_off_policy_too_as_long_as_nothing_is_clipped():
    assert difference(drift=0.5, clip_low=2.0, clip_high=50.0) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": Aggregation.SEQUENCE_MEAN},
        {"drift": 0.5},
        {"shared_token_weight": "once"},
        {"drift": 0.5, "ratio": RatioLevel.SEQUENCE, "clip_low": 2.0, "clip_high": 50.0},
    ],
    ids=["mean of sequences", "clipped off policy", "shared tokens once", "ratio of sequences"],
)
def test_hard_and_soft_credit_differ_where_a_row_or_the_clip_tells_rollouts_apart(settings):
    assert difference(**settings) > 1e-2


def test_a_sequence_mean_of_rows_of_one_length_leaves_them_equal():
    assert difference(sizes=(5, 3, 2), aggregation=Aggregation.SEQUENCE_MEAN) < 1e-6


def test_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match="group_size is 1"):
        ARPO().num_rollouts(1)


def test_refilling_without_leaving_groups_out_is_refused():
    with pytest.raises(ConfigError, match=r"refill_rounds is 2.*Set drop_tied = true"):
        validate(ARPO.Config, {"refill_rounds": 2}, place="recipe")
