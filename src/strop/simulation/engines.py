"""A simulated engine: continuous batching with measured step times and KV memory that can run out.

It advances from one event to the next: between two events the rows are the same and each grows by one token a step, so the
time of k steps has a closed form. When KV memory runs out it does what servers do: it drops the caches of idle conversations,
then those of the half of the running rows that joined last. Dropped conversations are computed again later.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from scipy.optimize import nnls

from strop.config import Config, validate
from strop.errors import UserError
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.report import EngineUsage
from strop.run_directory import read_json
from strop.simulation.trace import NonEmpty
from strop.types import RolloutKey

TRACE_PATH = Path(__file__).parent / "engine_trace.json"
_RETURN_BELOW = 0.75  # share of KV memory in use at which an evicted row may return; with less margin it is evicted at once


class EngineTiming(Config):
    """A decode step takes step_s + row_s * rows + kv_token_s * (tokens attended to); prefill takes prefill_token_s a token."""

    step_s: NonNegativeFloat
    row_s: NonNegativeFloat
    kv_token_s: NonNegativeFloat
    prefill_token_s: NonNegativeFloat

    def decode_s(self, num_steps: int, rows: int, kv_tokens: int) -> float:
        """Time of `num_steps` steps, the first of which attends to `kv_tokens`."""
        grown = rows * num_steps * (num_steps - 1) / 2
        return num_steps * (self.step_s + self.row_s * rows + self.kv_token_s * kv_tokens) + self.kv_token_s * grown

    def steps_within(self, seconds: float, rows: int, kv_tokens: int) -> int:
        """The smallest number of steps that takes at least `seconds`."""
        square = self.kv_token_s * rows / 2
        linear = self.step_s + self.row_s * rows + self.kv_token_s * kv_tokens - square
        root = seconds / linear if square == 0 else (math.sqrt(linear**2 + 4 * square * seconds) - linear) / (2 * square)
        return max(0, math.ceil(root - 1e-9))


class DecodePoint(Config):
    rows: Annotated[float, Field(ge=1)]
    kv_tokens: NonNegativeFloat
    seconds: PositiveFloat  # of one step


class PrefillPoint(Config):
    tokens: Annotated[float, Field(ge=1)]
    seconds: PositiveFloat


class MeasuredTrace(Config):
    """Step times of an engine, as `benchmarks/engine_trace.py` measures them."""

    command: str
    model: str
    dtype: str
    machine: str
    decode: NonEmpty[DecodePoint]
    prefill: NonEmpty[PrefillPoint]

    def fit(self) -> EngineTiming:
        """Fit by least squares of the relative error, with no negative coefficient."""
        seconds = np.array([point.seconds for point in self.decode])
        columns = np.array([[1.0, point.rows, point.kv_tokens] for point in self.decode])
        step_s, row_s, kv_token_s = map(float, nnls(columns / seconds[:, None], np.ones(len(seconds)))[0])
        prefill_token_s = float(np.median([point.seconds / point.tokens for point in self.prefill]))
        return EngineTiming(step_s=step_s, row_s=row_s, kv_token_s=kv_token_s, prefill_token_s=prefill_token_s)


def load_timing(path: Path = TRACE_PATH) -> EngineTiming:
    """Return the timing of the engine that was measured in `path`; by default the embedded engine.

    Raises:
        UserError: no such file.
        ConfigError: not a measured trace.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. python benchmarks/engine_trace.py writes one.")
    return validate(MeasuredTrace, read_json(path), place=str(path)).fit()


