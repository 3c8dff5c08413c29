"""A trainer in this process: one model, one optimizer, one worker thread in which all of their compute runs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.algorithms.protocol import Column, LossInputs
from strop.engine.protocol import NamedTensor, TakesWeights, weights_checksum
from strop.errors import CannotLearnError, ModelError, RunError
from strop.runs import read_json, write_json, writing_to
from strop.training.attention import use_row_attention
from strop.training.batch import Microbatch, TokenBatch, microbatches
from strop.training.config import OptimizerConfig, TrainerConfig, learning_rate
from strop.training.figures import TokenFigures
from strop.training.logprobs import token_logprobs
from strop.training.models import check_logprobs, checkpoint_activations, load_model, read_tokenizer_files
from strop.training.protocol import TokenLoss, TokenStatistics, UpdateReport
from strop.training.weights import MasterWeights, round_weights

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class LocalTrainer:
    """Implements `Trainer` for a model that fits on one device.

    Weights, gradients and moments are float32; with precision "bfloat16" the model computes with rounded copies of the
    weights, and gradients are rounded before they are added up. Dropout is off, so that a token scored twice gets the same
    log-prob: of the first update after `score` every ratio is exactly 1, because both cut the batch into the same
    micro-batches. Tensors of a batch come and go on the CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        tokenizer_files: Mapping[str, bytes],
        reference: PreTrainedModel | None = None,
        total_updates: int | None = None,
    ) -> None:
        """`model` and `reference` in float32; `total_updates` is where a cosine schedule ends.

        Raises:
            ModelError: the log-probs of the model's head are not those of its full forward.
            ValueError: the schedule and `total_updates` do not fit.
        """
        learning_rate(config.optimizer, config.optimizer.warmup_updates, total_updates)  # a bad schedule fails now, not later
        self._config = config
        self._total_updates = total_updates
        self._device = torch.device(config.device)
        self._model = model.to(self._device).eval().requires_grad_(True)
        check_logprobs(self._model, is_packed=config.packing)
        if config.activation_checkpointing:
            checkpoint_activations(self._model)
        self._weights = MasterWeights(self._model, getattr(torch, config.precision))
        self._reference = None
        if reference is not None:
            reference = reference.to(self._device).eval().requires_grad_(False)
            if config.packing:
                use_row_attention(reference)
            self._reference = round_weights(reference, getattr(torch, config.precision))
        self._tokenizer_files = dict(tokenizer_files)
        self._parameters = list(self._weights.named().values())
        self._optimizer = _make_optimizer(self._parameters, config.optimizer)
        self._num_updates = 0
        self._num_scheduled = 0  # updates since the schedule started
        self._num_skipped = 0  # in a row
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-trainer")

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        config: TrainerConfig,
        *,
        reference: Path | None = None,
        total_updates: int | None = None,
    ) -> Self:
        """A trainer of the model in `directory`, with the frozen model in `reference` to measure KL against.

        Raises:
            ModelError: there is no model, or not one that can be trained here.
        """
        return cls(
            load_model(directory),
            config,
            tokenizer_files=read_tokenizer_files(directory),
            reference=None if reference is None else load_model(reference),
            total_updates=total_updates,
        )

    @property
    def num_updates(self) -> int:
        return self._num_updates

    async def score(self, batch: TokenBatch, column: Column) -> TokenBatch:
        return await self._run(lambda: self._score(batch, column))

    async def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        return await self._run(lambda: self._update(batch, loss, statistics))

    async def publish(self, engine: TakesWeights, *, version: int) -> str:
        """Each tensor is a copy, cast to the engine's dtype when its turn comes: the engine may keep it."""
        dtype = engine.capabilities.dtype
        names = list(self._weights.named())
        checksum = await self._run(lambda: weights_checksum((name, self._cast(name, dtype)) for name in names))

        async def stream() -> AsyncIterator[NamedTensor]:
            for name in names:
                yield name, await self._run(lambda name=name: self._cast(name, dtype))  # type: ignore[misc]

        await engine.load_weights(stream(), version=version, checksum=checksum)
        return checksum

    async def save(self, directory: Path) -> None:
        """Writes `directory`/model, optimizer.pt (loads with weights_only=True) and trainer.json."""
        await self._run(lambda: self._save(directory))

    async def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory`, which `transformers` then loads."""
        await self._run(lambda: self._save_model(directory))

    async def load(self, directory: Path) -> None:
        """Raises `RunError` when something that `save` wrote is missing, `ModelError` when it is of another model."""
        await self._run(lambda: self._load(directory))

    async def reset_optimizer(self) -> None:
        await self._run(self._reset_optimizer)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Everything that touches the weights runs in the one worker thread, so calls never overlap (law 7)."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _score(self, batch: TokenBatch, column: Column) -> TokenBatch:
        match column:
            case Column.OLD_LOGPROBS:
                model = self._model
            case Column.REFERENCE_LOGPROBS if self._reference is not None:
                model = self._reference
            case _:
                raise ValueError(f"this trainer has no model that can fill {column.value!r}: it was built without one")
        scores = torch.zeros(batch.ids.shape)
        with torch.no_grad():
            for part in self._microbatches(batch):
                logprobs, _ = self._logprobs(model, part.batch.to(self._device))
                scores[part.rows, : logprobs.shape[1]] = logprobs.cpu()
        return replace(batch, columns={**batch.columns, column: scores})

    def _update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        rate = learning_rate(self._config.optimizer, self._num_scheduled, self._total_updates)
        if batch.num_loss_tokens == 0:
            return self._skip(0.0, 0.0, rate, f"none of the {len(batch.lengths)} rows has a token to train on")
        self._optimizer.zero_grad(set_to_none=True)
        total_loss = torch.zeros((), dtype=torch.float64, device=self._device)
        figures = TokenFigures()
        for part in self._microbatches(batch):
            rows = part.batch.to(self._device)
            logprobs, entropies = self._logprobs(self._model, rows)
            inputs = LossInputs(
                loss_mask=rows.loss_mask,
                advantages=rows.advantages,
                sampled_logprobs=rows.sampled_logprobs,
                entropies=entropies,
                columns={Column.OLD_LOGPROBS: logprobs.detach(), **rows.columns},
            )
            part_loss = (rows.loss_weights * loss(logprobs, inputs)).sum()
            part_loss.backward()  # type: ignore[no-untyped-call]
            total_loss += part_loss.detach()
            figures.add(rows.loss_mask, {"entropy_nats": entropies.detach(), **statistics(logprobs.detach(), inputs)})
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.optimizer.grad_clip or math.inf)
        loss_value, grad_norm = total_loss.item(), norm.item()
        if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
            return self._skip(loss_value, grad_norm, rate, f"loss is {loss_value}, gradient norm is {grad_norm}")
        for parameter_group in self._optimizer.param_groups:
            parameter_group["lr"] = rate
        self._optimizer.step()
        self._weights.refresh()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_updates += 1
        self._num_scheduled += 1
        self._num_skipped = 0
        return UpdateReport(
            update=self._num_updates,
            loss=loss_value,
            grad_norm=grad_norm,
            learning_rate=rate,
            statistics=figures.summary(batch.num_loss_tokens),
        )

    def _skip(self, loss: float, grad_norm: float, rate: float, reason: str) -> UpdateReport:
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped += 1
        logger.warning("update %d is skipped: %s", self._num_updates + 1, reason)
        if self._num_skipped >= self._config.max_skipped_updates:
            raise CannotLearnError(
                f"{self._num_skipped} updates in a row were skipped, the last because {reason}. The weights are those of update"
                f" {self._num_updates}. If values are not finite, lower trainer.optimizer.lr or use precision = 'float32'; if"
                " there is nothing to train on, look at why rollouts are dropped."
            )
        return UpdateReport(
            update=self._num_updates, loss=loss, grad_norm=grad_norm, learning_rate=rate, statistics={}, skip_reason=reason
        )

    def _logprobs(self, model: PreTrainedModel, rows: TokenBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            model,
            rows.ids,
            rows.loss_mask,
            temperature=rows.temperature,
            max_logits=self._config.max_logits,
            is_packed=self._config.packing,
        )

    def _microbatches(self, batch: TokenBatch) -> list[Microbatch]:
        return microbatches(batch, self._config.max_tokens_per_microbatch, is_packed=self._config.packing)

    def _cast(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._weights.named()[name].detach().to(dtype=dtype, copy=True)

    def _save(self, directory: Path) -> None:
        self._save_model(directory / "model")
        with writing_to(directory), (directory / "optimizer.pt").open("wb") as file:  # by path, torch would hide a full disk
            torch.save(self._optimizer.state_dict(), file)
        counters = {"num_updates": self._num_updates, "num_scheduled": self._num_scheduled, "num_skipped": self._num_skipped}
        write_json(directory / "trainer.json", counters)

    def _save_model(self, directory: Path) -> None:
        with writing_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with self._weights.in_float32() as model:
                model.save_pretrained(directory)
            for name, content in self._tokenizer_files.items():
                (directory / name).write_bytes(content)

    def _load(self, directory: Path) -> None:
        counters = read_json(directory / "trainer.json")
        if not (directory / "optimizer.pt").is_file():
            raise RunError(f"{directory / 'optimizer.pt'}: missing. The checkpoint is not complete; use the one before it.")
        state = torch.load(directory / "optimizer.pt", map_location=self._device, weights_only=True)
        saved = load_model(directory / "model").state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in saved.items()}:
            raise ModelError(
                f"{directory / 'model'}: not the model that is being trained: its tensors have other names or shapes."
            )
        with self._weights.in_float32() as model:
            model.load_state_dict(saved)
        self._optimizer.load_state_dict(state)
        self._num_updates = int(counters["num_updates"])
        self._num_scheduled = int(counters["num_scheduled"])
        self._num_skipped = int(counters["num_skipped"])

    def _reset_optimizer(self) -> None:
        self._optimizer = _make_optimizer(self._parameters, self._config.optimizer)
        self._num_scheduled = 0


def _make_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused: one kernel a tensor instead of a dozen. Elementwise, so as reproducible as the plain one.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
