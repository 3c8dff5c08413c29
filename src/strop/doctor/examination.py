"""Tries the parts out together: conversations with a tool call, their batch, log-probs of the same tokens from all sides."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from torch import Tensor

from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column, Decision, Selection
from strop.doctor.finding import Origin, Piece
from strop.doctor.parts import ROOM, Parts
from strop.engine.protocol import CompletionRequest
from strop.errors import MachineError, UserError
from strop.rollout.chat_template import message
from strop.rollout.environment import ToolEnvironments, ended
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import Calls
from strop.training.batch import TokenBatch
from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Trajectory,
    Turn,
    derive_seed,
)

CODE, PRINTED = "print(6*7)", "42"
_NUM_CONVERSATIONS = 2
_NUM_PROBES = 16
_PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """Ids, which of them the engine sampled, and the log-probs that it reported for those."""

    ids: Sequence[int]
    is_sampled: Sequence[bool]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rollout in whose first turn a tool call is put into the policy's mouth; all else is sampled or observed."""

    trajectory: Trajectory
    call: str  # as the prompt has calls written; empty where it knows none, or no tool of the recipe runs Python
    tool_fault: str  # why the tool could not run at all; empty when it ran

    @property
    def row(self) -> SampledRow:
        is_sampled = [origin is Origin.SAMPLED for origin in origins(self.trajectory)]
        return SampledRow(ids=self.trajectory.ids, is_sampled=is_sampled, logprobs=self.trajectory.sampled_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The `n` sampled tokens of some rows, seen from three sides. Log-probs in nats, (n,) each."""

    engine: Tensor  # as reported
    trainer: Tensor  # as scored at the recipe's temperature
    logits: Tensor  # float32 (n, V): of the original weights, in a plain forward of `transformers`, before any temperature
    tokens: Tensor  # int64
    rounding_nats: float  # mean distance of that forward in bfloat16 from itself in float32; 0 where nobody rounds

    @property
    def said(self) -> dict[str, Tensor]:
        return {"engine": self.engine, "trainer": self.trainer}

    def original(self, temperature: float) -> Tensor:
        """Log-probs of the tokens under the original weights."""
        return logprobs_at(self.logits, self.tokens, temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The parts, and what came of trying them out together. Weights are still the original ones."""

    parts: Parts
    conversations: tuple[Conversation, ...]
    batch: TokenBatch  # of the conversations, as `parts.pack` makes it: one row each, in order
    evidence: Evidence

    @property
    def tolerance_nats(self) -> float:
        """How far two computations of one log-prob may lie apart on average: engine and trainer may each round once."""
        return max(2e-2 if self.parts.is_rounded else 1e-3, 2 * self.evidence.rounding_nats)


async def try_out(parts: Parts) -> Examination:
    """Play, pack, sample, score. Raises `MachineError` when the engine is lost."""
    conversations = tuple([await _converse(parts, index) for index in range(min(_NUM_CONVERSATIONS, len(parts.tasks)))])
    rows = [conversation.row for conversation in conversations]
    rows += await sample_rows(parts, "before", num=_NUM_PROBES)
    return Examination(
        parts=parts,
        conversations=conversations,
        batch=_packed(parts, conversations),
        evidence=await compare(parts, rows),
    )


async def sample_rows(parts: Parts, name: str, *, num: int) -> list[SampledRow]:
    """Completions of short prompts, sampled together: nothing stops them, nothing is forced."""

    async def one(index: int) -> SampledRow:
        ids = parts.chat.prompt_ids([message("user", parts.tasks[index % len(parts.tasks)].question)])
        completion = await _sample(parts, ids, num=_PROBE_TOKENS, name=f"{name}-{index}")
        return SampledRow(
            ids=(*ids, *completion.ids),
            is_sampled=(False,) * len(ids) + (True,) * len(completion.ids),
            logprobs=(*[0.0] * len(ids), *completion.logprobs),
        )

    return list(await asyncio.gather(*(one(index) for index in range(num))))


async def compare(parts: Parts, rows: Sequence[SampledRow]) -> Evidence:
    """The sampled tokens of `rows` as the engine reported them, as the trainer scores them, as the original model has them."""
    batch = batch_of(rows, parts.temperature)
    scored = (await parts.trainer.score(batch, Column.OLD_LOGPROBS)).columns[Column.OLD_LOGPROBS]
    logits = await asyncio.to_thread(lambda: torch.cat([_logits(parts.original, row) for row in rows]))
    tokens = batch.ids[batch.loss_mask]
    rounding_nats = 0.0
    if parts.is_rounded:
        low = copy.deepcopy(parts.original).to(torch.bfloat16)
        rounded = await asyncio.to_thread(lambda: torch.cat([_logits(low, row) for row in rows]))
        exact, inexact = (logprobs_at(each, tokens, parts.temperature) for each in (logits, rounded))
        rounding_nats = (exact - inexact).abs().mean().item()
    return Evidence(
        engine=batch.sampled_logprobs[batch.loss_mask],
        trainer=scored[batch.loss_mask],
        logits=logits,
        tokens=tokens,
        rounding_nats=rounding_nats,
    )


def batch_of(rows: Sequence[SampledRow], temperature: float) -> TokenBatch:
    """`rows` with advantage 1 on every sampled token. Made by hand: that `pack` is right is what another check is about."""
    shape = (len(rows), max(len(row.ids) for row in rows))
    ids, mask, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        mask[index, : len(row.ids)] = torch.tensor(row.is_sampled)
        logprobs[index, : len(row.ids)] = torch.tensor(row.logprobs)
    return TokenBatch(
        ids=ids,
        lengths=torch.tensor([len(row.ids) for row in rows]),
        loss_mask=mask,
        loss_weights=mask / mask.sum(),
        advantages=mask.float(),
        sampled_logprobs=logprobs,
        columns={},
        temperature=temperature,
        is_banned=torch.zeros_like(mask),
        banned_ids=(),
        groups=torch.zeros(len(rows), dtype=torch.int64),
    )


def logprobs_at(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """(n, V), (n,) -> (n,), in nats."""
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def origins(trajectory: Trajectory) -> list[Origin]:
    """Where each id of `trajectory` comes from, read off its turns one by one."""
    found = [Origin.PROMPT] * len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        found += [Origin.FORCED if forced else Origin.SAMPLED for forced in turn.completion.is_forced]
        found += [Origin.OBSERVATION] * len(turn.observation_ids)
    return found


def pieces(examination: Examination) -> tuple[Piece, ...]:
    """The first conversation as text, cut where the origin of tokens, or their place in the packed mask, changes."""
    trajectory = examination.conversations[0].trajectory
    marks = list(zip(origins(trajectory), examination.batch.loss_mask[0].tolist(), strict=False))
    ids, found, start = trajectory.ids, [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or marks[end] != marks[start]:
            origin, is_trained = marks[start]
            text = examination.parts.chat.decode(ids[start:end])
            found.append(Piece(text=text, origin=origin, is_trained=is_trained))
            start = end
    return tuple(found)


@torch.no_grad()
def _logits(model: transformers.PreTrainedModel, row: SampledRow) -> Tensor:
    """Float32 (number of sampled ids, V): what `model` predicts each sampled id from."""
    predicted = torch.tensor(row.is_sampled)[1:]
    logits: Tensor = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1].float()
    return logits[predicted]


def _packed(parts: Parts, conversations: Sequence[Conversation]) -> TokenBatch:
    selections = []
    for index, conversation in enumerate(conversations):
        scored = ScoredTrajectory(trajectory=conversation.trajectory, reward=1.0, reward_parts={})
        group = Group(task=parts.tasks[index], task_index=index, trajectories=(scored,))
        selections.append(Selection(group=group, decisions=(Decision(is_kept=True, reason="examined", figures={}),)))
    advantages = [[torch.ones(len(each.trajectory.ids))] for each in conversations]
    return parts.pack(selections, advantages, aggregation=Aggregation.TOKEN_MEAN, temperature=parts.temperature)


async def _converse(parts: Parts, index: int) -> Conversation:
    chat, task = parts.chat, parts.tasks[index]
    python = [tool for tool in parts.tools if {"code", "input"} <= tool.spec.parameters.get("properties", {}).keys()][:1]
    limits = parts.stage.limits.model_copy(update={"max_turns": 2, "max_calls": None})
    environments = ToolEnvironments(chat, load_prompt(parts.stage.prompt), python, limits)
    call, fault = "", ""
    if python and environments.prompt.calls is not Calls.NONE:
        call = environments.format.write(python[0].spec.name, {"code": CODE, "input": ""})
    environment = environments(task, seed=index)
    try:
        prompt = (await environment.start()).ids
        name, num = f"conversation-{index}", 8 + 4 * index
        forced = chat.completion_ids(call)[:-1]
        if environments.format.continues_turn:  # sampling stops at the call
            head = await _sample(parts, prompt, num=num, name=f"{name}-first")
            called = _joined(head, forced=forced)
        else:
            tail = await _sample(parts, prompt + forced, num=num, name=f"{name}-first", stop_ids=chat.stop_ids)
            called = _joined(tail, before=forced)
        try:
            observation = await environment.step(called, num_tokens_left=ROOM)
        except (MachineError, UserError) as error:  # the conversation continues for the other checks
            fault, observation = str(error), ended(chat.decode(called.ids), (), StopReason.ANSWERED)
        context = prompt + called.ids + observation.ids
        answer = await _sample(parts, context, num=16 + 4 * index, name=f"{name}-second", stop_ids=chat.stop_ids)
    finally:
        await environment.close()
    first = Turn(
        completion=called,
        calls=observation.calls,
        observation_ids=observation.ids,
        completion_text=observation.completion_text,
        observation_text=observation.text,
    )
    said = chat.decode(answer.ids)
    second = Turn(completion=answer, calls=(), observation_ids=(), completion_text=said, observation_text="")
    trajectory = Trajectory(
        key=RolloutKey(task_index=index, attempt=0),
        task_id=task.id,
        prompt_ids=prompt,
        turns=(first, second),
        stop_reason=StopReason.ANSWERED,
    )
    return Conversation(trajectory=trajectory, call=call, tool_fault=fault)


def _joined(sampled: Completion, *, before: tuple[int, ...] = (), forced: tuple[int, ...] = ()) -> Completion:
    """What was sampled, with ids that were forced on the policy before it, or behind it."""
    return replace(
        sampled,
        ids=before + sampled.ids + forced,
        logprobs=(*[0.0] * len(before), *sampled.logprobs, *[0.0] * len(forced)),
        entropies=(),
        is_forced=(True,) * len(before) + sampled.is_forced + (True,) * len(forced),
        finish_reason=FinishReason.STOP,
    )


async def _sample(
    parts: Parts, ids: tuple[int, ...], *, num: int, name: str, stop_ids: frozenset[int] = frozenset()
) -> Completion:
    request = CompletionRequest(
        id=f"doctor-{name}",
        ids=ids,
        max_tokens=num,
        stop_ids=stop_ids,
        temperature=parts.temperature,
        seed=derive_seed("doctor", parts.recipe.seed, name),
    )
    try:
        return await parts.engine.complete(request)
    finally:
        await parts.engine.release(request.id)
