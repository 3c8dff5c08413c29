"""Moments on a disk: the same training to the bit, in less memory."""

import asyncio
import errno
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.errors import RunError
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.config import LoraConfig
from strop.training.optimizer import PagedAdamW

METHOD = GRPO()


def make_trainer(directory, moments, **settings):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, moments=moments)
    return Trainer.from_directory(directory, TrainerConfig(optimizer=optimizer, **settings))


def train(trainer, make_batch, seeds):
    for seed in seeds:
        asyncio.run(trainer.update(make_batch(seed=seed), METHOD.token_loss, METHOD.token_statistics))


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.learner.weights.named().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def resident_mib():
    """Of files without a name in the directory for temporary ones."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    heads = {entry.partition("\n")[0]: entry for entry in entries}
    mapped = [entry for head, entry in heads.items() if f"{tempfile.gettempdir()}/" in head and "(deleted)" in head]
    assert mapped, "there is no such file"
    return sum(int(re.search(r"^Rss:\s+(\d+) kB", entry, flags=re.MULTILINE)[1]) for entry in mapped) / 1024


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}, {"lora": LoraConfig(rank=2)}])
def test_moments_on_a_disk_change_nothing_also_not_after_a_reset_and_a_resume(model_directory, make_batch, tmp_path, settings):
    in_memory, on_disk = (make_trainer(model_directory, where, **settings) for where in ("memory", "disk"))
    for trainer in (in_memory, on_disk):
        train(trainer, make_batch, range(3))
        asyncio.run(trainer.reset_optimizer())
        train(trainer, make_batch, range(3, 5))
    assert_equal(weights_of(on_disk), weights_of(in_memory))
    for name, trainer in (("memory", in_memory), ("disk", on_disk)):
        (tmp_path / name).mkdir()
        asyncio.run(trainer.save(tmp_path / name))
    loaded = make_trainer(model_directory, "disk", **settings)  # from either of them
    asyncio.run(loaded.load(tmp_path / "memory"))
    train(in_memory, make_batch, range(5, 7))
    train(loaded, make_batch, range(5, 7))
    assert_equal(weights_of(loaded), weights_of(in_memory))


def test_what_is_on_the_disk_is_in_memory_only_while_a_step_is_at_it():
    weights = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(12)]  # 4 MiB each, so three parts
    optimizer = PagedAdamW(weights, lr=1e-3)
    moments = [optimizer.zeros(weights), optimizer.zeros(weights)]
    largest = 0.0
    release = optimizer.release

    def measure():
        nonlocal largest
        largest = max(largest, resident_mib())
        release()

    optimizer.release = measure
    for parameter, first, second in zip(weights, *moments, strict=True):
        parameter.grad = torch.ones_like(parameter)
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
    optimizer.step()
    assert 32 <= largest < 40  # of 96: four tensors of 4 MiB in each of two files
    assert resident_mib() == 0
    assert all(torch.allclose(first, torch.full_like(first, 0.1)) for first in moments[0])
    assert len(optimizer.param_groups[0]["params"]) == 12


def test_a_trainer_has_given_the_memory_back_when_it_has_learnt_saved_and_loaded(model_directory, make_batch, tmp_path):
    trainer = make_trainer(model_directory, "disk")
    train(trainer, make_batch, [0])
    assert resident_mib() == 0
    asyncio.run(trainer.save(tmp_path))
    assert resident_mib() == 0
    asyncio.run(trainer.load(tmp_path))
    assert resident_mib() == 0


def test_a_full_disk_is_told_before_anything_is_computed(model_directory, make_batch, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    trainer = make_trainer(model_directory, "disk")
    before = weights_of(trainer)
    with pytest.raises(RunError, match=r"no file of .* MiB .*No space left.*TMPDIR"):
        train(trainer, make_batch, [0])
    assert_equal(weights_of(trainer), before)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"workers": 2}])
def test_moments_on_a_disk_are_refused_where_they_cannot_be(settings):
    with pytest.raises(ValueError, match="Set moments = 'memory'"):
        TrainerConfig(optimizer=OptimizerConfig(moments="disk"), **settings)
