import asyncio
import math
from dataclasses import replace

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column
from strop.algorithms.ppo import PPO
from strop.errors import CannotLearnError, ModelError
from strop.rewards.reward_model import begin_reward_model, head_of
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import CriticConfig, CriticOptimizerConfig, Schedule
from strop.training.models import load_model

METHOD = PPO(value_clip=None)


def make_trainer(directory, *, lr=1e-2, critic_updates=None, schedule=Schedule.CONSTANT, **settings):
    critic = CriticConfig(optimizer=CriticOptimizerConfig(lr=lr, grad_clip=0.0, schedule=schedule))
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), critic=critic, **settings)
    return Trainer.from_directory(directory, config, critic=directory, total_critic_updates=critic_updates)


def with_values(batch, trainer, returns=None):
    """The batch with old values, and with returns that are random unless given."""
    scored = asyncio.run(trainer.score(batch, Column.VALUES))
    if returns is None:
        returns = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(3)) * batch.loss_mask
    return replace(scored, columns={**scored.columns, Column.RETURNS: returns})


def update(trainer, batch, method=METHOD):
    return asyncio.run(trainer.update_critic(batch, method.value_loss, method.value_statistics))


def values_of(trainer, batch):
    return asyncio.run(trainer.score(batch, Column.VALUES)).columns[Column.VALUES]


def gradients_of(trainer, batch, method=METHOD):
    captured = {}
    critic = trainer.learner.critic
    critic.optimization.optimizer.step = lambda: captured.update(
        {name: parameter.grad.clone() for name, parameter in critic.weights.named().items()}
    )
    return captured, update(trainer, batch, method)


def with_random_head(trainer):
    """A new head is zero, and the decoder has no gradient behind it."""
    head = trainer.learner.critic.values.head
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(11))
    torch.nn.init.constant_(head.bias, 0.3)
    return trainer


def save_reward_model(source, directory, *, vocab_size=None):
    model = begin_reward_model(source, pad_id=0)
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size)
    torch.nn.init.normal_(head_of(model), generator=torch.Generator().manual_seed(5))
    model.save_pretrained(directory)
    return model


def test_a_critic_from_a_reward_model_has_its_decoder_and_its_head(model_directory, make_batch, tmp_path):
    reward_model = save_reward_model(model_directory, tmp_path)
    with torch.no_grad():  # a decoder that is not the policy's
        reward_model.base_model.norm.weight.mul_(1.5)
    reward_model.save_pretrained(tmp_path)
    trainer = Trainer.from_directory(model_directory, TrainerConfig(), critic=tmp_path)
    batch = make_batch()
    values = values_of(trainer, batch)
    for row, length in enumerate(batch.lengths.tolist()):
        scores = reward_model(input_ids=batch.ids[row : row + 1, :length]).logits  # of the last token alone
        hidden = reward_model.base_model(input_ids=batch.ids[row : row + 1, :length]).last_hidden_state[0]
        expected = hidden @ reward_model.score.weight[0]
        assert expected[-1].item() == pytest.approx(scores.item(), abs=1e-5)
        for position in range(1, length):
            if batch.loss_mask[row, position]:
                assert values[row, position].item() == pytest.approx(expected[position - 1].item(), abs=2e-5)


def test_a_critic_of_another_vocabulary_is_refused(model_directory, tmp_path):
    found = load_model(model_directory).config.vocab_size
    save_reward_model(model_directory, tmp_path, vocab_size=found + 8)
    with pytest.raises(ModelError, match=f"has {found + 8} tokens and the policy has {found}"):
        Trainer.from_directory(model_directory, TrainerConfig(), critic=tmp_path)


def assert_same_gradient(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert (gradient - second[name]).norm() <= tolerance * second[name].norm() + 1e-9, name


def test_a_new_critic_expects_nothing(model_directory, make_batch):
    assert not values_of(make_trainer(model_directory), make_batch()).any()


@pytest.mark.parametrize("is_packed", [True, False])
def test_values_and_gradients_equal_a_plain_regression_row_by_row(model_directory, make_batch, is_packed):
    trainer = with_random_head(make_trainer(model_directory, packing=is_packed, max_tokens_per_microbatch=30))
    batch = with_values(make_batch(), trainer)
    decoder = load_model(model_directory).base_model.eval()
    head = trainer.learner.critic.values.head
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in (head.weight, head.bias))
    loss = torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        hidden = decoder(input_ids=batch.ids[row : row + 1, :length]).last_hidden_state[0]
        for position in range(1, length):
            if batch.loss_mask[row, position]:
                value = hidden[position - 1] @ weight[0] + bias[0]  # from what stands before the token
                assert batch.columns[Column.VALUES][row, position].item() == pytest.approx(value.item(), abs=1e-5)
                error = value - batch.columns[Column.RETURNS][row, position]
                loss = loss + batch.loss_weights[row, position] * error**2 / 2
    loss.backward()
    gradients, report = gradients_of(trainer, batch)
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {f"decoder.{name}": parameter.grad for name, parameter in decoder.named_parameters()}
    assert_same_gradient(gradients, {**expected, "head.weight": weight.grad, "head.bias": bias.grad}, 1e-5)


