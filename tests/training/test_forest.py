"""Rows that share beginnings at any depth: each distinct token goes through the model once, and nothing else changes."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column
from strop.algorithms.ppo import PPO
from strop.training import Trainer, TrainerConfig, logprobs
from strop.training.batch import Row, World, microbatches, pack_rows, shares, tokens_saved
from strop.training.config import LoraConfig
from strop.training.logprobs import head_logprobs

VOCABULARY = 61
COLUMNS = (Column.OLD_LOGPROBS, Column.OLD_ENTROPIES, Column.REFERENCE_LOGPROBS)


def sequence(chance, low=16, high=30):
    return [chance.randrange(VOCABULARY) for _ in range(chance.randint(low, high))]


def leaves(chance, trunk, depth):
    """The rows of a tree whose nodes have one to three branches; some end at a node where others go on."""
    found = [trunk] if depth == 0 or chance.random() < 0.2 else []
    for _ in range(0 if depth == 0 else chance.randint(1, 3)):
        found += leaves(chance, trunk + sequence(chance), depth - 1)
    return found


def forest(seed, *, num_trees=3, depth=2):
    """Rows in random order. Each is trained behind its prompt except for some observed tokens, and has its own advantages."""
    chance = random.Random(seed)
    rows = []
    for group in range(num_trees):
        prompt = sequence(chance)
        for ids in leaves(chance, prompt, depth):
            observed = range(len(prompt) + 5, len(prompt) + 9)
            rows.append(
                Row(
                    ids=ids,
                    loss_mask=[position >= len(prompt) and position not in observed for position in range(len(ids))],
                    advantages=torch.tensor([chance.gauss(0, 1) for _ in ids]),
                    sampled_logprobs=[-4.0 + chance.gauss(0, 0.1) for _ in ids],
                    group=group,
                )
            )
    chance.shuffle(rows)
    return pack_rows(rows, aggregation=Aggregation.GROUP_TOKEN_MEAN, temperature=0.7)


def counted_once(batch):
    """The distinct tokens that predict another, as sets find them."""
    ends = [max((place for place, is_trained in enumerate(mask) if is_trained), default=0) for mask in batch.loss_mask.tolist()]
    rows = [row[:end] for row, end in zip(batch.ids.tolist(), ends, strict=True)]
    return len({tuple(row[: place + 1]) for row in rows for place in range(len(row))}), sum(ends)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num_trees=st.integers(1, 4), depth=st.integers(0, 3))
def test_rows_in_any_order_are_laid_out_as_a_forest(seed, num_trees, depth):
    """But for up to 15 tokens that two prompts begin with: they are not worth an attention of their own."""
    batch = forest(seed, num_trees=num_trees, depth=depth)
    parts = microbatches(batch, 10**6, is_packed=True)
    distinct, in_all = counted_once(batch)
    assert sum(sum(part.lengths) for part in parts) == in_all
    assert distinct <= sum(part.num_tokens for part in parts) <= distinct + 15 * num_trees


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), max_tokens=st.integers(20, 400))
def test_micro_batches_of_a_forest_hold_every_row_once_within_their_budget(seed, max_tokens):
    batch = forest(seed)
    parts = microbatches(batch, max_tokens, is_packed=True)
    trained = batch.loss_mask.any(1).nonzero().flatten().tolist()
    assert sorted(row for part in parts for row in part.rows.tolist()) == trained
    assert all(len(part.rows) == 1 or part.num_tokens + len(part.rows) <= max_tokens for part in parts)
    for size in (2, 3):
        of_ranks = [shares(batch, max_tokens, True, World(rank=rank, size=size)) for rank in range(size)]
        rows = [row for parts in of_ranks for part in parts if part.batch.num_loss_tokens for row in part.rows.tolist()]
        assert sorted(rows) == trained


def groups(num, *, size, prompt, response):
    """Rows of so many tokens that share the prompt of their group and begin their responses with different tokens."""
    chance, length, rows = random.Random(0), prompt + response, []
    for group in range(num):
        ids = [group, *sequence(chance, prompt - 1, prompt - 1)]
        mask = [position >= prompt for position in range(length)]
        for place in range(size):
            row = [*ids, place, *sequence(chance, response - 1, response - 1)]
            rows.append(
                Row(ids=row, loss_mask=mask, advantages=torch.ones(length), sampled_logprobs=[-4.0] * length, group=group)
            )
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def test_a_micro_batch_ends_between_trees_if_it_is_half_full():
    """Trees of 100 + 4 x 30 tokens in micro-batches of 300: a third tree's trunk is repeated nowhere."""
    parts = microbatches(groups(3, size=4, prompt=100, response=31), 300, is_packed=True)
    assert [part.num_tokens for part in parts] == [220, 220, 220]
    assert [set(part.batch.groups.tolist()) for part in parts] == [{0}, {1}, {2}]


