"""LoRA: an adapter is trained, the model beside it stays, and what is published is both together."""

import asyncio
import builtins
import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column
from strop.engine.model_directory import tensors_in
from strop.engine.protocol import Capabilities, weights_checksum
from strop.errors import ModelError, RunError
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import LoraConfig
from strop.training.models import load_model

METHOD = GRPO(kl_coefficient=0.1)


def make_trainer(directory, *, reference=None, rank=4, **settings):
    lora = LoraConfig(rank=rank, alpha=8)
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), lora=lora, **settings)
    return Trainer.from_directory(directory, config, reference=reference)


async def train(trainer, make_batch, seeds, refresh_after=None):
    reports = []
    for seed in seeds:
        batch = await trainer.score(make_batch(seed=seed), Column.REFERENCE_LOGPROBS)
        reports.append(await trainer.update(batch, METHOD.token_loss, METHOD.token_statistics))
        if seed == refresh_after:
            await trainer.refresh_reference()
    return reports


def published(trainer):
    return {name: trainer.learner.tensor(name).clone() for name in trainer.learner.names()}


def test_an_adapter_starts_as_the_model_itself_under_its_own_names(model_directory):
    tensors = published(make_trainer(model_directory))
    expected = dict(load_model(model_directory).named_parameters())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained_and_what_is_published_is_what_the_library_merges(
    model_directory, make_batch, tmp_path, precision
):
    trainer = make_trainer(model_directory, reference=model_directory, precision=precision)
    asyncio.run(train(trainer, make_batch, range(3)))
    asyncio.run(trainer.save(tmp_path))
    merged = PeftModel.from_pretrained(load_model(model_directory), tmp_path / "adapter").merge_and_unload()
    tensors, original = published(trainer), dict(load_model(model_directory).named_parameters())
    for name, expected in merged.named_parameters():
        torch.testing.assert_close(tensors[name], expected, rtol=1e-5, atol=1e-6)
    moved = {name for name in tensors if (tensors[name] - original[name]).abs().max() > 1e-2}
    assert moved == {name for name in tensors if "_proj" in name}  # all linear layers, neither norms nor the tied head
    assert all(torch.equal(tensors[name], original[name]) for name in tensors.keys() - moved)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_takes_adapters_gets_what_is_merged_for_others_less_the_model(model_directory, make_batch, dtype):
    async def files(trainer):
        engine = Capabilities(is_deterministic=False, can_fork=False, entropies="estimated", dtype=dtype, takes_adapters=True)
        async with await trainer.publication(engine, version=1) as publication:
            directory = await publication.files()
            matrices = dict(tensors_in([directory / "adapter_model.safetensors"]))
            description = json.loads((directory / "adapter_config.json").read_text())
            assert await publication.checksum() == weights_checksum(matrices.items())
            assert [path.name for path in directory.glob("*.safetensors")] == ["adapter_model.safetensors"]
            return matrices, description

    trainer = make_trainer(model_directory, reference=model_directory)
    asyncio.run(train(trainer, make_batch, range(2)))
    matrices, description = asyncio.run(files(trainer))
    original, merged = dict(load_model(model_directory).named_parameters()), published(trainer)
    assert description["r"] == description["lora_alpha"] == 4
    assert set(description["target_modules"]) == {name.split(".")[-2] for name in merged if "_proj" in name}
    assert {each.dtype for each in matrices.values()} == {dtype}
    layers = {name.removesuffix(".weight") for name in merged if "_proj" in name}
    assert len(matrices) == 2 * len(layers)
    for layer in layers:
        a, b = (matrices[f"base_model.model.{layer}.lora_{part}.weight"].float() for part in "AB")
        added = merged[f"{layer}.weight"] - original[f"{layer}.weight"]
        assert (b @ a - added).abs().max() <= (1e-6 if dtype is torch.float32 else 0.02 * added.abs().max())


def delta(trainer, name):
    """What the adapter adds to a weight: (alpha / rank) B A."""
    layer = name.removesuffix(".weight")
    a, b = (trainer.learner.weights.whole(f"{layer}.lora_{part}.default.weight").double() for part in "AB")
    return 8 / 4 * b @ a


def test_in_bfloat16_the_product_is_the_float32_base_and_what_the_adapter_adds(model_directory, make_batch, tmp_path):
    trainer = make_trainer(model_directory, reference=model_directory, precision="bfloat16")
    asyncio.run(train(trainer, make_batch, range(2)))
    asyncio.run(trainer.save_model(tmp_path))
    product = load_file(tmp_path / "model.safetensors")
    base = dict(load_model(model_directory).named_parameters())
    assert any(not torch.equal(tensor.bfloat16().float(), tensor) for tensor in base.values()), "rounding would lose nothing"
    frozen = {name: each for name, each in trainer.learner.model.named_parameters() if not each.requires_grad}
    assert {each.dtype for each in frozen.values()} == {torch.bfloat16}  # it does compute with rounded ones
    for name, tensor in product.items():
        if "_proj" not in name:
            assert torch.equal(tensor, base[name]), name
            continue
        expected = base[name].detach().double() + delta(trainer, name)
        assert (tensor - expected).abs().max() <= 1e-6 * expected.abs().max(), name  # rounded to bfloat16: 1e-3