@dataclass(slots=True, eq=False, kw_only=True)
class _Conversation:
    key: RolloutKey
    prompt_tokens: int
    context_tokens: int  # in the cache, prompt included; for a running row, at its first step
    run: int = 0
    left_tokens: int = 0  # to sample in this run
    began_step: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A completion is done."""

    key: RolloutKey
    run: int
    recomputed_tokens: int


class SimulatedEngine:
    """One engine. Times are absolute, and never go back from call to call."""

    def __init__(self, spec: EngineSpec, timing: EngineTiming) -> None:
        self.spec = spec
        self.timing = timing
        self.evictions = 0
        self.prefilled_tokens = 0
        self.peak_tokens = 0
        self.usage = EngineUsage(joined_s=0.0)  # rows that decode and memory in use, not rows requested and memory reserved
        self._capacity = spec.kv_blocks * spec.block_tokens
        self._now_s = 0.0
        self._step = 0
        self._rows: dict[RolloutKey, _Conversation] = {}  # that decode, in the order in which they joined
        self._idle: dict[RolloutKey, _Conversation] = {}  # between two turns, the longest idle first
        self._queue: deque[_Conversation] = deque()
        self._lost: dict[RolloutKey, int] = {}  # evicted: tokens that had been computed
        self._prompts: dict[int, list[int]] = {}  # by group: users, tokens
        self._kv_tokens = 0  # that the running rows attend to
        self._used_tokens = 0
        self._ends: list[tuple[int, int, int, RolloutKey]] = []  # heap of (step, order, run, key)
        self._num_submitted = 0

    def submit(
        self, key: RolloutKey, run: int, *, prompt_tokens: int, context_tokens: int, num_tokens: int, now_s: float
    ) -> None:
        """Sample `num_tokens` after `context_tokens`. The row joins at the next step, or when there is room."""
        self.advance(now_s)
        held = self._idle.pop(key, None)
        if held is not None:
            self._used_tokens += context_tokens - held.context_tokens
            held.prefill_tokens, held.context_tokens = context_tokens - held.context_tokens, context_tokens
            held.run, held.left_tokens, held.recomputed_tokens = run, num_tokens, 0
            self._join(held)
        else:
            row = _Conversation(
                key=key, run=run, prompt_tokens=prompt_tokens, context_tokens=context_tokens, left_tokens=num_tokens
            )
            self._queue.append(row)
        self._admit()
        self._make_room()

    def release(self, key: RolloutKey, *, now_s: float) -> None:
        """Drop everything that is known of a conversation."""
        self.advance(now_s)
        self._lost.pop(key, None)
        if key in self._rows:
            self._drop(self._leave(key))
        elif key in self._idle:
            self._drop(self._idle.pop(key))
        else:
            self._queue = deque(each for each in self._queue if each.key != key)
        self._admit()

    def advance(self, now_s: float) -> None:
        """Do the steps that begin before `now_s`. The last one is done to its end."""
        if not self._rows:
            self._now_s = max(self._now_s, now_s)
        elif self._now_s < now_s:
            steps = self.timing.steps_within(now_s - self._now_s, len(self._rows), self._kv_tokens)
            self._do(min(steps, self._steps_to_event()))

    def next_event_s(self) -> float | None:
        """When a completion is done or memory runs out; None while nothing runs."""
        if not self._rows:
            return None
        return self._now_s + self.timing.decode_s(self._steps_to_event(), len(self._rows), self._kv_tokens)

    def do_event(self) -> tuple[float, list[Finished]]:
        """Advance to `next_event_s`; return that time and the completions that are done."""
        self._do(self._steps_to_event())
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            end, _, run, key = heapq.heappop(self._ends)
            row = self._row_ending(end, run, key)
            if row is not None and end == self._step:
                self._leave(key)
                self._idle[key] = row
                done.append(Finished(key=key, run=run, recomputed_tokens=row.recomputed_tokens))
        self._admit()
        self._make_room()
        return self._now_s, done

    def _do(self, steps: int) -> None:
        if steps:
            rows = len(self._rows)
            self._now_s += self.timing.decode_s(steps, rows, self._kv_tokens)
            self._step += steps
            self._kv_tokens += rows * steps
            self._used_tokens += rows * steps
            self.peak_tokens = max(self.peak_tokens, self._used_tokens)

    def _steps_to_event(self) -> int:
        while self._row_ending(self._ends[0][0], *self._ends[0][2:]) is None:
            heapq.heappop(self._ends)
        return min(self._ends[0][0] - self._step, (self._capacity - self._used_tokens) // len(self._rows))

    def _row_ending(self, end: int, run: int, key: RolloutKey) -> _Conversation | None:
        """The row that an entry of `_ends` is about; None if the entry is out of date."""
        row = self._rows.get(key)
        return row if row is not None and row.run == run and row.began_step + row.left_tokens == end else None

    def _admit(self) -> None:
        """Let queued rows join in order while their context fits. Idle conversations make room."""
        while self._queue:
            row = self._queue[0]
            while not self._fits(self._needed(row)) and self._idle:
                self._evict_idle()
            needed = self._needed(row)
            must_wait = row.key in self._lost and self._rows and self._used_tokens + needed > _RETURN_BELOW * self._capacity
            if not self._fits(needed) or must_wait:
                return
            self._queue.popleft()
            row.prefill_tokens = row.context_tokens - (row.prompt_tokens if row.key.task_index in self._prompts else 0)
            self._used_tokens += row.prefill_tokens
            self._prompts.setdefault(row.key.task_index, [0, row.prompt_tokens])[0] += 1
            had = self._lost.pop(row.key, 0)
            row.recomputed_tokens += max(0, min(had, row.context_tokens) - (row.context_tokens - row.prefill_tokens))
            self._join(row)

    def _needed(self, row: _Conversation) -> int:
        """Tokens of memory for its context and for the next step of all rows."""
        return row.context_tokens - (row.prompt_tokens if row.key.task_index in self._prompts else 0) + len(self._rows) + 1

    def _fits(self, tokens: int) -> bool:
        holders = len(self._rows) + len(self._idle)
        return self._used_tokens + tokens <= self._capacity and holders < self.spec.max_conversations

    def _join(self, row: _Conversation) -> None:
        self._now_s += self.timing.prefill_token_s * row.prefill_tokens
        self.prefilled_tokens += row.prefill_tokens
        row.began_step = self._step
        self._rows[row.key] = row
        self._kv_tokens += row.context_tokens
        self._num_submitted += 1
        heapq.heappush(self._ends, (self._step + row.left_tokens, self._num_submitted, row.run, row.key))
        self._record_usage()
        self.peak_tokens = max(self.peak_tokens, self._used_tokens)

    def _leave(self, key: RolloutKey) -> _Conversation:
        """A row stops decoding; its memory stays."""
        row = self._rows.pop(key)
        done = self._step - row.began_step
        row.context_tokens += done
        row.left_tokens -= done
        self._kv_tokens -= row.context_tokens
        self._record_usage()
        return row

    def _record_usage(self) -> None:
        self.usage.record(self._now_s, len(self._rows), self._used_tokens / self._capacity)

    def _drop(self, conversation: _Conversation) -> None:
        self._used_tokens -= conversation.context_tokens - conversation.prompt_tokens
        prompt = self._prompts[conversation.key.task_index]
        prompt[0] -= 1
        if prompt[0] == 0:
            self._used_tokens -= conversation.prompt_tokens
            del self._prompts[conversation.key.task_index]

    def _evict_idle(self) -> None:
        self._evict(self._idle.pop(next(iter(self._idle))))

    def _evict(self, conversation: _Conversation) -> None:
        self.evictions += 1
        self._drop(conversation)
        self._lost[conversation.key] = conversation.context_tokens

    def _make_room(self) -> None:
        """While the next step does not fit, evict idle conversations, then the half of the rows that joined last."""
        while self._rows and self._used_tokens + len(self._rows) > self._capacity:
            if self._idle:
                self._evict_idle()
                continue
            for key in list(self._rows)[len(self._rows) - max(1, len(self._rows) // 2) :]:
                row = self._leave(key)
                self._evict(row)
                self._queue.append(row)
