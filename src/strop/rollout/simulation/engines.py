"""A simulated engine: continuous batching whose steps take as long as a measured engine's, over KV memory that can run out.

It advances from one event to the next, not step by step: between two events the rows are the same and each grows by one token
a step, so the time of k steps has a closed form. Where KV memory runs out it does what servers do: what idle conversations
have cached goes first, then half of the running ones, those that joined last; they are computed again later.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from pydantic import NonNegativeFloat

from strop.config import Config
from strop.rollout.scheduling import EngineSpec, EngineUsage
from strop.types import RolloutKey

_BACK_BELOW = (
    0.75  # of KV memory that may be in use when an evicted row comes back; without a margin it is evicted again at once
)


class EngineTiming(Config):
    """A decode step takes step_s + row_s * rows + kv_token_s * (tokens attended to), a prefill prefill_token_s a token."""

    step_s: NonNegativeFloat
    row_s: NonNegativeFloat
    kv_token_s: NonNegativeFloat
    prefill_token_s: NonNegativeFloat

    def decode_s(self, num_steps: int, rows: int, kv_tokens: int) -> float:
        """Of `num_steps` steps, the first of which attends to `kv_tokens`."""
        grown = rows * num_steps * (num_steps - 1) / 2
        return num_steps * (self.step_s + self.row_s * rows + self.kv_token_s * kv_tokens) + self.kv_token_s * grown

    def steps_within(self, seconds: float, rows: int, kv_tokens: int) -> int:
        """The least number of steps that take at least `seconds`."""
        square = self.kv_token_s * rows / 2
        linear = self.step_s + self.row_s * rows + self.kv_token_s * kv_tokens - square
        root = seconds / linear if square == 0 else (math.sqrt(linear**2 + 4 * square * seconds) - linear) / (2 * square)
        return max(0, math.ceil(root - 1e-9))


@dataclass(slots=True, eq=False, kw_only=True)
class _Conversation:
    key: RolloutKey
    prompt_tokens: int
    context_tokens: int  # whose KV is held, the prompt included; while it runs, as of its first step
    run: int = 0
    left_tokens: int = 0  # to be sampled in this run
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
    """One engine. Times are absolute; `advance` is called with times that never go back."""

    def __init__(self, spec: EngineSpec, timing: EngineTiming) -> None:
        self.spec = spec
        self.timing = timing
        self.evictions = 0
        self.recomputed_tokens = 0
        self.prefilled_tokens = 0
        self.peak_tokens = 0
        self.usage = EngineUsage(since_s=0.0)  # rows that decode and memory that is used, not what was asked for or reserved
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
        """Sample `num_tokens` after `context_tokens`; joins at the next step, or when there is room."""
        self.advance(now_s)
        held = self._idle.pop(key, None)
        if held is not None:
            self._used_tokens += context_tokens - held.context_tokens
            held.prefill_tokens, held.context_tokens = context_tokens - held.context_tokens, context_tokens
            held.run, held.left_tokens, held.recomputed_tokens = run, num_tokens, 0
            self._join(held)
        else:
            self._queue.append(
                _Conversation(
                    key=key, run=run, prompt_tokens=prompt_tokens, context_tokens=context_tokens, left_tokens=num_tokens
                )
            )
        self._let_in()
        self._make_room()

    def release(self, key: RolloutKey, *, now_s: float) -> None:
        """Whatever is known of a conversation goes."""
        self.advance(now_s)
        self._lost.pop(key, None)
        if key in self._rows:
            self._drop(self._leave(key))
        elif key in self._idle:
            self._drop(self._idle.pop(key))
        else:
            self._queue = deque(each for each in self._queue if each.key != key)
        self._let_in()

    def advance(self, now_s: float) -> None:
        """Do the steps that begin before `now_s`; a step under way then is done to its end."""
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
        """Go on to `next_event_s` and tell which completions are done then."""
        self._do(self._steps_to_event())
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            _, _, run, key = heapq.heappop(self._ends)
            row = self._rows.get(key)
            if row is None or row.run != run or row.began_step + row.left_tokens != self._step:
                continue
            self._leave(key)
            self._idle[key] = row
            done.append(Finished(key=key, run=run, recomputed_tokens=row.recomputed_tokens))
        self._let_in()
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
        while True:
            end, _, run, key = self._ends[0]
            row = self._rows.get(key)
            if row is not None and row.run == run and row.began_step + row.left_tokens == end:
                break
            heapq.heappop(self._ends)
        return min(end - self._step, (self._capacity - self._used_tokens) // len(self._rows))

    def _let_in(self) -> None:
        """Rows that wait join in order, as far as their context fits; idle ones make room."""
        while self._queue:
            row = self._queue[0]
            prompt = self._prompts.get(row.key.task_index)
            needed = row.context_tokens - (row.prompt_tokens if prompt else 0) + len(self._rows) + 1
            while self._idle and not self._fits(needed):
                self._evict_idle()
                prompt = self._prompts.get(row.key.task_index)
                needed = row.context_tokens - (row.prompt_tokens if prompt else 0) + len(self._rows) + 1
            was_evicted = row.key in self._lost and bool(self._rows)
            if not self._fits(needed) or (was_evicted and self._used_tokens + needed > _BACK_BELOW * self._capacity):
                return
            self._queue.popleft()
            row.prefill_tokens = row.context_tokens - (row.prompt_tokens if prompt else 0)
            self._used_tokens += row.prefill_tokens
            users = self._prompts.setdefault(row.key.task_index, [0, row.prompt_tokens])
            users[0] += 1
            had = self._lost.pop(row.key, 0)
            again = max(0, min(had, row.context_tokens) - (row.context_tokens - row.prefill_tokens))
            row.recomputed_tokens += again
            self.recomputed_tokens += again
            self._join(row)

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
        self._note()
        self.peak_tokens = max(self.peak_tokens, self._used_tokens)

    def _leave(self, key: RolloutKey) -> _Conversation:
        """A row stops to decode; its memory stays."""
        row = self._rows.pop(key)
        done = self._step - row.began_step
        row.context_tokens += done
        row.left_tokens -= done
        self._kv_tokens -= row.context_tokens
        self._note()
        return row

    def _note(self) -> None:
        self.usage.move(self._now_s, len(self._rows), self._used_tokens / self._capacity)

    def _drop(self, conversation: _Conversation) -> None:
        self._used_tokens -= conversation.context_tokens - conversation.prompt_tokens
        prompt = self._prompts[conversation.key.task_index]
        prompt[0] -= 1
        if prompt[0] == 0:
            self._used_tokens -= conversation.prompt_tokens
            del self._prompts[conversation.key.task_index]

    def _evict_idle(self) -> None:
        key = next(iter(self._idle))
        self._evict(self._idle.pop(key))

    def _evict(self, conversation: _Conversation) -> None:
        self.evictions += 1
        self._drop(conversation)
        self._lost[conversation.key] = conversation.context_tokens

    def _make_room(self) -> None:
        """As long as the next step does not fit, evict: idle ones, then the half of the rows that joined last."""
        while self._rows and self._used_tokens + len(self._rows) > self._capacity:
            if self._idle:
                self._evict_idle()
                continue
            for key in list(self._rows)[len(self._rows) - max(1, len(self._rows) // 2) :]:
                row = self._leave(key)
                self._evict(row)
                self._queue.append(row)