def test_a_trainer_with_an_adapter_writes_a_whole_model(model_directory, make_batch, tmp_path):
    trainer = make_trainer(model_directory, reference=model_directory)
    asyncio.run(train(trainer, make_batch, range(2)))
    asyncio.run(trainer.save_model(tmp_path))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    tensors = published(trainer)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert (tmp_path / "tokenizer.json").is_file()


def test_the_reference_is_the_model_without_the_adapter_until_it_is_refreshed(model_directory, make_batch):
    trainer = make_trainer(model_directory, reference=model_directory)
    plain = Trainer.from_directory(model_directory, TrainerConfig())
    batch = make_batch()

    async def scores(trainer, column):
        return (await trainer.score(batch, column)).columns[column]

    async def scenario():
        expected = await scores(plain, Column.OLD_LOGPROBS)
        first, second = await train(trainer, make_batch, range(2))
        assert first.statistics["reference_kl_nats"] == 0.0
        assert second.statistics["reference_kl_nats"] > 0.0
        torch.testing.assert_close(await scores(trainer, Column.REFERENCE_LOGPROBS), expected, rtol=0, atol=1e-6)
        await trainer.refresh_reference()
        now = await scores(trainer, Column.OLD_LOGPROBS)
        assert torch.equal(await scores(trainer, Column.REFERENCE_LOGPROBS), now)
        await train(trainer, make_batch, range(2, 4))
        assert torch.equal(await scores(trainer, Column.REFERENCE_LOGPROBS), now)
        assert not torch.equal(await scores(trainer, Column.OLD_LOGPROBS), now)

    asyncio.run(scenario())


@pytest.mark.parametrize("refresh_after", [None, 0])
def test_a_loaded_adapter_goes_on_as_the_saved_one_would_have_bit_for_bit(model_directory, make_batch, tmp_path, refresh_after):
    straight, resumed = (make_trainer(model_directory, reference=model_directory) for _ in range(2))

    async def scenario():
        await train(straight, make_batch, range(2), refresh_after)
        await straight.save(tmp_path)
        expected = await train(straight, make_batch, range(2, 5))
        await resumed.load(tmp_path)
        assert await train(resumed, make_batch, range(2, 5)) == expected

    asyncio.run(scenario())
    first, second = published(straight), published(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_without_its_adapter_or_with_another_is_refused(model_directory, tmp_path):
    trainer = make_trainer(model_directory)
    asyncio.run(trainer.save(tmp_path))
    with pytest.raises(ModelError, match="not the adapter that is being trained"):
        asyncio.run(make_trainer(model_directory, rank=2).load(tmp_path))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(RunError, match=r"adapter_model\.safetensors: missing"):
        asyncio.run(trainer.load(tmp_path))


def test_another_reference_is_refused(model_directory, tmp_path):
    with pytest.raises(ModelError, match="Remove the other reference"):
        make_trainer(model_directory, reference=tmp_path)


def test_a_model_with_layers_that_are_not_linear_is_refused_before_it_is_trained(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    said = r"only nn\.Linear, but the layer transformer\.h\.0\.attn\.c_attn is a Conv1D\. .* without trainer\.lora"
    with pytest.raises(ModelError, match=said):
        make_trainer(tmp_path)


def test_a_refusal_of_the_library_names_the_remedy(model_directory, monkeypatch):
    def refuse(*_):
        raise ValueError("Target module Odd() is not supported.")

    monkeypatch.setattr("peft.inject_adapter_in_model", refuse)
    with pytest.raises(ModelError, match=r"trainer\.lora: Target module Odd\(\) is not supported\. .* without trainer\.lora"):
        make_trainer(model_directory)


def test_without_the_library_the_extra_is_named(model_directory, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("peft"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'strop\[lora\]'"):
        make_trainer(model_directory)


def test_activations_of_an_adapter_can_be_computed_again(model_directory, make_batch):
    kept, recomputed = (make_trainer(model_directory, activation_checkpointing=is_on) for is_on in (False, True))
    reports = [
        asyncio.run(trainer.update(replace(make_batch()), GRPO().token_loss, GRPO().token_statistics))
        for trainer in (kept, recomputed)
    ]
    assert reports[0] == reports[1]
    first, second = published(kept), published(recomputed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_adapter_that_is_saved_next_to_the_model_is_what_the_library_loads(model_directory, make_batch, tmp_path):
    trainer = make_trainer(model_directory, reference=model_directory)
    asyncio.run(train(trainer, make_batch, range(2)))
    asyncio.run(trainer.save_adapter(tmp_path / "adapter"))
    asyncio.run(trainer.save_model(tmp_path / "model"))
    merged = PeftModel.from_pretrained(load_model(model_directory), tmp_path / "adapter").merge_and_unload()
    expected = dict(load_model(tmp_path / "model").named_parameters())
    for name, tensor in merged.named_parameters():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_a_trainer_of_all_weights_has_no_adapter_to_save(model_directory, tmp_path):
    trainer = Trainer.from_directory(model_directory, TrainerConfig())
    with pytest.raises(ValueError, match=r"trainer\.lora is not set"):
        asyncio.run(trainer.save_adapter(tmp_path))
