"""An update on preference pairs against the plain DPO loss of whole responses, by autograd, row by row."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.algorithms.method import Column
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import LoraConfig
from strop.training.models import load_model
from strop.training.preferences import PairIds, pack_pairs, rewards_of, with_advantages
from strop.training.sft import sft_token_loss, sft_token_statistics

BETA = 0.3


def make_pairs(num=5, *, seed=0):
    """Responses of one prompt; of some pairs they begin alike, of one they are the same."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return tuple(torch.randint(0, 61, (length,), generator=generator).tolist())

    def length():
        return int(torch.randint(1, 9, (), generator=generator))

    pairs = []
    for number in range(num):
        begun = ids(20) if number % 2 else ()
        pairs.append(PairIds(prompt=ids(18 + number), chosen=begun + ids(length()), rejected=begun + ids(length())))
    return [*pairs, replace(pairs[0], rejected=pairs[0].chosen)]


@pytest.fixture(scope="module")
def reference_directory(model_directory, tmp_path_factory):
    """Another model than the policy: margins are not 0, and some are large."""
    directory = tmp_path_factory.mktemp("reference")
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(model_directory)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_trainer(directory, reference, *, lr=1e-2, **settings):
    return Trainer.from_directory(
        directory, TrainerConfig(optimizer=OptimizerConfig(lr=lr, grad_clip=0.0), **settings), reference=reference
    )


async def scored(trainer, pairs):
    batch = pack_pairs(pairs)
    for column in (Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS):
        batch = await trainer.score(batch, column)
    return batch


async def update(trainer, pairs):
    """The report of one update, and the figures of the pairs before it."""
    batch = await scored(trainer, pairs)
    rewards = rewards_of(batch, beta=BETA)
    batch = with_advantages(batch, rewards.margins, beta=BETA)
    return await trainer.update(batch, sft_token_loss, sft_token_statistics), rewards.figures()


def gradients_of(trainer, pairs):
    """The gradient that an update on `pairs` uses, its report and the figures."""
    captured = {}
    trainer.learner.optimization.optimizer.step = lambda: captured.update(
        {name: parameter.grad.clone() for name, parameter in trainer.learner.weights.named().items()}
    )
    return captured, *asyncio.run(update(trainer, pairs))


def plain_losses(policy, reference, pairs):
    """-log σ(β (log π/π_ref of the chosen - that of the rejected)) of each pair, full sequences as in the hand-out."""

    def logprob(model, ids):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).sum()

    losses = []
    for pair in pairs:
        of_policy, of_reference = (
            [logprob(model, [*pair.prompt, *response]) for response in (pair.chosen, pair.rejected)]
            for model in (policy, reference)
        )
        margin = BETA * ((of_policy[0] - of_reference[0].detach()) - (of_policy[1] - of_reference[1].detach()))
        losses.append(-torch.log(torch.sigmoid(margin)))
    return torch.stack(losses)


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_microbatch": 40}, {"packing": False}])
def test_the_gradient_is_that_of_the_plain_loss_however_pairs_are_cut(model_directory, reference_directory, settings):
    pairs = make_pairs()
    gradients, report, figures = gradients_of(make_trainer(model_directory, reference_directory, **settings), pairs)
    policy, reference = load_model(model_directory).eval(), load_model(reference_directory).eval()
    losses = plain_losses(policy, reference, pairs)
    losses.mean().backward()
    assert losses.max() > 2 * losses.min() > 0  # the coefficients differ
    assert figures["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert figures["accuracy"] == pytest.approx(((losses < math.log(2) - 1e-6).sum().item() + 0.5) / 6)  # the last is a tie
    for name, parameter in policy.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
    total = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in policy.parameters()))
    assert report.grad_norm == pytest.approx(total, rel=1e-5)


def test_a_pair_may_lie_in_two_micro_batches(model_directory, reference_directory):
    """One row each, however long."""
    pairs = make_pairs()
    whole, _, _ = gradients_of(make_trainer(model_directory, reference_directory), pairs)
    cut, _, _ = gradients_of(make_trainer(model_directory, reference_directory, max_tokens_per_microbatch=1), pairs)
    for name, gradient in whole.items():
        assert (cut[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_a_policy_that_is_its_reference_has_margins_of_exactly_zero(model_directory):
    _, _, figures = gradients_of(make_trainer(model_directory, model_directory), make_pairs())
    assert figures == {
        "loss": pytest.approx(math.log(2), abs=1e-9),
        "accuracy": 0.5,
        "margin": 0.0,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
    }


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=4)}])
def test_updates_rank_the_pairs_whether_the_reference_is_a_copy_or_the_model_without_its_adapter(model_directory, settings):
    trainer = make_trainer(model_directory, model_directory, **settings)
    pairs = make_pairs()[:5]

    async def train():
        return [(await update(trainer, pairs))[1] for _ in range(10)]

    first, *_, last = asyncio.run(train())
    assert (first["accuracy"], first["margin"]) == (0.5, 0.0)
    assert last["accuracy"] == 1.0
    assert last["loss"] < 0.5 * first["loss"]
    assert last["margin"] == pytest.approx(last["chosen_reward"] - last["rejected_reward"])


@pytest.mark.slow
def test_several_processes_make_the_same_updates(model_directory, reference_directory):
    pairs = make_pairs()
    found = []
    for workers in (0, 2):
        trainer = make_trainer(model_directory, reference_directory, workers=workers)

        async def train(trainer=trainer):
            try:
                return [await update(trainer, pairs) for _ in range(2)]
            finally:
                await trainer.close()

        found.append(asyncio.run(train()))
    for (report, figures), (other, others) in zip(*found, strict=True):
        assert others == pytest.approx(figures, rel=1e-4)
        assert other.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)


def test_betas_of_zero_and_alpha_are_rmsprop_but_for_its_first_steps(model_directory, reference_directory):
    """AdamW divides v by 1 - 0.99^t, which is 0.01 at first: RMSprop's own first step is ten times as long."""
    pairs, lr = make_pairs(), 1e-4
    optimizer = OptimizerConfig(lr=lr, betas=(0.0, 0.99), grad_clip=0.0)
    trainer = Trainer.from_directory(model_directory, TrainerConfig(optimizer=optimizer), reference=reference_directory)
    asyncio.run(update(trainer, pairs))
    policy, reference = load_model(model_directory).eval(), load_model(reference_directory).eval()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    rmsprop = torch.optim.RMSprop(policy.parameters(), lr=lr / 10, alpha=0.99, eps=1e-9)
    plain_losses(policy, reference, pairs).mean().backward()
    rmsprop.step()
    for name, parameter in policy.named_parameters():
        found = trainer.learner.weights.named()[name].detach() - before[name]
        expected = parameter.detach() - before[name]
        assert (found - expected).norm() <= 1e-3 * expected.norm(), name
