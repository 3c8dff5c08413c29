"""Builds a learner from a model directory and its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from strop.engine.torch.cpu.resources import keep_freed_memory
from strop.errors import ModelError
from strop.rewards.reward_model import has_reward_head, head_of, load_reward_model
from strop.training.attention import use_row_attention
from strop.training.batch import World
from strop.training.config import TrainerConfig
from strop.training.cpu.lean_layers import use_lean_layers
from strop.training.learner import Learner
from strop.training.logprobs import LogprobModule
from strop.training.lora import Adapter
from strop.training.models import (
    PROBE_TOLERANCE,
    check_logprobs,
    checkpoint_activations,
    load_model,
    read_tokenizer_files,
)
from strop.training.roles import AdapterReference, Critic, FrozenReference, Reference, ValueModule
from strop.training.weights import MasterWeights, Weights, round_weights

if TYPE_CHECKING:
    import transformers


_ROUNDED_TOLERANCE = 0.5  # nats, between two orders of the same bfloat16 sums; a cap of the logits moves them by several


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """The arguments of `Trainer.from_directory`."""

    directory: Path
    config: TrainerConfig
    reference: Path | None
    critic: Path | None
    total_updates: int | None
    total_critic_updates: int | None


def open_learner(options: LearnerOptions, world: World = World()) -> Learner:  # noqa: B008 - immutable
    """Return a learner, as one rank of `world`.

    Dropout is off, so that a token scored twice gets the same log-prob: of the first update after a score every ratio is
    exactly 1, because both cut the batch into the same micro-batches.
    """
    directory, config, reference = options.directory, options.config, options.reference
    if config.lora is not None and reference is not None and reference.resolve() != directory.resolve():
        raise ModelError(
            f"{reference}: with trainer.lora the reference is the model under the adapter. Remove the other reference."
        )
    dtype, device = getattr(torch, config.precision), config.torch_device
    keep_freed_memory(config.torch_device.type == "cpu" and not config.gives_back_memory)
    model = _open_model(directory, world).eval().requires_grad_(True)
    policy = LogprobModule(model, max_logits=config.max_logits, is_packed=config.packing, group=world.sequence)
    if world.size == 1:
        check_logprobs(policy.to(device), is_packed=config.packing)
    adapter = None if config.lora is None else Adapter(model, config.lora)
    if config.activation_checkpointing:
        checkpoint_activations(model, dtype if world.size == 1 else None)
    weights = _weights_of(policy, model, directory, config, world, rounds_layers=not config.activation_checkpointing)
    if world.size > 1:
        tolerance = PROBE_TOLERANCE if dtype is torch.float32 else _ROUNDED_TOLERANCE
        check_logprobs(policy, is_packed=config.packing, tolerance=tolerance)
        weights.rest()
    measured: Reference | None = None
    if adapter is not None and reference is not None:
        measured = AdapterReference(policy, adapter, weights)
    elif reference is not None:
        frozen = _open_model(reference, world).eval().requires_grad_(False)
        _compute_as_the_policy(frozen, config)
        scorer = LogprobModule(
            round_weights(frozen, dtype), max_logits=config.max_logits, is_packed=config.packing, group=world.sequence
        )
        if world.size == 1:
            scorer.to(device)
        else:
            from strop.training.sharded import divide

            divide(scorer, reference, device, world)
        measured = FrozenReference(scorer, weights, reference)
    return Learner(
        policy,
        weights,
        config,
        world=world,
        adapter=adapter,
        reference=measured,
        critic=None if options.critic is None else _open_critic(options.critic, options, world, model),
        tokenizer_files=read_tokenizer_files(directory),
        total_updates=options.total_updates,
    )


def _open_model(directory: Path, world: World, *, is_reward_model: bool = False) -> transformers.PreTrainedModel:
    """Return the model in `directory`; where ranks divide it without weights, until it is divided."""
    if world.size == 1:
        return load_reward_model(directory) if is_reward_model else load_model(directory)
    from strop.training.sharded import model_without_weights  # FSDP takes a second to import

    return model_without_weights(directory, is_reward_model=is_reward_model)


def _weights_of(
    root: nn.Module, model: nn.Module, directory: Path, config: TrainerConfig, world: World, *, rounds_layers: bool = True
) -> Weights:
    dtype, device = getattr(torch, config.precision), config.torch_device
    if world.size == 1:
        return MasterWeights(model, dtype, rounds_layers=rounds_layers)
    from strop.training.sharded import ShardedWeights

    return ShardedWeights(root, model, directory, dtype, device, world)


def _compute_as_the_policy(model: transformers.PreTrainedModel, config: TrainerConfig) -> None:
    """Use the layers of the policy, since others differ by rounding."""
    use_lean_layers(model)
    if config.packing:
        use_row_attention(model)


def _open_critic(directory: Path, options: LearnerOptions, world: World, policy: transformers.PreTrainedModel) -> Critic:
    config = options.config
    is_reward_model = has_reward_head(directory)
    model = _open_model(directory, world, is_reward_model=is_reward_model)
    if model.config.vocab_size != policy.config.vocab_size:
        raise ModelError(
            f"{directory}: has {model.config.vocab_size} tokens and the policy has {policy.config.vocab_size}. Start the critic"
            " from a model with the policy's tokenizer."
        )
    decoder = model.base_model.eval().requires_grad_(True)
    _compute_as_the_policy(decoder, config)
    if config.activation_checkpointing:
        checkpoint_activations(decoder)
    head = head_of(model) if is_reward_model else None
    values = ValueModule(decoder, is_packed=config.packing, group=world.sequence, head=head)
    if world.size == 1:
        values = values.to(config.torch_device)
    weights = _weights_of(values, values, directory, config, world)
    return Critic(values, weights, config, world=world, total_updates=options.total_critic_updates)
