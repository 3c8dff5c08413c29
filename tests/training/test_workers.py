"""Two processes that divide a model do what one process does: the same gradient, the same update, the same checkpoints."""

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column
from strop.engine.protocol import Capabilities, weights_checksum
from strop.errors import CannotLearnError, MachineError, ModelError, RunError, TrainerLost, UserError
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import LoraConfig
from strop.training.optimizer import WeightsLost

pytestmark = pytest.mark.usefixtures("one_ray")

METHOD = GRPO(kl_coefficient=0.1)
# With so large an eps AdamW's first step is 100 times the gradient, so that weights tell it to 1e-6.
TELLING = OptimizerConfig(lr=1e8, eps=1e6, grad_clip=0.0)


class RecordingEngine:
    def __init__(self, dtype=torch.float32):
        self.capabilities = Capabilities(is_deterministic=True, can_fork=False, entropies="estimated", dtype=dtype)
        self.received = {}

    async def load_weights(self, publication):
        self.received = {name: tensor.clone() async for name, tensor in publication.tensors()}
        assert weights_checksum(self.received.items()) == await publication.checksum()


async def weights_of(trainer):
    engine = RecordingEngine()
    await trainer.publish(engine, version=1)
    return engine.received


async def train(trainer, make_batch, seeds):
    reports = []
    for seed in seeds:
        batch = make_batch(seed=seed)
        for column in (Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS):
            batch = await trainer.score(batch, column)
        reports.append(await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
    return reports


def config_of(workers, **settings):
    settings.setdefault("optimizer", OptimizerConfig(lr=1e-2, warmup_updates=3, weight_decay=0.1))
    settings.setdefault("max_tokens_per_microbatch", 30)
    return TrainerConfig(workers=workers, **settings)


def closing(scenario, *trainers):
    """Run `scenario`, then close the trainers, whatever happened."""

    async def run():
        try:
            return await scenario()
        finally:
            for trainer in trainers:
                await trainer.close()

    return asyncio.run(run())


def both(directory, **settings):
    return [Trainer.from_directory(directory, config_of(workers, **settings), reference=directory) for workers in (0, 2)]


def assert_close(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= tolerance * second[name].norm(), name


async def gradients_of_both(alone, divided, batch):
    """Reports and steps, which tell the gradient, of an update of one process and of two ranks from the same weights."""
    before = await weights_of(alone)
    batch = await alone.score(batch, Column.OLD_LOGPROBS)
    noise = 0.4 * torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(5))
    shifted = {Column.OLD_LOGPROBS: batch.columns[Column.OLD_LOGPROBS] + noise * batch.loss_mask}
    batch = await alone.score(replace(batch, columns=shifted), Column.REFERENCE_LOGPROBS)
    reports, steps = [], []
    for trainer in (alone, divided):
        reports.append(await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
        after = await weights_of(trainer)
        steps.append({name: after[name] - before[name] for name in before})
    return reports, steps


def assert_equal_but_for_rounding(reports, steps):
    (first, second), (expected, gradient) = reports, steps
    assert min(step.norm().item() for step in expected.values()) > 1
    assert_close(gradient, expected, 1e-5)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.statistics == pytest.approx(first.statistics, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True, "packing": False}], ids=str)
def test_two_ranks_give_the_gradient_of_one_by_rounding_only(model_directory, make_batch, settings):
    alone, divided = both(model_directory, optimizer=TELLING, **settings)
    batch = make_batch((9, 14, 11, 7, 14, 8, 12))
    assert_equal_but_for_rounding(*closing(lambda: gradients_of_both(alone, divided, batch), alone, divided))


@pytest.fixture(scope="module")
def tied_with_head(model_directory, tmp_path_factory):
    """The model with what other programs write beside it: a tied head once more, and settings of generation."""
    path = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(model_directory, path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 20}')
    return path


