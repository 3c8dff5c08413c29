"""Computes with the models of a trainer (policy, reference, critic), or with one rank's part of them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strop.algorithms.method import Column, LossInputs, checked_token_loss
from strop.engine.config import measured_flops_per_s
from strop.engine.model_directory import read_weights
from strop.engine.protocol import checksum_of, weights_checksum
from strop.engine.published_files import write_adapter, write_files
from strop.errors import ModelError
from strop.run_directory import read_json
from strop.training.batch import TokenBatch, World, microbatches, score_rows
from strop.training.config import TrainerConfig
from strop.training.logprobs import LogprobModule
from strop.training.lora import Adapter, published_name
from strop.training.models import check_shapes
from strop.training.optimizer import (
    Optimization,
    TokenLoss,
    TokenStatistics,
    UpdateCost,
    UpdateReport,
    ValueLoss,
    ValueStatistics,
    add_up_gradient,
)
from strop.training.roles import Critic, Reference
from strop.training.weights import Snapshot, Weights, WriteCheckpoint, copied, read_tensors, shell_of, write_model

if TYPE_CHECKING:
    import transformers

_MIB = 2**20


class Learner:
    """Implements the calls of `Trainer` on one rank. All ranks make the same calls and take their shares of each batch.

    Args:
        policy: the model, as a module that computes the log-probs of rows.
        weights: of `policy`.
        adapter: where only an adapter is trained.
        reference, critic: None where there is none.
        total_updates: where a cosine schedule ends.
    """

    def __init__(
        self,
        policy: LogprobModule,
        weights: Weights,
        config: TrainerConfig,
        *,
        world: World,
        adapter: Adapter | None,
        reference: Reference | None,
        critic: Critic | None,
        tokenizer_files: Mapping[str, bytes],
        total_updates: int | None,
    ) -> None:
        self.policy, self.weights, self.config, self.world = policy, weights, config, world
        self.adapter, self.reference, self.critic = adapter, reference, critic
        self._tokenizer_files = dict(tokenizer_files)
        self._shell = shell_of(policy.model)
        self._products = ModelProducts.of(policy.model)
        self.optimization = Optimization(
            weights,
            config.optimizer,
            key="trainer.optimizer",
            world=world,
            total_updates=total_updates,
        )

    @property
    def model(self) -> transformers.PreTrainedModel:
        return self.policy.model

    @property
    def num_updates(self) -> int:
        """Of the policy."""
        return self.optimization.num_updates

    def score(self, batch: TokenBatch, column: Column) -> Tensor:
        """Return `column` for all rows, (N, T), of which each rank computes its share."""
        self._check()
        match column:
            case Column.VALUES if self.critic is not None:
                return self.critic.score(batch)
            case Column.OLD_LOGPROBS | Column.OLD_ENTROPIES:
                scorer: LogprobModule | Reference = self.policy
            case Column.REFERENCE_LOGPROBS if self.reference is not None:
                scorer = self.reference
            case _:
                raise ValueError(f"this trainer has no model that can fill {column.value!r}: it was built without one")

        def figures(rows: TokenBatch) -> Tensor:
            logprobs, entropies = scorer(rows.ids, rows.loss_mask, rows.temperature, rows.is_banned, rows.banned_ids)
            of_rows: Tensor = entropies if column is Column.OLD_ENTROPIES else logprobs
            return of_rows

        scores = score_rows(batch, self.config, self.world, figures)
        self.weights.rest()
        return scores

    def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        self._check()
        started = time.perf_counter()

        def token_losses(rows: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
            logprobs, entropies = self.policy(rows.ids, rows.loss_mask, rows.temperature, rows.is_banned, rows.banned_ids)
            inputs = LossInputs(
                loss_mask=rows.loss_mask,
                advantages=rows.advantages,
                sampled_logprobs=rows.sampled_logprobs,
                entropies=entropies,
                columns={Column.OLD_LOGPROBS: logprobs.detach(), **rows.columns},
            )
            losses = checked_token_loss(loss, logprobs, inputs)
            return losses, {"entropy_nats": entropies.detach(), **statistics(logprobs.detach(), inputs)}

        report = self.optimization.update(batch, lambda: add_up_gradient(batch, self.config, self.world, token_losses))
        if report.is_skipped:
            return report
        tokens, row_tokens, flops = update_flops(self._products, batch, self.config)
        return replace(report, cost=update_cost(tokens, row_tokens, flops, started, self.config, self.world))

    def update_critic(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        if self.critic is None:
            raise ValueError("this trainer has no critic to update: it was built without one")
        self._check()
        return self.critic.update(batch, loss, statistics)

    def _check(self) -> None:
        """Raise `WeightsLost` if an update of policy or critic made weights that are not finite."""
        self.optimization.check()
        if self.critic is not None:
            self.critic.optimization.check()

    def names(self) -> list[str]:
        """Return the names of the published tensors: those of a model without an adapter."""
        self._check()
        names = self.weights.names()
        return names if self.adapter is None else self.adapter.published_names(names)

    def tensor(self, name: str) -> Tensor:
        """Return a published tensor in float32, with the adapter merged. Do not write into it."""
        return self.weights.whole(name) if self.adapter is None else self.adapter.merged(name, self.weights.whole)

    def published(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a copy of a published tensor in another precision."""
        return self.tensor(name).to(dtype, copy=True)

    def num_elements(self) -> int:
        """Return how many numbers are published, at most."""
        self._check()
        return sum(self.weights.num_elements(name) for name in self.weights.names())

    def checksum(self, dtype: torch.dtype) -> str:
        return weights_checksum((name, self.tensor(name).to(dtype)) for name in self.names())

    def write_published(self, directories: Sequence[Path], dtype: torch.dtype) -> str:
        """Write the published tensors as safetensors files into each rank's directory; return their checksum. Each is gathered
        to, hashed and written by one rank. All ranks call this."""
        owned = self.owned(dtype)

        def write() -> list[bytes]:
            try:
                return write_files(owned, directories[self.world.rank], part=f"rank-{self.world.rank:04d}")
            finally:
                for _ in owned:  # the other ranks wait for this one's rows, also after an error
                    pass

        of_ranks = self.world.together(write)
        torch.cuda.empty_cache()  # engines may share the device, and want memory for these weights now
        return checksum_of(digest for digests in of_ranks for digest in digests)

    def num_adapter_elements(self) -> int:
        """Return the size of all matrices of the adapter."""
        return sum(self.weights.num_elements(name) for name in self.weights.named())

    def write_published_adapter(self, directories: Sequence[Path], dtype: torch.dtype) -> str:
        """Write the adapter into the first rank's directory, for engines; return its checksum. All ranks call this."""
        self._check()
        assert self.adapter is not None
        adapter, tensors = self.adapter, self._whole_adapter()

        def write() -> list[bytes]:
            return [] if self.world.rank else write_adapter(*adapter.for_engines(tensors, dtype), directories[0])

        return checksum_of(self.world.together(write)[0])

    def owned(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors that this rank has to publish, gathered and in `dtype`. All ranks call this."""
        for name, owner in self._owners().items():
            tensor = self._on_rank(name, owner, dtype)
            if tensor is not None:
                yield name, tensor

    def _owners(self) -> dict[str, int]:
        """Return the rank that publishes each tensor, so that all have about as much."""
        sizes = {published_name(name): self.weights.num_elements(name) for name in self.weights.names()}
        names, load = self.names(), [0] * self.world.size
        owners = {}
        for name in sorted(names, key=lambda name: -sizes[name]):
            owners[name] = load.index(min(load))
            load[owners[name]] += sizes[name]
        return {name: owners[name] for name in names}

    def _on_rank(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        """Return a published tensor on one rank and None on the others."""
        if self.adapter is None:
            return self.weights.on_rank(name, rank, dtype)
        tensor = self.tensor(name).to(dtype)
        return tensor if rank == self.world.rank else None

    def snapshot(self) -> Snapshot:
        """Return a copy of the content of a checkpoint: model or adapter, state and counters."""
        self._check()
        state = self.optimization.moments()
        counters: dict[str, Any] = {
            **self.optimization.counters(),
            "has_moved_reference": self.reference is not None and self.reference.has_moved,
        }
        if self.reference is not None:
            state |= self.reference.state()
        if self.critic is not None:
            state |= self.critic.state()
            counters["critic"] = self.critic.optimization.counters()
        state = copied(state)
        self._rest()
        if self.adapter is None:
            name, write = "model", self._model_writer(is_copy=True)
        else:
            name, write = "adapter", self._adapter_writer(self.adapter, is_copy=True)
        return Snapshot(lambda directory: write(directory / name), state, counters, self.world)

    def snapshot_writer(self) -> WriteCheckpoint:
        return self.snapshot().write

    def _rest(self) -> None:
        self.optimization.rest()
        if self.critic is not None:
            self.critic.optimization.rest()

    def _model_writer(self, *, is_copy: bool = False) -> Callable[[Path], None]:
        """Return a function that writes the model of now into a directory; `is_copy`: also when it has changed since."""
        tensors = self._gathered(self.names(), self._on_rank, is_copy=is_copy)
        return lambda directory: write_model(directory, self._shell, tensors, self._tokenizer_files)

    def _adapter_writer(self, adapter: Adapter, *, is_copy: bool = False) -> Callable[[Path], None]:
        tensors = self._whole_adapter(is_copy=is_copy)
        return lambda directory: adapter.write(directory, tensors)

    def _whole_adapter(self, *, is_copy: bool = False) -> dict[str, Tensor]:
        return self._gathered(self.weights.named(), self.weights.on_rank, is_copy=is_copy)

    def _gathered(
        self, names: Iterable[str], on_rank: Callable[[str, int, torch.dtype], Tensor | None], *, is_copy: bool
    ) -> dict[str, Tensor]:
        """Return whole tensors on the host of the first rank, and {} on the others, which take part."""
        gathered = ((name, on_rank(name, 0, torch.float32)) for name in names)
        return {name: tensor.to("cpu", copy=is_copy) for name, tensor in gathered if tensor is not None}

    def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory` in the format of `transformers`."""
        self._write(self._model_writer(), directory)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter into `directory` in the format of `peft`."""
        if self.adapter is None:
            raise ValueError("this trainer has no adapter: trainer.lora is not set")
        self._write(self._adapter_writer(self.adapter), directory)

    def _write(self, write: Callable[[Path], None], directory: Path) -> None:
        if self.world.rank == 0:
            write(directory)
        self.world.wait()

    def load(self, directory: Path) -> None:
        counters = read_json(directory / "trainer.json")
        shapes = {name: tuple(parameter.shape) for name, parameter in self.weights.named().items()}
        if self.adapter is None:
            check_shapes(directory / "model", shapes)
            weights = read_weights(directory / "model")
        else:
            weights = iter(self.adapter.read(directory / "adapter", shapes).items())
        if self.critic is not None and "critic" not in counters:
            raise ModelError(f"{directory}: holds no critic, but the method needs one: it was written for another method.")
        self.optimization.restore(counters)
        state = self.optimization.moments()
        if self.reference is not None:
            state |= self.reference.restore(has_moved=counters["has_moved_reference"])
        if self.critic is not None:
            state |= self.critic.prepare_state(counters["critic"])
        read_tensors(directory / "state", state, is_alone=self.world.size == 1)
        self.weights.assign(weights)
        if self.critic is not None:
            self.critic.weights.refresh()
        self._rest()

    def reset_optimizer(self) -> None:
        self._check()
        self.optimization.reset()

    def refresh_reference(self) -> None:
        self._check()
        if self.reference is None:
            raise ValueError("this trainer has no reference that could be refreshed: it was built without one")
        self.reference.refresh()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """Sizes of the matrix products of a model."""

    layers: int  # weights that each token is multiplied by
    head: int  # likewise, of tokens that are trained on
    attention: int  # multiplications for each pair of tokens that see each other
    backward: float  # products of the backward pass / of the forward pass

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> ModelProducts:
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

    def flops(self, lengths: Sequence[int], shared: Sequence[int], num_trained: int) -> float:
        """Return the FLOPs of one update on rows of these lengths; the row before computes the first `shared` tokens."""
        own = [length - begun for length, begun in zip(lengths, shared, strict=True)]
        # A token sees itself and those before it, in its row.
        pairs = sum(each * (length + begun + 1) / 2 for each, length, begun in zip(own, lengths, shared, strict=True))
        products = self.layers * sum(own) + self.head * num_trained + self.attention * pairs
        return 2.0 * products * (1.0 + self.backward)


def update_flops(products: ModelProducts, batch: TokenBatch, config: TrainerConfig) -> tuple[int, int, float]:
    """Return the tokens that go through the decoder in an update on `batch`, the tokens of all its rows, and its FLOPs, as one
    process splits it."""
    num_tokens, row_tokens, flops = 0, 0, 0.0
    for part in microbatches(batch, config.max_tokens_per_microbatch, is_packed=config.packing):
        num_tokens += part.num_tokens
        row_tokens += sum(part.lengths)
        is_first = torch.arange(part.batch.loss_mask.shape[1]) >= torch.tensor(part.shared)[:, None]
        num_trained = int((part.batch.loss_mask & is_first).sum())
        flops += products.flops(part.lengths, part.shared, num_trained)
    return num_tokens, row_tokens, flops


def update_cost(tokens: int, row_tokens: int, flops: float, started: float, config: TrainerConfig, world: World) -> UpdateCost:
    """Return the cost of an update of all ranks that began at `started`, a time of `time.perf_counter`."""
    device = config.torch_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time_s = time.perf_counter() - started
    if device.type == "cuda":
        peak_memory_mib = torch.cuda.max_memory_allocated(device) / _MIB
    else:
        peak_memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB
    of_ranks = world.gather((measured_flops_per_s(device, getattr(torch, config.precision)), peak_memory_mib))
    return UpdateCost(
        tokens=tokens,
        row_tokens=row_tokens,
        flops=flops,
        time_s=time_s,
        peak_flops_per_s=sum(rate for rate, _ in of_ranks),
        peak_memory_mib=max(memory for _, memory in of_ranks),
    )
