"""Weights on their way to engines in other processes."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from strop.engine import publication, published_files
from strop.engine.model_directory import ModelFacts, directory_checksum, tensors_in
from strop.engine.protocol import checksum_of, digests_of, weights_checksum
from strop.engine.publication import Publication
from strop.engine.published_files import write_files
from strop.engine.servers.extension import strop_weights_proof
from strop.errors import ActorsLost, MachineError, ModelError, TrainerLost, WeightsNotProven

from .support import Tensors, make_model, named


@pytest.fixture
def model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    return ModelFacts.of(tmp_path)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(published_files, "_SHARED_MEMORY", path)
    return path


def read(directory):
    return dict(tensors_in(sorted(directory.glob("*.safetensors"))))


@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_what_a_servers_worker_reads_has_the_checksum_of_what_was_written(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(published_files, "_FILE_BYTES", file_bytes)
    tensors = [(name, tensor.bfloat16()) for name, tensor in named(make_model("llama"))]
    assert checksum_of(write_files(tensors, tmp_path, part="test")) == weights_checksum(tensors)
    assert len(list(tmp_path.glob("*.safetensors"))) == (len(tensors) if file_bytes == 1 else 1)
    digests = []
    with ThreadPoolExecutor(2) as threads:
        found = dict(strop_weights_proof.read_weights(tmp_path, digests, threads))
    assert strop_weights_proof.checksum_of(digests) == weights_checksum(tensors) == weights_checksum(found.items())
    assert weights_checksum(read(tmp_path).items()) == weights_checksum(tensors)


def test_a_digest_tells_names_shapes_dtypes_and_bytes_and_a_checksum_no_order():
    tensor = torch.arange(6.0)
    others = [("a", tensor), ("b", tensor), ("a", tensor.view(2, 3)), ("a", tensor.double()), ("a", tensor + 1)]
    assert len({digest for _, digest in digests_of(others)}) == len(others)
    assert weights_checksum(others) == weights_checksum(others[::-1])
    assert weights_checksum(others) != weights_checksum(others[1:])


def test_a_model_directory_has_the_checksum_of_its_weights(model):
    assert directory_checksum(model.directory) == weights_checksum(named(make_model("llama")))


def test_views_of_one_buffer_are_written_each_for_itself(tmp_path):
    buffer = torch.arange(64.0)
    views = {"a": buffer[:32], "b": buffer[32:]}
    write_files(views.items(), tmp_path, part="test")
    assert all(torch.equal(read(tmp_path)[name], view) for name, view in views.items())


def test_a_tied_head_may_be_left_out_and_any_other_weight_may_not(tmp_path):
    tied = make_model("qwen2")
    tied.save_pretrained(tmp_path / "model")
    facts = ModelFacts.of(tmp_path / "model")

    def check(tensors, place):
        (tmp_path / place).mkdir()
        write_files(tensors, tmp_path / place, part="test")
        facts.check_weights(tmp_path / place, version=1)

    tensors = named(tied)
    check(tensors, "whole")
    check([*tensors, ("lm_head.weight", tied.lm_head.weight.detach())], "with its head")
    with pytest.raises(WeightsNotProven, match="version 1 lacks 1 weights"):
        check(tensors[:-1], "cut")
    with pytest.raises(WeightsNotProven, match="no such weight"):
        check([*tensors, ("model.extra", torch.zeros(1))], "more")
    with pytest.raises(WeightsNotProven, match=r"'model.norm.weight' was sent with shape \(31,\); it is \(32,\) here"):
        check([*tensors[:-1], ("model.norm.weight", torch.zeros(31))], "misshaped")


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        ModelFacts.of(tmp_path)


def test_all_who_ask_get_the_same_files_which_end_with_the_publication(shared_memory):
    source = Tensors(named(make_model("llama")))

    async def scenario():
        async with Publication(source, version=1) as one, Publication(source, version=2) as two:
            first, *others = await asyncio.gather(*(one.files() for _ in range(3)))
            assert others == [first] * 2
            assert await two.files() != first
            source.named = []  # as a trainer that has gone on: what is in files lasts
            assert {name async for name, _ in one.tensors()} == read(first).keys() != set()
        assert not list(shared_memory.iterdir())

    asyncio.run(scenario())


def test_weights_go_from_the_ranks_nodes_to_those_that_ask_and_to_no_other(shared_memory, monkeypatch):
    held = []

    def run_on(node, function, *arguments):
        if function is published_files.make_directory:
            held.append(node)
        return function(*arguments)

    monkeypatch.setattr(publication, "run_on", run_on)
    monkeypatch.setattr(published_files, "run_on", run_on)
    monkeypatch.setattr(published_files, "copy_file", lambda _, path, node, to: shutil.copy(path, to))
    source = Tensors(named(make_model("llama")))
    source.nodes = ("first", "second")

    async def scenario():
        async with Publication(source, version=1) as one:
            await one.write()
            source.named = []
            directories = [await one.files(node) for node in ("third", "first", "third")]
            assert read(directories[0]).keys() == read(directories[1]).keys() != set()
            assert directories[0] == directories[2]
        assert sorted(held) == ["first", "first", "second", "third"]  # the first holds its own files and a view of all

    asyncio.run(scenario())
    assert not list(shared_memory.iterdir())


def test_files_that_could_not_be_written_leave_nothing_and_are_written_for_the_next_who_asks(shared_memory):
    source = Tensors(named(make_model("llama")))
    write = source.write

    async def fail(directory):
        await write(directory)
        raise MachineError("the disk is full")

    async def scenario():
        async with Publication(source, version=1) as one:
            source.write = fail
            with pytest.raises(MachineError, match="full"):
                await one.files()
            assert isinstance(one.error, MachineError)
            assert not list(shared_memory.iterdir())
            source.write = write
            assert read(await one.files())

    asyncio.run(scenario())


def test_what_ended_the_writing_is_named_though_a_node_that_is_lost_cannot_remove_its_files(shared_memory, monkeypatch):
    lost = []

    def run_on(node, function, *arguments):
        if node in lost:
            raise ActorsLost(f"node {node} is not used any more")
        return function(*arguments)

    monkeypatch.setattr(publication, "run_on", run_on)
    source = Tensors(named(make_model("llama")))
    source.nodes = ("first", "second")

    async def cut(directory):
        lost.append("first")
        raise TrainerLost("rank 0 of 2 is lost")

    async def scenario():
        async with Publication(source, version=1) as one:
            source.write = cut
            with pytest.raises(TrainerLost, match="rank 0"):
                await one.write()
        [left] = shared_memory.iterdir()  # the lost node's
        assert not list(left.iterdir())

    asyncio.run(scenario())


def test_where_shared_memory_has_no_room_the_files_are_elsewhere(shared_memory, monkeypatch):
    source = Tensors(named(make_model("llama")))
    monkeypatch.setattr(published_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=source.num_bytes))

    async def scenario():
        async with Publication(source, version=1) as one:
            assert (await one.files()).parent != shared_memory

    asyncio.run(scenario())


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_holds_is_not(shared_memory):
    for name in ("strop-publication-dead", "strop-publication-held", "others"):
        (shared_memory / name).mkdir()
        (shared_memory / name / "rank-0000-00000.safetensors").touch()
    held = os.open(shared_memory / "strop-publication-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    async def scenario():
        async with Publication(Tensors(named(make_model("llama"))), version=1) as one:
            await one.files()

    asyncio.run(scenario())
    assert {path.name for path in shared_memory.iterdir()} == {"strop-publication-held", "others"}
    os.close(held)


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
import torch
from strop.engine import publication, published_files

published_files._SHARED_MEMORY = Path(sys.argv[1])

class Source:
    num_bytes = 4
    nodes = (None,)
    async def write(self, directories):
        [directory] = directories
        published_files.write_files([("a", torch.zeros(1))], directory, part="test")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(publication.Publication(Source(), version=1).files())
"""


@pytest.mark.slow  # another import of torch
def test_a_trainer_that_is_killed_while_it_publishes_leaves_its_weights_no_longer_than_to_the_next_publication(shared_memory):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(shared_memory)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(shared_memory.glob("*/*.safetensors"))) == 1

    async def scenario():
        async with Publication(Tensors(named(make_model("llama"))), version=1) as one:
            await one.files()

    asyncio.run(scenario())
    assert not list(shared_memory.iterdir())