@pytest.fixture(scope="module")
def telling(tied_with_head, tmp_path_factory):
    """Two ranks that several tests share, since they take seconds to start, and a checkpoint of them as they began."""
    settings = {"optimizer": TELLING, "max_tokens_per_microbatch": 5}
    divided = Trainer.from_directory(tied_with_head, config_of(2, **settings), reference=tied_with_head)
    began = tmp_path_factory.mktemp("ranks") / "began"
    asyncio.run(divided.save(began))
    yield divided, began, settings
    asyncio.run(divided.close())


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((9, 14, 11, 7, 14, 8, 12), id="seven micro-batches, so one rank has a blank one"),
        pytest.param((12,), id="one row, so one rank has nothing but a blank"),
    ],
)
def test_ranks_of_which_one_has_a_blank_give_the_gradient_of_one_process(telling, model_directory, make_batch, lengths):
    divided, began, settings = telling
    alone = Trainer.from_directory(model_directory, config_of(0, **settings), reference=model_directory)

    async def scenario():
        await divided.load(began)
        return await gradients_of_both(alone, divided, make_batch(lengths))

    assert_equal_but_for_rounding(*closing(scenario, alone))


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(telling, make_batch):
    divided, began, _ = telling
    batch = make_batch()
    poisoned = replace(batch, advantages=batch.advantages.clone())
    poisoned.advantages[0, 3] = math.nan  # one token, so of one rank

    async def scenario():
        await divided.load(began)
        before = await weights_of(divided)
        report = await divided.update(poisoned, GRPO().token_loss, GRPO().token_statistics)
        assert "loss is nan" in report.skip_reason
        after = await weights_of(divided)
        assert all(torch.equal(before[name], after[name]) for name in before)
        await divided.update(poisoned, GRPO().token_loss, GRPO().token_statistics)
        with pytest.raises(CannotLearnError, match="3 updates in a row were skipped"):
            await divided.update(poisoned, GRPO().token_loss, GRPO().token_statistics)
        assert not (await divided.update(batch, GRPO().token_loss, GRPO().token_statistics)).is_skipped

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"precision": "bfloat16"}, {"lora": LoraConfig(rank=4)}],
    ids=["bfloat16", "adapter"],
)
def test_two_ranks_train_as_one_does_in_bfloat16_and_with_an_adapter(model_directory, make_batch, settings):
    alone, divided = both(model_directory, **settings)

    async def scenario():
        reports = [await train(trainer, make_batch, range(3)) for trainer in (alone, divided)]
        for trainer in (alone, divided):
            await trainer.refresh_reference()
            reports.append(await train(trainer, make_batch, range(3, 5)))
        return reports, await weights_of(alone), await weights_of(divided)

    (first, second, later, later_divided), expected, found = closing(scenario, alone, divided)
    tolerance = 2e-2 if "precision" in settings else 1e-4
    for ours, theirs in zip(second + later_divided, first + later, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=tolerance, abs=1e-3)
        assert ours.statistics["reference_kl_nats"] == pytest.approx(
            theirs.statistics["reference_kl_nats"], rel=10 * tolerance, abs=1e-4
        )
    assert later_divided[0].statistics["reference_kl_nats"] == 0.0
    assert first[0].statistics["ratio"] == second[0].statistics["ratio"] == 1.0
    assert_close(found, expected, tolerance)


@pytest.mark.slow
def test_one_rank_and_two_write_the_same_base_beside_an_adapter_in_bfloat16(model_directory, make_batch, tmp_path):
    settings = {"precision": "bfloat16", "lora": LoraConfig(rank=4)}
    alone, divided = (Trainer.from_directory(model_directory, config_of(workers, **settings)) for workers in (0, 2))
    products = []

    async def scenario():
        for name in ("untrained", "trained"):
            for trainer in (alone, divided):
                path = tmp_path / f"{name}-{len(products)}"
                await trainer.save_model(path)
                products.append(load_file(path / "model.safetensors"))
                await trainer.update(make_batch(), GRPO().token_loss, GRPO().token_statistics)

    closing(scenario, alone, divided)
    base = load_file(model_directory / "model.safetensors")
    for product in products[:2]:  # B is zero
        assert product.keys() == base.keys()
        assert all(torch.equal(product[name], base[name]) for name in base)
    one, two = products[2:]
    frozen = {name for name in base if "_proj" not in name}
    assert all(torch.equal(one[name], base[name]) and torch.equal(two[name], base[name]) for name in frozen)
    assert_close(two, one, 2e-2)
    assert not any(torch.equal(one[name], base[name]) for name in base.keys() - frozen)


