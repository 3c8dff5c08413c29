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
        self.largest = max(engines, key=lambda engine: engine.longest, default=None)
        self._index = {engine.name: index for index, engine in enumerate(engines)}
        self._capacity = np.array([engine.capacity for engine in engines])
        self._block_tokens = np.array([engine.spec.block_tokens for engine in engines])
        self._longest = np.array([engine.longest for engine in engines])
        self._fill = np.array([engine.fill for engine in engines])
        self._room = np.array([engine.room for engine in engines])
        self.accepting = {index for index, engine in enumerate(engines) if engine.has_free_row}  # with a free row
        self._is_open = np.ones(len(engines), dtype=np.bool_)
        self._tokens = np.array([engine.tokens for engine in engines])
        self._started = np.array([engine.started for engine in engines])  # by engine and attempt number
        self._holders: dict[Prompt, set[int]] = {}  # indices of the engines that hold a prompt
        for index, engine in enumerate(engines):
            engine.tokens, engine.started = self._tokens[index], self._started[index]  # views: each engine counts its own
            for prompt in engine.prompts:
                self._holders.setdefault(prompt, set()).add(index)
        self.has_changed = True  # since the last refill: engines may have room for another rollout

    def open_all(self) -> None:
        """Let rollouts start on every engine."""
        self._is_open[:] = True

    def close_for(self, size: Size) -> bool:
        """Start no more rollouts on engines that could hold one of `size`. Return whether no engine is open."""
        self._is_open &= size.total_tokens > self._longest
        return not self._is_open.any()

    def best(self, rollout: Rollout, *, turn: int) -> Engine | None:
        """Return the open engine for one more rollout, or None if it fits nowhere now. `turn` breaks ties."""
        size = rollout.size
        fits = (self._is_open & (size.total_tokens <= self._room)).nonzero()[0]
        fills = self._fill[fits]
        least = fills.min(initial=np.inf)
        holders = sorted(self.accepting.intersection(self._holders.get(size.prompt, ())))
        sharing = [engine for index in holders if (engine := self._engines[index]).has_room(size) and self._is_open[index]]
        holder = min(sharing, key=lambda engine: engine.fill, default=None)
        if holder is not None and holder.fill <= least + _AFFINITY:
            return holder
        if len(fits) < 2:
            return self._engines[fits[0]] if len(fits) else None
        needed = -(-size.total_tokens // self._block_tokens[fits])
        equals = fits[fills <= least + _EQUAL * needed / self._capacity[fits]]
        started = self._started[equals, rollout.key.attempt % MAX_ATTEMPTS]
        equals = equals[started == started.min()]
        return self._engines[int(equals[((equals - turn) % len(self._engines)).argmin()])]

    def lighter(self, rollout: Rollout) -> Engine | None:
        """Return an engine whose steps would be much shorter for this rollout than those of its own engine, or None.

        What a step takes grows with the tokens that it attends to, and a long rollout attends to most. Moving costs no more
        than computing the context again: a small part of what is left of a long one. An engine with fewer tokens in as many
        rollouts is not lighter for long.
        """
        own = rollout.engine
        assert own is not None
        if not self.accepting or not len(fits := (rollout.size.total_tokens <= self._room).nonzero()[0]):
            return None
        lightest = self._engines[fits[self._tokens[fits].argmin()]]
        has_fewer = len(lightest.holdings) + 1 <= _LIGHTER * len(own.holdings)
        return lightest if has_fewer and lightest.tokens[0] + rollout.context_tokens < _LIGHTER * own.tokens[0] else None

    def least_started(self, engine: Engine, group: WaitingGroup) -> Rollout:
        """Return the one of the group's equals whose attempt number `engine` has started least."""
        equals = group.equals
        if len(equals) == 1:
            return equals[0]
        attempts = np.array([each.key.attempt for each in equals]) % MAX_ATTEMPTS
        return equals[int(engine.started[attempts].argmin())]

    def update(self, engine: Engine, prompt: Prompt) -> None:
        """The reservations of `engine` have changed, possibly also whether it holds `prompt`."""
        self.has_changed = True
        index = self._index[engine.name]
        self._fill[index], self._room[index] = engine.fill, engine.room
        if engine.has_free_row:
            self.accepting.add(index)
        else:
            self.accepting.discard(index)
        holders = self._holders.setdefault(prompt, set())
        if prompt in engine.prompts:
            holders.add(index)
        else:
            holders.discard(index)
            if not holders:
                del self._holders[prompt]
