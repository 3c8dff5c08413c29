"""Which of several engines a rollout goes to: the emptiest one, unless another holds its prompt.

At the start of a step all engines are equally empty and no length is known. The attempt number of a rollout may still
correlate with its length, as any order of rollouts may. So of several equally empty engines the rollout goes to the one that
has started the fewest rollouts with its attempt number, and of a group's rollouts an engine starts the one whose attempt
number it has started least. Otherwise some group sizes would send the same attempt number of every group to the same engine.
Remaining ties are broken in turn, and each group begins one engine further.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.rollout.scheduler.admission import MAX_ATTEMPTS, Engine, Prompt, Rollout, Size, WaitingGroup

_AFFINITY = 0.05  # share of KV memory by which the engine with the prompt may be fuller than the emptiest one
_LIGHTER = 0.7  # share of its engine's tokens, and of its rollouts, that another has at most when a rollout has moved there
_EQUAL = 0.49  # engines whose fill differs by at most this part of the rollout's size count as equally full


class Placement:
    """The engines that are present, in arrays: hundreds of engines are compared in one operation."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._index = {engine.name: index for index, engine in enumerate(engines)}
        self._capacity = np.array([engine.capacity for engine in engines])
        self._block_tokens = np.array([engine.spec.block_tokens for engine in engines])
        self._longest = np.array([engine.spec.longest for engine in engines])
        self._reserved = np.array([engine.reserved for engine in engines])
        self._has_free_row = np.array([engine.has_free_row for engine in engines])
        self._closed = np.zeros(len(engines), dtype=np.bool_)
        self._started = np.stack([engine.started for engine in engines], axis=1)  # by attempt number and engine
        self._holders: dict[Prompt, set[int]] = {}  # indices of the engines that hold a prompt
        for index, engine in enumerate(engines):
            engine.started = self._started[:, index]  # a view: each engine counts its own
            for prompt in engine.prompts:
                self._holders.setdefault(prompt, set()).add(index)

    def open_all(self) -> None:
        """Let rollouts start on every engine."""
        self._closed[:] = False

    def close_for(self, size: Size) -> bool:
        """Start no more rollouts on engines that could hold one of `size`. Return whether no engine is open."""
        needed = -(-size.total_tokens // self._block_tokens)
        self._closed |= (needed <= self._capacity) & (size.total_tokens <= self._longest)
        return bool(self._closed.all())

    def best(self, rollout: Rollout, *, turn: int) -> Engine | None:
        """Return the open engine for one more rollout, or None if it fits nowhere now. `turn` breaks ties."""
        size = rollout.size
        needed = -(-size.total_tokens // self._block_tokens)
        is_open = self._has_free_row & ~self._closed & (size.total_tokens <= self._longest)
        shares = np.where(is_open & (needed <= self._capacity - self._reserved), self._reserved / self._capacity, np.inf)
        least = float(shares.min())
        holder, holder_share = None, np.inf
        for index in sorted(self._holders.get(size.prompt, ())):
            engine = self._engines[index]
            share = engine.reserved / engine.capacity
            if is_open[index] and share < holder_share and engine.need(size) <= engine.free:
                holder, holder_share = engine, share
        if holder is not None and holder_share <= least + _AFFINITY:
            return holder
        if not np.isfinite(least):
            return None
        equals = np.flatnonzero(shares <= least + _EQUAL * needed / self._capacity)
        if len(equals) > 1:
            started = self._started[rollout.key.attempt % MAX_ATTEMPTS, equals]
            equals = equals[started == started.min()]
        return self._engines[int(equals[((equals - turn) % len(self._engines)).argmin()])]

    def lighter(self, rollout: Rollout) -> Engine | None:
        """Return an engine whose steps would be much shorter for this rollout than those of its own engine, or None.

        What a step takes grows with the tokens that it attends to, and a long rollout attends to most. Moving costs no more
        than computing the context again: a small part of what is left of a long one. An engine with fewer tokens in as many
        rollouts is not lighter for long.
        """
        size, own = rollout.size, rollout.engine
        assert own is not None
        needed = -(-size.total_tokens // self._block_tokens)
        fits = self._has_free_row & (size.total_tokens <= self._longest) & (needed <= self._capacity - self._reserved)
        if not fits.any():
            return None
        tokens = np.array([engine.tokens for engine in self._engines])
        lightest = self._engines[int(np.where(fits, tokens, np.inf).argmin())]
        has_fewer = len(lightest.holdings) + 1 <= _LIGHTER * len(own.holdings)
        return lightest if has_fewer and lightest.tokens + rollout.context_tokens < _LIGHTER * own.tokens else None

    def least_started(self, engine: Engine, group: WaitingGroup) -> Rollout:
        """Return the one of the group's equals whose attempt number `engine` has started least."""
        equals = group.equals
        if len(equals) == 1:
            return equals[0]
        attempts = np.array([each.key.attempt for each in equals]) % MAX_ATTEMPTS
        return equals[int(engine.started[attempts].argmin())]

    def update(self, engine: Engine, prompt: Prompt) -> None:
        """The reservations of `engine` have changed, possibly also whether it holds `prompt`."""
        index = self._index[engine.name]
        self._reserved[index], self._has_free_row[index] = engine.reserved, engine.has_free_row
        holders = self._holders.setdefault(prompt, set())
        if prompt in engine.prompts:
            holders.add(index)
        else:
            holders.discard(index)
            if not holders:
                del self._holders[prompt]