@pytest.mark.slow
def test_a_step_whose_weights_are_not_finite_on_one_rank_is_told_by_all(model_directory, make_batch, tmp_path):
    doomed = Trainer.from_directory(model_directory, config_of(2, optimizer=OptimizerConfig(lr=1e38)))

    async def scenario():
        for call in (
            lambda: doomed.update(make_batch(), GRPO().token_loss, GRPO().token_statistics),
            lambda: doomed.save(tmp_path / "after"),
            lambda: weights_of(doomed),
        ):
            with pytest.raises(WeightsLost, match=r"update 1 under trainer\.optimizer made weights that are not finite"):
                await call()

    closing(scenario, doomed)


@pytest.mark.slow
def test_large_weights_of_two_ranks_are_no_lost_ones(model_directory, make_batch):
    trainer = Trainer.from_directory(model_directory, config_of(2, optimizer=OptimizerConfig(lr=1e30)))

    async def scenario():
        await trainer.update(make_batch(), GRPO().token_loss, GRPO().token_statistics)
        return await weights_of(trainer)

    assert 1e29 < max(weights.abs().max() for weights in closing(scenario, trainer).values()) < math.inf


@pytest.fixture(scope="module")
def two(model_directory, tmp_path_factory):
    """Two trainers of two ranks each that several tests share, and a checkpoint of them as they began."""
    trainers = [Trainer.from_directory(model_directory, config_of(2), reference=model_directory) for _ in range(2)]
    began = tmp_path_factory.mktemp("two") / "began"
    asyncio.run(trainers[0].save(began))
    yield *trainers, began
    for trainer in trainers:
        asyncio.run(trainer.close())


