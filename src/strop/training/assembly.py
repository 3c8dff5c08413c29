"""Puts a learner together from a model directory and its settings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from strop.engine.memory import keep_freed_memory
from strop.errors import ModelError
from strop.rewards.scorers.reward_model import has_reward_head, head_of, load_reward_model
from strop.training.adapter import Adapter, published_name
from strop.training.attention import use_row_attention
from strop.training.config import TrainerConfig
from strop.training.critic import Critic, ValueModule
from strop.training.gates import use_lean_gates
from strop.training.learner import Learner
from strop.training.logprobs import LogprobModule
from strop.training.models import check_logprobs, checkpoint_activations, load_model, read_tokenizer_files
from strop.training.norms import use_lean_norms
from strop.training.originals import Originals
from strop.training.reference import AdapterReference, FrozenReference, Reference
from strop.training.sharded import ShardedWeights, divide
from strop.training.weights import MasterWeights, Weights, round_weights
from strop.training.world import World


def open_learner(
    directory: Path,
    config: TrainerConfig,
    *,
    reference: Path | None,
    critic: Path | None,
    total_updates: int | None,
    total_critic_updates: int | None,
    world: World | None = None,
) -> Learner:
    """A learner of the model in `directory`, alone or as one rank of `world`; the arguments are those of `open_trainer`.

    Dropout is off, so that a token scored twice gets the same log-prob: of the first update after a score every ratio is
    exactly 1, because both cut the batch into the same micro-batches.
    """
    if config.lora is not None and reference is not None and reference.resolve() != directory.resolve():
        raise ModelError(
            f"{reference}: with trainer.lora the reference is the model that the adapter stands beside, {directory}. Leave the"
            " other reference out, or train all weights."
        )
    dtype = getattr(torch, config.precision)
    keep_freed_memory(config.device == "cpu" and not config.gives_back_memory)
    device = torch.device(config.device)
    model = load_model(directory).eval().requires_grad_(True)
    if world is None:
        model = model.to(device)
    check_logprobs(model, is_packed=config.packing)
    adapter = None if config.lora is None else Adapter(model, config.lora)
    if config.activation_checkpointing:
        checkpoint_activations(model, dtype if world is None else None)
    policy = LogprobModule(model, max_logits=config.max_logits, is_packed=config.packing)
    weights: Weights
    if world is None:
        originals = None if adapter is None else Originals(directory, called=published_name)
        weights = MasterWeights(model, dtype, rounds_layers=not config.activation_checkpointing, originals=originals)
    else:
        weights = ShardedWeights(policy, model, dtype, device, num_ranks=world.size)
    measured: Reference | None = None
    if adapter is not None and reference is not None:
        measured = AdapterReference(policy, adapter, weights)
    elif reference is not None:
        frozen = load_model(reference).eval().requires_grad_(False)
        if config.packing:
            use_row_attention(frozen)
        use_lean_norms(frozen)  # as the policy has, or their log-probs would differ by rounding
        use_lean_gates(frozen)
        scorer = LogprobModule(round_weights(frozen, dtype), max_logits=config.max_logits, is_packed=config.packing)
        if world is None:
            scorer.to(device)
        else:
            divide(scorer, device, world.size, MixedPrecisionPolicy(), keeps_ends=False)
        measured = FrozenReference(scorer, weights, reference)
    return Learner(
        policy,
        weights,
        config,
        world=world or World(),
        adapter=adapter,
        reference=measured,
        critic=None if critic is None else _open_critic(critic, config, world, total_critic_updates, model),
        tokenizer_files=read_tokenizer_files(directory),
        total_updates=total_updates,
    )


def _open_critic(
    directory: Path, config: TrainerConfig, world: World | None, total_updates: int | None, policy: PreTrainedModel
) -> Critic:
    dtype, device = getattr(torch, config.precision), torch.device(config.device)
    is_reward_model = has_reward_head(directory)
    model = load_reward_model(directory) if is_reward_model else load_model(directory)
    if model.config.vocab_size != policy.config.vocab_size:
        raise ModelError(
            f"{directory}: a critic reads what the policy writes, but this model has {model.config.vocab_size} tokens and the"
            f" policy has {policy.config.vocab_size}. Start the critic from a model with the policy's tokenizer."
        )
    decoder = model.base_model.eval().requires_grad_(True)
    use_lean_norms(decoder)
    use_lean_gates(decoder)
    if config.packing:
        use_row_attention(decoder)
    if config.activation_checkpointing:
        checkpoint_activations(decoder)
    values = ValueModule(decoder, is_packed=config.packing, head=head_of(model) if is_reward_model else None)
    weights: Weights
    if world is None:
        weights = MasterWeights(values.to(device), dtype)
    else:
        weights = ShardedWeights(values, values, dtype, device, num_ranks=world.size)
    return Critic(values, weights, config, world=world or World(), total_updates=total_updates)