@pytest.mark.parametrize(
    ("size", "prompt", "response", "keys", "saved"),
    [
        (4, 100, 50, {}, 300),  # three of four prompts
        (4, 100, 50, {"max_tokens_per_microbatch": 260}, 200),  # three rows of 100 + 3 x 50 tokens, and one
        (4, 100, 50, {"max_tokens_per_microbatch": 100}, 0),  # each row by itself
        (4, 15, 50, {}, 0),  # too short
        (2, 100, 1100, {}, 100),  # 1100^2 is less than 12 288 x 100
        (2, 100, 1120, {}, 0),  # 1120^2 is more
        (4, 100, 50, {"packing": False}, 0),
    ],
)
def test_what_a_plan_counts_of_groups_is_what_their_micro_batches_compute(size, prompt, response, keys, saved):
    config, batch = TrainerConfig(**keys), groups(3, size=size, prompt=prompt, response=response)
    assert tokens_saved(size, prompt, response, config) == saved
    parts = microbatches(batch, config.max_tokens_per_microbatch, is_packed=config.packing)
    assert sum(sum(part.lengths) - part.num_tokens for part in parts) == 3 * saved


def gradients_of(directory, batch, method, columns, **options):
    config = TrainerConfig(max_tokens_per_microbatch=10**6, **options)
    trainer = Trainer.from_directory(directory, config, reference=directory)
    found = {}
    trainer.learner.optimization.optimizer.step = lambda: found.update(
        {name: parameter.grad.clone() for name, parameter in trainer.learner.weights.named().items()}
    )
    for column in COLUMNS:
        batch = asyncio.run(trainer.score(batch, column))
    scored = dict(batch.columns)
    moved = {column: values + columns[column] * batch.loss_mask for column, values in scored.items()}
    report = asyncio.run(trainer.update(replace(batch, columns=moved), method.token_loss, method.token_statistics))
    return scored, found, report


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (GRPO(), {}),
        (GRPO(), {"activation_checkpointing": True}),
        (GRPO(), {"lora": LoraConfig(rank=4, alpha=8)}),
        (GRPO(kl_coefficient=0.1, entropy_coefficient=0.01, dual_clip=3.0, mismatch="truncate_token"), {}),
        (GRPO(ratio="sequence", high_entropy_share=0.5, high_entropy_over="row"), {}),
        (GRPO(loss="cispo", clip_high=0.05), {}),
        (PPO(), {}),
    ],
    ids=str,
)
def test_loss_gradient_and_figures_of_a_forest_equal_those_of_rows_by_themselves(model_directory, method, options):
    """Old and reference log-probs differ from row to row on a token that rows share, and so does what is clipped of it."""
    batch = forest(7)
    generator = torch.Generator().manual_seed(0)
    columns = {column: 0.3 * torch.randn(batch.ids.shape, generator=generator) for column in COLUMNS}
    distinct, in_all = counted_once(batch)
    assert distinct < 0.6 * in_all
    scored, shared, report = gradients_of(model_directory, batch, method, columns, **options)
    expected, alone, other = gradients_of(model_directory, batch, method, columns, packing=False, **options)
    for column in COLUMNS:
        torch.testing.assert_close(scored[column], expected[column], rtol=1e-5, atol=1e-5)
    assert (report.cost.tokens, report.cost.row_tokens, other.cost.tokens) == (distinct, in_all, in_all)
    assert report.loss == pytest.approx(other.loss, rel=1e-5)
    # A gap is the difference of two log-probs, of which each is rounded.
    assert report.statistics == pytest.approx(other.statistics, rel=1e-5, abs=3e-6)
    for name, gradient in alone.items():
        assert (shared[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_values_of_a_forest_and_their_gradient_equal_those_of_rows_by_themselves(model_directory):
    method, batch, results = PPO(value_clip=None), forest(11), []
    generator = torch.Generator().manual_seed(3)
    returns = torch.randn(batch.ids.shape, generator=generator) * batch.loss_mask
    for is_packed in (True, False):
        config = TrainerConfig(packing=is_packed)
        trainer = Trainer.from_directory(model_directory, config, critic=model_directory)
        critic = trainer.learner.critic
        torch.nn.init.normal_(critic.values.head.weight, generator=torch.Generator().manual_seed(11))
        found = {}
        critic.optimization.optimizer.step = lambda critic=critic, found=found: found.update(
            {name: parameter.grad.clone() for name, parameter in critic.weights.named().items()}
        )
        scored = asyncio.run(trainer.score(batch, Column.VALUES))
        with_returns = replace(scored, columns={**scored.columns, Column.RETURNS: returns})
        asyncio.run(trainer.update_critic(with_returns, method.value_loss, method.value_statistics))
        results.append((scored.columns[Column.VALUES], found))
    (values, shared), (expected, alone) = results
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in alone.items():
        assert (shared[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_the_head_computes_a_token_that_rows_share_once(model_directory, monkeypatch):
    batch, num_targets = forest(7), []

    def counting(hidden, weight, bias, targets, **options):
        num_targets.append(len(targets))
        return head_logprobs(hidden, weight, bias, targets, **options)

    monkeypatch.setattr(logprobs, "head_logprobs", counting)
    trainer = Trainer.from_directory(model_directory, TrainerConfig())
    num_targets.clear()  # those of the check of the model
    asyncio.run(trainer.score(batch, Column.OLD_LOGPROBS))
    rows = zip(batch.ids.tolist(), batch.loss_mask.tolist(), strict=True)
    distinct = {tuple(row[: place + 1]) for row, mask in rows for place, is_trained in enumerate(mask) if is_trained}
    assert num_targets == [len(distinct)]
    assert len(distinct) < 0.8 * batch.num_loss_tokens
