import asyncio
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_tokens import token_logprobs
from transformers import AutoModelForCausalLM

from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column, LossInputs
from strop.engine.config import EngineConfig
from strop.engine.protocol import Capabilities, weights_checksum
from strop.engine.torch.engine import TorchEngine
from strop.errors import CannotLearnError, ModelError, RunError
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import Schedule
from strop.training.models import load_model
from strop.training.optimizer import TokenFigures, WeightsLost
from strop.training.sft import Demonstration, Segment, pack_demonstrations, sft_token_loss, sft_token_statistics

METHOD = GRPO()


def make_trainer(directory, *, lr=1e-2, grad_clip=0.0, **settings):
    config = TrainerConfig(optimizer=OptimizerConfig(lr=lr, grad_clip=grad_clip), **settings)
    return Trainer.from_directory(directory, config)


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.learner.weights.named().items()}


def gradients_of(trainer, batch, method=METHOD):
    """The gradient that an update of `batch` would use, by way of the update itself."""
    captured = {}
    trainer.learner.optimization.optimizer.step = lambda: captured.update(
        {name: parameter.grad.clone() for name, parameter in trainer.learner.weights.named().items()}
    )
    report = asyncio.run(trainer.update(batch, method.token_loss, method.token_statistics))
    return captured, report


def assert_same_gradient(first, second, tolerance):
    for name, gradient in first.items():
        assert (gradient - second[name]).norm() <= tolerance * second[name].norm(), name


def with_old_logprobs(batch, trainer, noise=0.0):
    scored = asyncio.run(trainer.score(batch, Column.OLD_LOGPROBS))
    shift = noise * torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(5))
    old = scored.columns[Column.OLD_LOGPROBS] + shift * batch.loss_mask
    return replace(scored, columns={Column.OLD_LOGPROBS: old})


def grpo_reference_loss(model, batch, lengths, groups):
    """rStar2-Agent Eq. 6 written out in loops: row by row without padding, mean over tokens of a group, then over groups."""
    old = batch.columns[Column.OLD_LOGPROBS]
    of_group = {group: [] for group in groups}
    for row, length in enumerate(lengths):
        logits = model(input_ids=batch.ids[row : row + 1, :length]).logits[0] / batch.temperature
        distribution = torch.log_softmax(logits, -1)
        for position in range(1, length):
            if batch.loss_mask[row, position]:
                ratio = (distribution[position - 1, batch.ids[row, position]] - old[row, position]).exp()
                advantage = batch.advantages[row, position]
                term = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                of_group[groups[row]].append(term)
    means = [torch.stack(terms).mean() for terms in of_group.values()]
    return -torch.stack(means).mean()


def test_gradients_equal_a_plain_grpo_loss_off_policy(model_directory, make_batch):
    trainer = make_trainer(model_directory, max_tokens_per_microbatch=30)
    batch = with_old_logprobs(make_batch(), trainer, noise=0.4)
    gradients, report = gradients_of(trainer, batch)
    model = load_model(model_directory).eval()
    loss = grpo_reference_loss(model, batch, [9, 14, 11, 7, 14, 8], [0, 0, 1, 1, 2, 2])
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert report.statistics["clip_fraction_high"] > 0  # the reference must have seen clipping
    assert_same_gradient(gradients, {name: parameter.grad for name, parameter in model.named_parameters()}, 1e-5)
    total = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    assert report.grad_norm == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10_000])
def test_micro_batch_size_changes_the_gradient_by_rounding_only(model_directory, make_batch, max_tokens):
    whole = make_trainer(model_directory, max_tokens_per_microbatch=100_000)
    batch = with_old_logprobs(make_batch(), whole, noise=0.4)
    expected, expected_report = gradients_of(whole, batch)
    gradients, report = gradients_of(make_trainer(model_directory, max_tokens_per_microbatch=max_tokens), batch)
    assert_same_gradient(gradients, expected, 2e-6)
    assert report.loss == pytest.approx(expected_report.loss, rel=1e-5)
    assert report.statistics == pytest.approx(expected_report.statistics, rel=1e-5, abs=1e-8)