@pytest.mark.slow
def test_two_ranks_bring_the_first_reference_back(two, make_batch, tmp_path):
    trainer, _, began = two

    async def reference_scores():
        return (await trainer.score(make_batch(), Column.REFERENCE_LOGPROBS)).columns[Column.REFERENCE_LOGPROBS]

    async def scenario():
        await trainer.load(began)
        await train(trainer, make_batch, range(1))
        first = await reference_scores()
        await trainer.save(tmp_path)
        await trainer.refresh_reference()
        assert not torch.equal(await reference_scores(), first)
        await trainer.load(tmp_path)
        assert torch.equal(await reference_scores(), first)

    asyncio.run(scenario())


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit_and_other_numbers_up_to_rounding(two, model_directory, make_batch, tmp_path):
    straight, resumed, began = two
    alone, again = (Trainer.from_directory(model_directory, config_of(0), reference=model_directory) for _ in range(2))

    async def scenario():
        await straight.load(began)
        await train(straight, make_batch, range(2))
        await straight.refresh_reference()
        await straight.save(tmp_path / "two")
        expected = await train(straight, make_batch, range(2, 5))
        weights = await weights_of(straight)

        await resumed.load(tmp_path / "two")
        assert resumed.num_updates == 2
        assert await train(resumed, make_batch, range(2, 5)) == expected
        exact = await weights_of(resumed)
        assert all(torch.equal(exact[name], weights[name]) for name in weights)

        await alone.load(tmp_path / "two")
        await alone.save(tmp_path / "one")
        await train(alone, make_batch, range(2, 5))
        assert_close(await weights_of(alone), weights, 1e-4)

        await resumed.load(tmp_path / "one")
        await train(resumed, make_batch, range(2, 5))
        exact = await weights_of(resumed)
        assert all(torch.equal(exact[name], weights[name]) for name in weights)  # nothing was lost on the way
        await again.load(tmp_path / "one")
        assert again.num_updates == 2

    closing(scenario, alone, again)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    assert loaded.config.vocab_size == 61
    assert (tmp_path / "two" / "model" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_ranks_write_a_snapshot_while_they_train_on_and_outlive_one_that_cannot_be_written(two, make_batch, tmp_path):
    straight, resumed, began = two

    async def scenario():
        await straight.load(began)
        await train(straight, make_batch, range(2))
        write = await straight.snapshot()
        writing = asyncio.create_task(asyncio.to_thread(write, tmp_path / "two"))
        expected = await train(straight, make_batch, range(2, 5))
        await writing
        await resumed.load(tmp_path / "two")
        assert await train(resumed, make_batch, range(2, 5)) == expected
        for part in ("model", "state"):  # the first is written by one rank, the second by both
            path = tmp_path / part
            path.mkdir()
            (path / part).write_text("a file stands in the way")
            write = await straight.snapshot()
            with pytest.raises(RunError, match=f"{part}/{part}: cannot be written"):
                await asyncio.to_thread(write, path)
        await train(straight, make_batch, range(5, 6))
        assert straight.num_updates == 6

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def pair(model_directory):
    trainer = Trainer.from_directory(model_directory, config_of(2))
    yield trainer
    asyncio.run(trainer.close())


@pytest.mark.slow
def test_tensors_come_one_by_one_in_the_engines_dtype(pair, model_directory):
    engine = RecordingEngine(torch.bfloat16)
    checksum = asyncio.run(pair.publish(engine, version=1))
    local = RecordingEngine(torch.bfloat16)
    assert asyncio.run(Trainer.from_directory(model_directory, TrainerConfig()).publish(local, version=1)) == checksum
    assert engine.received.keys() == local.received.keys()


@pytest.mark.slow
def test_faults_of_the_caller_are_told_as_by_one_process_and_the_workers_live_on(pair, make_batch, tmp_path):
    with pytest.raises(ValueError, match="no model that can fill 'reference_logprobs'"):
        asyncio.run(pair.score(make_batch(), Column.REFERENCE_LOGPROBS))
    with pytest.raises(ValueError, match="no lambda and no local function"):
        asyncio.run(pair.update(make_batch(), lambda logprobs, inputs: logprobs, GRPO().token_statistics))
    asyncio.run(pair.score(make_batch(), Column.OLD_LOGPROBS))


@pytest.mark.slow
def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        Trainer.from_directory(tmp_path, config_of(2))


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_takes_the_others_with_it(model_directory, make_batch):
    trainer = Trainer.from_directory(model_directory, config_of(2))
    processes = [psutil.Process(each.pid) for each in trainer.learner._actors.processes]
    processes[1].kill()

    async def scenario():
        with pytest.raises(TrainerLost, match=r"rank 1 of 2 of the trainer .* ended during update"):
            await trainer.update(make_batch(), GRPO().token_loss, GRPO().token_statistics)
        with pytest.raises(TrainerLost, match="what is left is the last checkpoint"):
            await trainer.score(make_batch(), Column.OLD_LOGPROBS)

    closing(scenario, trainer)
    assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_within_seconds(model_directory, make_batch):
    trainer = Trainer.from_directory(model_directory, config_of(2))
    os.kill(trainer.learner._actors.processes[1].pid, signal.SIGSTOP)

    async def scenario():
        with pytest.raises(TrainerLost, match=r"^rank 1 of 2 .* was stopped during update"):
            await trainer.update(make_batch(), GRPO().token_loss, GRPO().token_statistics)

    closing(scenario, trainer)


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(model_directory):
    code = f"""
import time
from pathlib import Path
from strop.training import TrainerConfig, Trainer
trainer = Trainer.from_directory(Path({str(model_directory)!r}), TrainerConfig(workers=2))
print(*(each.pid for each in trainer.learner._actors.processes), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = parent.stdout.readline().split()
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_without_ray_are_refused_with_what_to_install(model_directory, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trainer\.workers needs Ray.*pip install 'strop\[cluster\]'"):
        Trainer.from_directory(model_directory, config_of(2))


def test_ranks_save_what_one_process_saves_of_a_model_of_others(telling, tied_with_head, tmp_path):
    divided, began, settings = telling
    alone = Trainer.from_directory(tied_with_head, config_of(0, **settings))

    async def scenario():
        await divided.load(began)
        for number, trainer in enumerate((alone, divided)):
            await trainer.save_model(tmp_path / str(number))

    closing(scenario, alone)
    alone, divided = (json.loads((tmp_path / name / "generation_config.json").read_text()) for name in "01")
    assert alone == divided
    assert alone["eos_token_id"] == [7, 9]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "01"]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_publication_that_one_rank_cannot_write_leaves_the_ranks_as_they_are(telling, tmp_path):
    trainer, _, _ = telling
    (tmp_path / "rank-0001-00000.safetensors").mkdir()  # where rank 1 is to write
    with pytest.raises(MachineError, match=r"rank-0001.*cannot be written.*Free space in"):
        trainer.learner.write_published([tmp_path, tmp_path], torch.float32)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert trainer.learner.write_published([empty, empty], torch.float32) == trainer.learner.checksum(torch.float32)
