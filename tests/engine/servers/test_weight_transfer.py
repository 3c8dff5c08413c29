"""Weights on their way into a server."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from strop.engine import weights_checksum
from strop.engine.model_directory import ModelFacts, directory_checksum
from strop.engine.servers import weight_transfer
from strop.engine.servers.extension import strop_vllm_worker
from strop.errors import ModelError, WeightsNotProven

from ..support import make_model, stream


@pytest.fixture
def model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    return ModelFacts.of(tmp_path)


def _handed_over(tensors, model, checksum="checksum"):
    return weight_transfer.transferred(stream(tensors), model, itemsize=4, version=1, checksum=checksum)


def _hand_over(model, tensors, check=lambda directory: None):
    async def scenario():
        async with _handed_over(tensors, model) as directory:
            check(directory)
        assert not directory.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_what_the_servers_worker_reads_has_the_checksum_of_what_was_sent(model, monkeypatch, file_bytes):
    monkeypatch.setattr(weight_transfer, "_FILE_BYTES", file_bytes)
    tensors = [(name, parameter.detach().bfloat16()) for name, parameter in make_model("llama").named_parameters()]

    def check(directory):
        digests = []
        read = dict(strop_vllm_worker.read_weights(directory, digests))
        assert strop_vllm_worker.checksum_of(digests) == weights_checksum(tensors) == weights_checksum(read.items())
        assert len(list(directory.iterdir())) == (len(tensors) if file_bytes == 1 else 1)

    _hand_over(model, tensors, check)


def test_a_model_directory_has_the_checksum_of_its_weights(model):
    assert directory_checksum(model.directory) == weights_checksum(
        (name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()
    )


def test_views_of_one_buffer_are_sent_each_for_itself(model):
    buffer = torch.arange(64.0)
    shapes = {"a": (32,), "b": (32,)}
    views = [("a", buffer[:32]), ("b", buffer[32:])]
    facts = ModelFacts(
        directory=model.directory,
        vocab_size=67,
        shapes=shapes,
        optional=frozenset(),
        has_tokenizer=False,
        kv_elements_per_token=1,
    )

    def check(directory):
        read = dict(strop_vllm_worker.read_weights(directory, []))
        assert all(torch.equal(read[name], view) for name, view in views)

    _hand_over(facts, views, check)


def test_a_tied_head_may_be_left_out_and_any_other_weight_may_not(tmp_path):
    tied = make_model("qwen2")
    tied.save_pretrained(tmp_path)
    facts = ModelFacts.of(tmp_path)
    tensors = [(name, parameter.detach()) for name, parameter in tied.named_parameters()]
    _hand_over(facts, tensors)
    _hand_over(facts, [*tensors, ("lm_head.weight", tied.lm_head.weight.detach())])
    with pytest.raises(WeightsNotProven, match="lacks 1 weights"):
        _hand_over(facts, tensors[:-1])
    with pytest.raises(WeightsNotProven, match="no such weight"):
        _hand_over(facts, [*tensors, ("model.extra", torch.zeros(1))])


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        ModelFacts.of(tmp_path)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(weight_transfer, "_SHARED_MEMORY", path)
    return path


def test_servers_that_read_the_same_publication_share_one_copy_of_it(model, shared_memory):
    tensors = [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()]

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            entered = [stack.enter_async_context(_handed_over(tensors, model)) for _ in range(3)]
            first, *others = await asyncio.gather(*entered)
            assert others == [first] * 2
            async with _handed_over([], model) as again:  # nothing of its own is read
                assert again == first
            assert first.exists()
            async with _handed_over(tensors, model, checksum="of the next version") as another:
                assert another != first
            assert list(shared_memory.iterdir()) == [first]
        assert not list(shared_memory.iterdir())

    asyncio.run(scenario())


def test_a_copy_that_could_not_be_written_is_nobody_elses(model, shared_memory):
    tensors = [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()]

    async def scenario():
        with pytest.raises(WeightsNotProven, match="lacks 1 weights"):
            async with _handed_over(tensors[:-1], model):
                raise AssertionError
        assert not list(shared_memory.iterdir())
        async with _handed_over(tensors, model):
            pass

    asyncio.run(scenario())


def test_there_must_be_room_beside_the_copies_that_others_hold(model, shared_memory, monkeypatch):
    """Each finds the room that the one before has left, though both ask at once."""
    tensors = [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()]
    needed = 1.1 * 4 * model.num_elements

    def disk_usage(path):
        used = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
        return SimpleNamespace(free=1.5 * needed - used)

    monkeypatch.setattr(weight_transfer.shutil, "disk_usage", disk_usage)

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            entered = [stack.enter_async_context(_handed_over(tensors, model, checksum=each)) for each in "ab"]
            assert [directory.parent == shared_memory for directory in await asyncio.gather(*entered)] == [True, False]

    asyncio.run(scenario())


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_holds_is_not(model, shared_memory):
    for name in ("strop-publication-dead", "strop-publication-held", "others"):
        (shared_memory / name).mkdir()
        (shared_memory / name / "model-00000.safetensors").touch()
    held = os.open(shared_memory / "strop-publication-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    _hand_over(model, [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()])
    assert {path.name for path in shared_memory.iterdir()} == {"strop-publication-held", "others"}
    os.close(held)


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import torch
from strop.engine.servers import weight_transfer
from strop.engine.model_directory import ModelFacts

weight_transfer._SHARED_MEMORY = Path(sys.argv[2])

async def tensors():
    for name, shape in model.shapes.items():
        yield name, torch.zeros(shape)

async def publish():
    async with weight_transfer.transferred(tensors(), model, itemsize=4, version=1, checksum="checksum"):
        os.kill(os.getpid(), signal.SIGKILL)

model = ModelFacts.of(Path(sys.argv[1]))
asyncio.run(publish())
"""


@pytest.mark.slow  # another import of torch
def test_a_trainer_that_is_killed_while_it_publishes_leaves_its_weights_no_longer_than_to_the_next_publication(
    model, shared_memory
):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(model.directory), str(shared_memory)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(shared_memory.glob("*/*.safetensors"))) == 1
    _hand_over(model, [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()])
    assert not list(shared_memory.iterdir())