def test_packing_changes_the_gradient_by_rounding_only(model_directory, make_batch):
    padded, packed = (make_trainer(model_directory, packing=is_packed) for is_packed in (False, True))
    batch = make_batch((40, 30, 44, 25, 14, 8))
    batch.ids[:2, :20] = batch.ids[2, :20]  # a prompt that three rows share
    batch = with_old_logprobs(batch, padded, noise=0.4)
    expected, expected_report = gradients_of(padded, batch)
    gradients, report = gradients_of(packed, batch)
    assert_same_gradient(gradients, expected, 5e-6)
    assert report.statistics == pytest.approx(expected_report.statistics, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_episode_split_in_two_rows_gives_the_gradient_of_the_whole(model_directory, make_batch, is_packed):
    trainer = make_trainer(model_directory, packing=is_packed)
    whole = with_old_logprobs(make_batch((40, 30)), trainer, noise=0.4)
    expected, _ = gradients_of(trainer, whole)
    twice = torch.tensor([0, 0, 1])  # its first 25 tokens are learnt from in one row, the others in another
    masks = whole.loss_mask[twice]
    masks[0, 25:] = False
    masks[1, :25] = False
    split = replace(
        whole,
        ids=whole.ids[twice],
        lengths=torch.tensor([25, 40, 30]),
        groups=torch.zeros(3, dtype=torch.int64),
        loss_mask=masks,
        is_banned=whole.is_banned[twice],
        loss_weights=whole.loss_weights[twice] * masks,
        advantages=whole.advantages[twice],
        sampled_logprobs=whole.sampled_logprobs[twice],
        columns={column: values[twice] for column, values in whole.columns.items()},
    )
    assert_same_gradient(gradients_of(trainer, split)[0], expected, 2e-6)


def left_padded(batch):
    """(moves columns of the batch so that rows end together, the attention mask of that)."""
    num_columns = batch.ids.shape[1]

    def move(values):
        return torch.stack([row.roll(num_columns - int(length)) for row, length in zip(values, batch.lengths, strict=True)])

    return move, move(torch.arange(num_columns) < batch.lengths[:, None])


@pytest.mark.parametrize("is_packed", [True, False])
def test_padding_on_the_left_of_a_plain_model_gives_the_gradient_of_the_trainer(model_directory, make_batch, is_packed):
    trainer = make_trainer(model_directory, packing=is_packed, max_tokens_per_microbatch=30)
    batch = with_old_logprobs(make_batch(), trainer, noise=0.4)
    gradients, report = gradients_of(trainer, batch)
    move, is_token = left_padded(batch)
    assert not is_token[3, 0]  # a row that is padded
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=move(batch.ids), attention_mask=is_token, position_ids=positions).logits / batch.temperature
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, move(batch.ids)[:, 1:, None]).squeeze(-1)
    inputs = LossInputs(
        loss_mask=move(batch.loss_mask)[:, 1:],
        advantages=move(batch.advantages)[:, 1:],
        sampled_logprobs=move(batch.sampled_logprobs)[:, 1:],
        entropies=torch.zeros_like(logprobs),
        columns={column: move(values)[:, 1:] for column, values in batch.columns.items()},
    )
    loss = (move(batch.loss_weights)[:, 1:] * METHOD.token_loss(logprobs, inputs)).sum()
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradient(gradients, {name: parameter.grad for name, parameter in model.named_parameters()}, 1e-5)


def rearranged(batch, order, num_padding):
    """The same rows in another order, with more columns of padding."""
    order = torch.tensor(order)

    def move(values):
        return torch.nn.functional.pad(values[order], (0, num_padding))

    return replace(
        batch,
        ids=move(batch.ids),
        lengths=batch.lengths[order],
        loss_mask=move(batch.loss_mask),
        is_banned=move(batch.is_banned),
        loss_weights=move(batch.loss_weights),
        advantages=move(batch.advantages),
        sampled_logprobs=move(batch.sampled_logprobs),
        columns={column: move(values) for column, values in batch.columns.items()},
    )


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(6)),
    num_padding=st.integers(0, 9),
    max_tokens=st.integers(1, 200),
    is_packed=st.booleans(),
    is_recomputed=st.booleans(),
)
def test_nothing_of_the_plumbing_changes_the_gradient_but_by_rounding(
    model_directory, make_batch, order, num_padding, max_tokens, is_packed, is_recomputed
):
    plain = make_trainer(model_directory, packing=False)
    batch = make_batch((30, 28, 44, 25, 14, 8))
    batch.ids[:2, :20] = batch.ids[2, :20]  # a prompt that three rows share
    batch = with_old_logprobs(batch, plain, noise=0.4)
    expected, expected_report = gradients_of(plain, batch)
    other = make_trainer(
        model_directory,
        packing=is_packed,
        max_tokens_per_microbatch=max_tokens,
        activation_checkpointing=is_recomputed,
    )
    gradients, report = gradients_of(other, rearranged(batch, order, num_padding))
    assert_same_gradient(gradients, expected, 1e-5)
    assert report.loss == pytest.approx(expected_report.loss, rel=1e-5, abs=1e-7)


