"""A critic that two processes divide learns what it learns in one: the same values, the same updates, the same checkpoints."""

import asyncio
from dataclasses import replace

import pytest
import torch

from strop.algorithms.method import Column
from strop.algorithms.ppo import PPO
from strop.training import Trainer, TrainerConfig
from strop.training.config import CriticConfig, CriticOptimizerConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

METHOD = PPO()
SEEDS = range(4)


def open_with_critic(directory, workers, **settings):
    critic = CriticConfig(optimizer=CriticOptimizerConfig(lr=1e-2, warmup_updates=2))
    config = TrainerConfig(workers=workers, critic=critic, max_tokens_per_microbatch=30, **settings)
    return Trainer.from_directory(directory, config, critic=directory)


async def train(trainer, make_batch, seeds=SEEDS):
    reports = []
    for seed in seeds:
        batch = await trainer.score(make_batch(seed=seed), Column.VALUES)
        returns = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(seed)) * batch.loss_mask
        batch = replace(batch, columns={**batch.columns, Column.RETURNS: returns})
        reports.append(await trainer.update_critic(batch, METHOD.value_loss, METHOD.value_statistics))
    return reports


async def values_of(trainer, make_batch):
    return (await trainer.score(make_batch(), Column.VALUES)).columns[Column.VALUES]


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bfloat16", "activation_checkpointing": True, "packing": False}], ids=str
)
def test_two_ranks_train_save_and_load_a_critic_as_one_does(model_directory, make_batch, tmp_path, settings):
    alone, divided, resumed = (open_with_critic(model_directory, workers, **settings) for workers in (0, 2, 2))
    tolerance = 5e-2 if "precision" in settings else 1e-4

    async def scenario():
        try:
            first, second = await train(alone, make_batch), await train(divided, make_batch)
            for ours, theirs in zip(second, first, strict=True):
                assert ours.loss == pytest.approx(theirs.loss, rel=tolerance)
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=tolerance)
            expected = await values_of(divided, make_batch)
            assert expected.any()
            assert torch.allclose(expected, await values_of(alone, make_batch), rtol=tolerance, atol=tolerance)

            await divided.save(tmp_path / "two")
            await resumed.load(tmp_path / "two")
            assert torch.equal(await values_of(resumed, make_batch), expected)
            more = await train(divided, make_batch, range(4, 6))
            assert await train(resumed, make_batch, range(4, 6)) == more
            await alone.load(tmp_path / "two")
            assert torch.allclose(await values_of(alone, make_batch), expected, rtol=tolerance, atol=tolerance)
        finally:
            for trainer in (alone, divided, resumed):
                await trainer.close()

    asyncio.run(scenario())