@pytest.mark.parametrize(
    "settings", [{"max_tokens_per_microbatch": 8}, {"packing": False}, {"activation_checkpointing": True}], ids=str
)
def test_micro_batches_packing_and_recomputation_change_a_critics_gradient_by_rounding_only(
    model_directory, make_batch, settings
):
    whole = with_random_head(make_trainer(model_directory))
    batch = with_values(make_batch(), whole)
    expected, report = gradients_of(whole, batch)
    found, other = gradients_of(with_random_head(make_trainer(model_directory, **settings)), batch)
    assert_same_gradient(found, expected, 1e-5)
    assert other.loss == pytest.approx(report.loss, rel=1e-6)
    assert other.statistics["value"] == pytest.approx(report.statistics["value"], abs=1e-6)


def test_what_masked_positions_hold_changes_nothing_that_a_critic_learns(model_directory, make_batch):
    trainer = with_random_head(make_trainer(model_directory))
    batch = with_values(make_batch(), trainer)
    clean, report = gradients_of(trainer, batch)
    dirty = {column: values.masked_fill(~batch.loss_mask, math.nan) for column, values in batch.columns.items()}
    found, other = gradients_of(with_random_head(make_trainer(model_directory)), replace(batch, columns=dirty))
    assert all(torch.equal(found[name], gradient) for name, gradient in clean.items())
    assert other.loss == report.loss
    assert not batch.columns[Column.VALUES][~batch.loss_mask].any()


def test_a_critic_learns_how_much_is_still_to_come(model_directory, make_batch):
    # The return of a token is the share of its row that lies before it: no constant explains it, its position does.
    lengths = (9, 14, 11, 7, 14, 8)
    trainer = make_trainer(model_directory, lr=3e-3)
    batch = make_batch(lengths)
    returns = torch.arange(batch.ids.shape[1]) / 14 * batch.loss_mask
    batch = with_values(batch, trainer, returns)
    losses = [update(trainer, batch).loss for _ in range(60)]
    errors = (values_of(trainer, batch) - returns)[batch.loss_mask].abs()
    assert losses[-1] < losses[0] / 100
    assert errors.max() < 0.1


def test_policy_and_critic_do_not_touch_each_other(model_directory, make_batch):
    trainer = make_trainer(model_directory)
    batch = with_values(make_batch(), trainer)
    policy = {name: trainer.learner.tensor(name).clone() for name in trainer.learner.names()}
    assert update(trainer, batch).update == 1
    assert trainer.num_updates == 0
    assert all(torch.equal(trainer.learner.tensor(name), before) for name, before in policy.items())
    values = values_of(trainer, batch)
    assert values[batch.loss_mask].any()
    report = asyncio.run(trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    assert (report.update, trainer.num_updates) == (1, 1)
    assert torch.equal(values_of(trainer, batch), values)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loaded_critic_goes_on_as_the_saved_one_would_have_bit_for_bit(model_directory, make_batch, tmp_path, precision):
    settings = {"critic_updates": 6, "schedule": Schedule.COSINE, "precision": precision}
    straight, resumed = (make_trainer(model_directory, **settings) for _ in range(2))
    batches = [with_values(make_batch(seed=seed), straight) for seed in range(4)]
    for batch in batches[:2]:
        update(straight, batch)
    asyncio.run(straight.save(tmp_path))
    asyncio.run(resumed.load(tmp_path))
    assert torch.equal(values_of(resumed, batches[0]), values_of(straight, batches[0]))
    for batch in batches[2:]:
        assert update(resumed, batch) == update(straight, batch)
    assert torch.equal(values_of(resumed, batches[0]), values_of(straight, batches[0]))


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_needed(model_directory, tmp_path):
    asyncio.run(Trainer.from_directory(model_directory, TrainerConfig()).save(tmp_path))
    with pytest.raises(ModelError, match="holds no critic"):
        asyncio.run(make_trainer(model_directory).load(tmp_path))


def test_a_value_loss_that_is_not_finite_changes_nothing_and_ends_a_run_that_goes_on_so(
    model_directory, make_batch, monkeypatch
):
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 2)
    trainer = with_random_head(make_trainer(model_directory))
    batch = with_values(make_batch(), trainer)
    poisoned = replace(batch, columns={**batch.columns, Column.RETURNS: batch.columns[Column.RETURNS] * math.inf})
    report = update(trainer, poisoned)
    assert report.is_skipped
    assert torch.equal(values_of(trainer, batch), batch.columns[Column.VALUES])
    with pytest.raises(CannotLearnError, match=r"lower trainer\.critic\.optimizer\.lr"):
        update(trainer, poisoned)


def test_a_trainer_without_a_critic_says_so_and_a_batch_without_returns_too(model_directory, make_batch):
    plain = Trainer.from_directory(model_directory, TrainerConfig())
    with pytest.raises(ValueError, match="no critic to update"):
        update(plain, make_batch())
    with pytest.raises(ValueError, match="'values'"):
        values_of(plain, make_batch())
    with pytest.raises(ValueError, match="no values and no returns"):
        update(make_trainer(model_directory), make_batch())
    assert GRPO().critic is None