def test_what_masked_positions_hold_changes_neither_loss_nor_gradient(model_directory, make_batch):
    trainer = make_trainer(model_directory)
    batch = with_old_logprobs(make_batch(), trainer, noise=0.4)
    expected, expected_report = gradients_of(trainer, batch)
    hidden = ~batch.loss_mask
    poisoned = replace(
        batch,
        advantages=batch.advantages.masked_fill(hidden, math.nan),
        sampled_logprobs=batch.sampled_logprobs.masked_fill(hidden, math.nan),
        columns={Column.OLD_LOGPROBS: batch.columns[Column.OLD_LOGPROBS].masked_fill(hidden, -math.inf)},
    )
    gradients, report = gradients_of(trainer, poisoned)
    assert report == replace(expected_report, update=2)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_update_on_policy_is_the_same_whether_its_old_logprobs_were_scored_or_not(model_directory, make_batch, precision):
    settings = {"precision": precision, "max_tokens_per_microbatch": 40}
    scored, unscored = (make_trainer(model_directory, **settings) for _ in range(2))
    expected, expected_report = gradients_of(scored, with_old_logprobs(make_batch(), scored))
    gradients, report = gradients_of(unscored, make_batch())
    assert report == expected_report
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_of_ratios_the_quantiles_and_the_largest_are_reported():
    figures = TokenFigures()
    mask = torch.tensor([[False, True, True], [False, True, False]])
    figures.add(mask, {"ratio": torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 9.0]]), "entropy_nats": mask * 0.5})
    figures.add(mask[:1], {"ratio": torch.tensor([[9.0, 4.0, 5.0]]), "entropy_nats": mask[:1] * 1.0})
    summary = figures.summary(5)
    assert summary["ratio"] == 3.0
    assert summary["entropy_nats"] == pytest.approx(0.7)
    assert (summary["ratio_p01"], summary["ratio_p99"]) == pytest.approx((1.04, 4.96))
    assert summary["ratio_max"] == 5.0
    assert "entropy_nats_max" not in summary


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_update_after_scoring_has_a_ratio_of_exactly_one(model_directory, make_batch, precision):
    trainer = make_trainer(model_directory, precision=precision, max_tokens_per_microbatch=40)
    batch = with_old_logprobs(make_batch(), trainer)
    report = asyncio.run(trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    assert report.statistics["ratio"] == 1.0
    assert report.statistics["old_kl_nats"] == 0.0
    again = asyncio.run(trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    assert again.statistics["ratio"] != 1.0


def test_bfloat16_computes_in_low_precision_and_keeps_its_weights_in_float32(model_directory, make_batch):
    low, full = make_trainer(model_directory, precision="bfloat16"), make_trainer(model_directory)
    batch = make_batch()
    gap = (
        with_old_logprobs(batch, low).columns[Column.OLD_LOGPROBS] - with_old_logprobs(batch, full).columns[Column.OLD_LOGPROBS]
    )
    assert 1e-5 < gap.abs().max().item() < 0.3
    asyncio.run(low.update(with_old_logprobs(batch, low), METHOD.token_loss, METHOD.token_statistics))
    assert {weights.dtype for weights in weights_of(low).values()} == {torch.float32}


def test_two_trainers_of_one_seed_are_equal_bit_for_bit(model_directory, make_batch):
    trainers = [make_trainer(model_directory) for _ in range(2)]
    for trainer in trainers:
        for seed in range(3):
            batch = with_old_logprobs(make_batch(seed=seed), trainer)
            asyncio.run(trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    first, second = map(weights_of, trainers)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_loaded_trainer_goes_on_as_the_saved_one_would_have_bit_for_bit(model_directory, make_batch, tmp_path):
    async def train(trainer, seeds):
        for seed in seeds:
            batch = await trainer.score(make_batch(seed=seed), Column.OLD_LOGPROBS)
            await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics)

    settings = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_updates=3, schedule=Schedule.COSINE, weight_decay=0.1))
    straight = Trainer.from_directory(model_directory, settings, total_updates=6)
    asyncio.run(train(straight, range(2)))
    asyncio.run(straight.save(tmp_path))
    asyncio.run(train(straight, range(2, 5)))
    resumed = Trainer.from_directory(model_directory, settings, total_updates=6)
    asyncio.run(resumed.load(tmp_path))
    assert resumed.num_updates == 2
    asyncio.run(train(resumed, range(2, 5)))
    first, second = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_saved_model_is_a_directory_that_transformers_loads_with_its_tokenizer_files(model_directory, tmp_path):
    trainer = make_trainer(model_directory)
    asyncio.run(trainer.save(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(torch.equal(loaded.get_parameter(name), weights) for name, weights in weights_of(trainer).items())
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"by": "hand"}'


def test_a_checkpoint_that_is_not_complete_is_refused(model_directory, make_batch, tmp_path):
    trainer = make_trainer(model_directory)
    with pytest.raises(RunError, match=r"trainer\.json: missing"):
        asyncio.run(trainer.load(tmp_path))
    asyncio.run(trainer.save(tmp_path))
    trained = make_trainer(model_directory)
    asyncio.run(trained.update(make_batch(), METHOD.token_loss, METHOD.token_statistics))
    asyncio.run(trained.save(tmp_path / "trained"))
    [file] = (tmp_path / "trained" / "state").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(RunError, match=r"state: cannot be read .* use the one before it"):
        asyncio.run(trainer.load(tmp_path / "trained"))
    (tmp_path / "state" / ".metadata").write_bytes(b"cut")
    with pytest.raises(RunError, match=r"state/\.metadata: cannot be read"):
        asyncio.run(trainer.load(tmp_path))
    (tmp_path / "state" / ".metadata").unlink()
    with pytest.raises(RunError, match=r"\.metadata: missing"):
        asyncio.run(trainer.load(tmp_path))


def test_a_state_that_cannot_be_written_is_told_with_its_place(model_directory, tmp_path):
    (tmp_path / "state").write_text("a file stands in the way")
    with pytest.raises(RunError, match="state: cannot be written"):
        asyncio.run(make_trainer(model_directory).save(tmp_path))


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        make_trainer(tmp_path)


class RecordingEngine:
    """Keeps what it is sent, as an engine of this dtype."""

    def __init__(self, dtype):
        self.capabilities = Capabilities(is_deterministic=True, can_fork=False, entropies="estimated", dtype=dtype)
        self.received = {}

    async def load_weights(self, publication):
        received = [named async for named in publication.tensors()]
        self.received = dict(received)
        assert len(self.received) == len(received)  # none of them twice
        self.version, self.checksum = publication.version, await publication.checksum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_matches_its_checksum_in_the_engines_dtype(model_directory, make_batch, dtype):
    trainer = make_trainer(model_directory)
    engine = RecordingEngine(dtype)
    checksum = asyncio.run(trainer.publish(engine, version=3))
    assert checksum == engine.checksum == weights_checksum(engine.received.items())
    assert engine.version == 3
    assert {tensor.dtype for tensor in engine.received.values()} == {dtype}
    assert "model.embed_tokens.weight" in engine.received
    assert "lm_head.weight" not in engine.received  # tied: sent once
    batch = with_old_logprobs(make_batch(), trainer)
    asyncio.run(trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    assert weights_checksum(engine.received.items()) == checksum  # an engine that keeps them is not changed by an update
    assert asyncio.run(trainer.publish(engine, version=4)) != checksum


@pytest.mark.parametrize("num_bytes", [1, 5000])
def test_a_publication_in_pieces_holds_every_tensor_once(model_directory, monkeypatch, num_bytes):
    """Pieces of one tensor and of a few: the trainer copies them, the engine takes them."""
    monkeypatch.setattr("strop.training.trainer.COPIED_AT_ONCE", num_bytes)
    monkeypatch.setattr("strop.engine.torch.engine.COPIED_AT_ONCE", num_bytes)

    async def publish():
        trainer, recording = make_trainer(model_directory), RecordingEngine(torch.float32)
        engine = TorchEngine.from_directory(model_directory, EngineConfig(slots=2, max_length=32, dtype="float32"))
        try:
            assert await trainer.publish(recording, version=1) == await trainer.publish(engine, version=1)
        finally:
            await engine.close()
            await trainer.close()
        return recording.received

    assert set(asyncio.run(publish())) == set(dict(load_model(model_directory).named_parameters()))


def poisoned(batch):
    return replace(batch, advantages=batch.advantages.masked_fill(batch.loss_mask, math.nan))


def test_an_update_that_is_not_finite_is_skipped_and_changes_nothing(model_directory, make_batch, monkeypatch):
    monkeypatch.setattr("strop.training.optimizer.MAX_SKIPPED", 2)
    trainer = make_trainer(model_directory)
    before = weights_of(trainer)
    good = with_old_logprobs(make_batch(), trainer)

    async def scenario():
        skipped = await trainer.update(poisoned(good), METHOD.token_loss, METHOD.token_statistics)
        assert skipped.is_skipped
        assert "loss is nan" in skipped.skip_reason
        assert skipped.update == trainer.num_updates == 0
        assert all(torch.equal(before[name], weights) for name, weights in weights_of(trainer).items())
        assert not (await trainer.update(good, METHOD.token_loss, METHOD.token_statistics)).is_skipped
        await trainer.update(poisoned(good), METHOD.token_loss, METHOD.token_statistics)
        with pytest.raises(CannotLearnError, match="2 updates in a row were skipped"):
            await trainer.update(poisoned(good), METHOD.token_loss, METHOD.token_statistics)

    asyncio.run(scenario())


def infinite_loss(policy_logprobs, inputs):
    return METHOD.token_loss(policy_logprobs, inputs).masked_fill(inputs.loss_mask, math.inf)


def finite_loss_of_infinite_gradient(policy_logprobs, inputs):
    steep = (policy_logprobs - policy_logprobs.detach()).abs().sqrt()  # 0, where its slope is not finite
    return METHOD.token_loss(policy_logprobs, inputs) + torch.where(inputs.loss_mask, steep, 0.0)


@pytest.mark.parametrize(
    ("token_loss", "reason"),
    [(infinite_loss, "loss is inf"), (finite_loss_of_infinite_gradient, r"loss is -?\d.*, gradient norm is (nan|inf)")],
)
def test_an_infinite_loss_and_an_infinite_gradient_of_a_finite_one_are_skipped(model_directory, make_batch, token_loss, reason):
    trainer = make_trainer(model_directory)
    before = weights_of(trainer)
    batch = with_old_logprobs(make_batch(), trainer)
    skipped = asyncio.run(trainer.update(batch, token_loss, METHOD.token_statistics))
    assert re.search(reason, skipped.skip_reason)
    assert all(torch.equal(before[name], weights) for name, weights in weights_of(trainer).items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_whose_weights_are_not_finite_is_told_and_nothing_of_them_gets_out(
    model_directory, make_batch, tmp_path, precision
):
    """A finite gradient, and a learning rate that no weight survives."""
    trainer = make_trainer(model_directory, precision=precision)
    doomed = make_trainer(model_directory, precision=precision, lr=1e38)
    good = with_old_logprobs(make_batch(), trainer)

    async def scenario():
        await trainer.update(good, METHOD.token_loss, METHOD.token_statistics)
        await trainer.save(tmp_path / "before")
        expected = weights_of(trainer)
        await doomed.load(tmp_path / "before")
        told = r"update 2 under trainer\.optimizer made weights that are not finite.*lower trainer\.optimizer\.lr"
        with pytest.raises(WeightsLost, match=told):
            await doomed.update(good, METHOD.token_loss, METHOD.token_statistics)
        engine = RefusingEngine()
        for call in (
            lambda: doomed.save(tmp_path / "after"),
            lambda: doomed.snapshot(),
            lambda: doomed.save_model(tmp_path / "product"),
            lambda: doomed.publish(engine, version=1),
            lambda: doomed.score(good, Column.OLD_LOGPROBS),
            lambda: doomed.update(good, METHOD.token_loss, METHOD.token_statistics),
        ):
            with pytest.raises(WeightsLost, match=told):
                await call()
        assert not (tmp_path / "after").exists()
        assert not (tmp_path / "product").exists()
        await doomed.load(tmp_path / "before")
        assert all(torch.equal(expected[name], weights) for name, weights in weights_of(doomed).items())
        await doomed.save(tmp_path / "after")

    asyncio.run(scenario())


class RefusingEngine:
    capabilities = Capabilities(is_deterministic=True, can_fork=False, entropies="estimated", dtype=torch.float32)

    async def load_weights(self, publication):
        raise AssertionError("something was published")


def test_large_weights_are_no_lost_ones(model_directory, make_batch):
    """Their squares are not finite, they are."""
    trainer = make_trainer(model_directory, lr=1e30)
    report = asyncio.run(trainer.update(make_batch(), METHOD.token_loss, METHOD.token_statistics))
    assert not report.is_skipped
    assert 1e29 < max(weights.abs().max() for weights in weights_of(trainer).values()) < math.inf


def test_a_batch_without_a_token_to_train_on_is_skipped(model_directory, make_batch):
    trainer = make_trainer(model_directory)
    report = asyncio.run(trainer.update(make_batch((3, 2)), METHOD.token_loss, METHOD.token_statistics))
    assert report.skip_reason == "none of the 2 rows has a token to train on"


def test_the_gradient_is_clipped_to_its_norm_and_reported_as_it_was(model_directory, make_batch):
    free, clipped = make_trainer(model_directory), make_trainer(model_directory, grad_clip=0.01)
    batch = with_old_logprobs(make_batch(), free)
    gradients, report = gradients_of(clipped, batch)
    assert report.grad_norm == gradients_of(free, batch)[1].grad_norm > 0.01
    assert math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values())) == pytest.approx(0.01, rel=1e-3)


def test_a_reset_optimizer_forgets_its_moments_and_its_schedule_but_not_its_updates(model_directory, make_batch):
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_updates=4))
    trainer = Trainer.from_directory(model_directory, config)
    batch = with_old_logprobs(make_batch(), trainer)

    async def scenario():
        reports = [await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics) for _ in range(2)]
        await trainer.reset_optimizer()
        reports.append(await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
        return reports

    reports = asyncio.run(scenario())
    assert [report.learning_rate for report in reports] == pytest.approx([2.5e-4, 5e-4, 2.5e-4])
    assert [report.update for report in reports] == [1, 2, 3]


def test_the_reference_stays_what_it_was_while_the_policy_moves(model_directory, make_batch):
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2))
    trainer = Trainer.from_directory(model_directory, config, reference=model_directory)
    method = GRPO(kl_coefficient=0.1)

    async def scenario():
        batch = await trainer.score(make_batch(), Column.OLD_LOGPROBS)
        batch = await trainer.score(batch, Column.REFERENCE_LOGPROBS)
        first = await trainer.update(batch, method.token_loss, method.token_statistics)
        second = await trainer.update(batch, method.token_loss, method.token_statistics)
        rescored = await trainer.score(batch, Column.REFERENCE_LOGPROBS)
        return first, second, batch, rescored

    first, second, batch, rescored = asyncio.run(scenario())
    assert first.statistics["reference_kl_nats"] == 0.0
    assert second.statistics["reference_kl_nats"] > 0.0
    assert torch.equal(batch.columns[Column.REFERENCE_LOGPROBS], rescored.columns[Column.REFERENCE_LOGPROBS])


