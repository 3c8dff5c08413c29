"""What an update costs: the products of the model's matrices, the time that they take, and the memory that was needed."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from strop.training.batch import TokenBatch, microbatches
from strop.training.packing import shared_lengths
from strop.training.world import World

_MIB = 2**20
_PROBE = {"cpu": 1024, "cuda": 8192}  # width of the products that the machine is measured by
_NUM_PROBES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Of one update, over all ranks."""

    tokens: int  # that went through the decoder
    flops: float  # of matrix products, forward and backward, without those that are computed again to save memory
    time_s: float
    peak_flops_per_s: float  # of large products in the same precision, as measured once
    peak_memory_mib: float  # of the rank that needed most, since it started; of the device where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """How many multiplications of matrices a model makes."""

    layers: int  # weights that each token is multiplied by
    head: int  # likewise, of tokens that are trained on
    attention: int  # multiplications for each pair of tokens that see each other
    backward: float  # products of the backward pass / of the forward pass

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelProducts:
        """Of a decoder with a head, of logits or of one reward; where only an adapter is trained, frozen matrices have no
        gradients of their own."""
        head = model.get_output_embeddings() or model.get_submodule("score")
        linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        is_adapter = not head.weight.requires_grad
        return cls(
            layers=sum(module.in_features * module.out_features for module in linear),
            head=int(head.weight.shape[0] * head.weight.shape[1]),
            attention=2 * config.num_hidden_layers * config.num_attention_heads * width,
            backward=1.0 if is_adapter else 2.0,
        )

    def flops(self, lengths: list[int], shared: list[int], num_trained: int) -> float:
        """Of one update on rows of these lengths, the first `shared` tokens of which are computed with the row before."""
        own = [length - begun for length, begun in zip(lengths, shared, strict=True)]
        # A token sees itself and those before it, in its row.
        pairs = sum(each * (length + begun + 1) / 2 for each, length, begun in zip(own, lengths, shared, strict=True))
        products = self.layers * sum(own) + self.head * num_trained + self.attention * pairs
        return 2.0 * products * (1.0 + self.backward)


def update_flops(products: ModelProducts, batch: TokenBatch, *, max_tokens: int, is_packed: bool) -> tuple[int, float]:
    """Tokens that go through the decoder in an update on `batch`, as one process alone cuts it, and products of the update."""
    num_tokens, flops = 0, 0.0
    for part in microbatches(batch, max_tokens, is_packed=is_packed):
        lengths, shared = _tokens_of(part.batch, is_packed=is_packed)
        num_tokens += sum(lengths) - sum(shared)
        flops += products.flops(lengths, shared, part.batch.num_loss_tokens)
    return num_tokens, flops


def _tokens_of(batch: TokenBatch, *, is_packed: bool) -> tuple[list[int], list[int]]:
    """Of each row the tokens that go through the decoder, and how many of them the row before has, too."""
    places = torch.arange(batch.loss_mask.shape[1])  # the last trained token is only predicted
    lengths = (batch.loss_mask * places).amax(1)
    rows = lengths.nonzero().squeeze(1)
    shared = shared_lengths(batch.ids[rows], lengths[rows]) if is_packed else [0] * len(rows)
    return lengths[rows].tolist(), [int(each) for each in shared]


def seconds_since(started: float, device: torch.device) -> float:
    """Until everything asked of `device` is done, since `started`, a time of `time.perf_counter`."""
    wait(device)
    return time.perf_counter() - started


def update_cost(*, tokens: int, flops: float, time_s: float, device: torch.device, precision: str, world: World) -> UpdateCost:
    """Of an update of all ranks, with the rate and the memory of the processes that made it."""
    of_ranks = world.gather((measured_flops_per_s(device, getattr(torch, precision)), peak_memory_mib(device)))
    return UpdateCost(
        tokens=tokens,
        flops=flops,
        time_s=time_s,
        peak_flops_per_s=sum(rate for rate, _ in of_ranks),
        peak_memory_mib=max(memory for _, memory in of_ranks),
    )


def peak_memory_mib(device: torch.device) -> float:
    """The most that this process ever held: of the device's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB


@cache
def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of large products here, measured once in a process."""
    width = _PROBE.get(device.type, _PROBE["cpu"])
    left, right = (torch.ones(width, width, device=device, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(_NUM_PROBES):
        wait(device)
        started = time.perf_counter()
        left @ right
        wait(device)
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * width**3 / best_s


def wait(device: torch.device) -> None:
    """Until everything that was asked of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
