"""Weights on their way into a server."""

import asyncio

import pytest
import torch

from strop.engine import weights_checksum
from strop.engine.servers import handover
from strop.engine.servers.extension import strop_vllm_worker
from strop.engine.servers.facts import ModelFacts, directory_checksum
from strop.errors import ModelError, WeightsNotProven

from ..support import make_model, stream


@pytest.fixture
def model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    return ModelFacts.of(tmp_path)


def _hand_over(model, tensors, check=lambda directory: None):
    async def scenario():
        async with handover.handed_over(stream(tensors), model, itemsize=4, version=1) as directory:
            check(directory)
        assert not directory.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_what_the_servers_worker_reads_has_the_checksum_of_what_was_sent(model, monkeypatch, file_bytes):
    monkeypatch.setattr(handover, "_FILE_BYTES", file_bytes)
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