def test_a_column_that_no_model_here_can_fill_is_refused(model_directory, make_batch):
    with pytest.raises(ValueError, match="reference_logprobs"):
        asyncio.run(make_trainer(model_directory).score(make_batch(), Column.REFERENCE_LOGPROBS))


def test_sft_learns_a_demonstration_by_heart(model_directory):
    trainer = make_trainer(model_directory, grad_clip=1.0)
    talk = Demonstration(
        segments=(Segment(ids=(1, 2, 3), is_demonstrator=False), Segment(ids=(9, 8, 7, 6), is_demonstrator=True))
    )

    async def scenario():
        return [await trainer.update(pack_demonstrations([talk]), sft_token_loss, sft_token_statistics) for _ in range(40)]

    reports = asyncio.run(scenario())
    assert reports[0].loss > 2.0  # log 61 = 4.1 for a uniform guess
    assert reports[-1].loss < 0.05
    assert reports[0].statistics["logprob_nats"] == pytest.approx(-reports[0].loss, rel=1e-5)


def test_the_event_loop_runs_on_while_the_trainer_computes(model_directory, make_batch):
    """Model compute is in a worker thread."""
    trainer = make_trainer(model_directory)

    async def scenario():
        task = asyncio.ensure_future(trainer.score(make_batch((40,) * 64), Column.OLD_LOGPROBS))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return ticks

    assert asyncio.run(scenario()) >= 3


def saved_bytes(trainer, batch):
    """What a backward pass over `batch` would have to keep, and the gradient that it gives."""
    sizes = []

    def count(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    model = trainer.learner.model
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs, entropies = token_logprobs(model, batch.ids, batch.loss_mask, temperature=batch.temperature)
    (logprobs + 0.1 * entropies).sum().backward()
    return sum(sizes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_that_are_computed_again_give_the_same_loss_and_gradient_bit_for_bit(
    model_directory, make_batch, precision
):
    kept, recomputed = (
        make_trainer(model_directory, precision=precision, activation_checkpointing=is_on) for is_on in (False, True)
    )
    batch = with_old_logprobs(make_batch(), kept, noise=0.4)
    expected, expected_report = gradients_of(kept, batch)
    gradients, report = gradients_of(recomputed, batch)
    assert report == expected_report
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_activations_that_are_computed_again_are_not_kept(model_directory, make_batch):
    kept, recomputed = (make_trainer(model_directory, activation_checkpointing=is_on) for is_on in (False, True))
    batch = make_batch((40,) * 4)
    assert saved_bytes(recomputed, batch) < 0.5 * saved_bytes(kept, batch)


def test_activations_are_computed_again_without_dropout(model_directory, make_batch, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    batch = make_batch()
    expected, _ = gradients_of(make_trainer(model_directory), batch)
    gradients, _ = gradients_of(make_trainer(tmp_path, activation_checkpointing=True), batch)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_refreshed_reference_is_the_policy_of_then_also_after_a_resume(model_directory, make_batch, tmp_path, precision):
    config = TrainerConfig(precision=precision, optimizer=OptimizerConfig(lr=1e-2))
    straight, resumed = (Trainer.from_directory(model_directory, config, reference=model_directory) for _ in range(2))

    async def train(trainer, seeds):
        for seed in seeds:
            batch = await trainer.score(make_batch(seed=seed), Column.REFERENCE_LOGPROBS)
            yield await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics)

    async def scores(trainer, column):
        return (await trainer.score(make_batch(), column)).columns[column]

    async def scenario():
        [_ async for _ in train(straight, range(2))]
        await straight.refresh_reference()
        then = await scores(straight, Column.OLD_LOGPROBS)
        assert torch.equal(await scores(straight, Column.REFERENCE_LOGPROBS), then)
        [_ async for _ in train(straight, range(2, 3))]
        await straight.save(tmp_path)
        await resumed.load(tmp_path)
        assert torch.equal(await scores(resumed, Column.REFERENCE_LOGPROBS), then)
        expected = [report async for report in train(straight, range(3, 5))]
        assert [report async for report in train(resumed, range(3, 5))] == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_checkpoint_from_before_a_refresh_brings_the_first_reference_back(model_directory, make_batch, tmp_path, lora):
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), lora=lora)
    trainer = Trainer.from_directory(model_directory, config, reference=model_directory)

    async def step():
        batch = await trainer.score(make_batch(), Column.REFERENCE_LOGPROBS)
        return batch, await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics)

    async def scenario():
        await step()
        await trainer.save(tmp_path)
        first, expected = await step()
        await trainer.refresh_reference()
        moved, _ = await step()
        assert not torch.equal(moved.columns[Column.REFERENCE_LOGPROBS], first.columns[Column.REFERENCE_LOGPROBS])
        await trainer.load(tmp_path)
        again, report = await step()
        assert torch.equal(again.columns[Column.REFERENCE_LOGPROBS], first.columns[Column.REFERENCE_LOGPROBS])
        assert report == expected

    asyncio.run(scenario())
