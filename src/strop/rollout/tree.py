"""Plays the rollouts of one task that branch: all at once, each fork as the engine tells of the completion that asks for it.

Nobody waits for a decision. A completion is sampled whole, as without branching; when it is there, its first tokens tell
whether to fork in front of it. The branch begins where the observation ends, on the parent's engine and from its KV memory,
with a fork of the parent's tools; what was sampled behind the observation stays the parent's alone. A branch that finds no
room beside its parent is counted by the scheduler, waits in its queue like any other, and has its context computed anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from strop.errors import MachineError
from strop.rollout.branching import Branching, Claim, Claims, forks_at
from strop.rollout.fleet.seat import Seat
from strop.rollout.player import Forking, Opened, Past, fork
from strop.rollout.protocol import Environment, Observation, Spent
from strop.rollout.table import Opening, Outcome, Table, all_of, end
from strop.types import Completion, RolloutKey, ScoredTrajectory, Task, Trajectory

logger = logging.getLogger(__name__)


class Tree:
    """The rollouts of one task and their branches. Single use."""

    def __init__(self, task: Task, table: Table, branching: Branching, *, budget: int) -> None:
        """
        Args:
            budget: M - N, the branches that the task may have.
        """
        self.task, self.table, self.branching = task, table, branching
        self._claims = Claims(budget)
        self._playing: dict[RolloutKey, asyncio.Task[Outcome]] = {}
        self._outcomes: dict[RolloutKey, Outcome] = {}
        self._anew: dict[RolloutKey, Past] = {}  # branches of finished rollouts, which are still to be begun
        self._forked: dict[RolloutKey, tuple[Opened, Seat | None]] = {}  # what each branch was given
        self._spending: dict[RolloutKey, _Spending] = {}  # of branches, in their first try
        self._given_up: set[asyncio.Task[None]] = set()

    async def play(self, keys: Sequence[RolloutKey]) -> list[Outcome]:
        """The rollouts `keys`, which begin at the prompt, and every branch of theirs; what finished before is not played."""
        table = self.table
        for key in keys:
            if key in table.finished:
                self._take_over(table.finished[key])
        again = self._played_for_their_branches()
        for key in again:
            self._drop_branches(key)
        fresh = [key for key in keys if key not in table.finished or key in again]
        try:
            opened = dict(zip(fresh, await all_of([table.open(self.task, key) for key in fresh]), strict=True))
            seats = await table.seats(self.task, opened)
            for key in fresh:
                self._start(key, opened[key], seats.get(key), past=None, known=table.finished.get(key))
            self._begin_anew()
            while self._playing:
                done, _ = await asyncio.wait(self._playing.values(), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in self._playing.items() if task in done]:
                    self._outcomes[key] = self._playing.pop(key).result()
        finally:
            await end(list(self._playing.values()))
            if self._given_up:
                await asyncio.wait(self._given_up)
        return [self._outcomes[key] for key in sorted(self._outcomes)]

    def claim(self, claim: Claim) -> RolloutKey | None:
        """The key of the branch that is to be played; None where the budget is spent on claims that come before."""
        refused = self._claims.add(claim)
        if refused is not None and refused != claim:
            self._give_up(self.branching.key_of(refused))
        return None if refused == claim else self.branching.key_of(claim)

    def begin(self, key: RolloutKey, environment: _ForkedEnvironment, past: Past, seat: Seat | None) -> None:
        """Play a branch that was just forked."""
        opened = Opened(environment=environment, past=past)
        self.table.started(key)
        self.table.opened.add(opened)
        self._forked[key] = opened, seat
        self._spending[key] = environment.spending
        self._start(key, opened, seat, past=past, known=self._finished(key, past))

    def take_over(self, key: RolloutKey, past: Past) -> bool:
        """Whether nothing has to be done for the branch `key`: it had finished before the run was interrupted, and still grows
        out of `past`."""
        scored = self._finished(key, past)
        if scored is None:
            return False
        self._take_over(scored)
        if self._anew and self.table.is_exact:
            self._drop_branches(key)
            del self._outcomes[key]
            return False
        self._begin_anew()
        return True

    async def start_over(self, parent: RolloutKey) -> None:
        """Whatever branched off `parent` is gone when this returns."""
        if clearing := self._drop_branches(parent):
            await asyncio.wait(clearing)

    def _drop_branches(self, parent: RolloutKey) -> set[asyncio.Task[None]]:
        """Returns what is still to be waited for."""
        clearing: set[asyncio.Task[None]] = set()
        ended = [parent]
        for claim in self._claims.met:  # a branch stands behind whatever it branched off
            if claim.parent in ended:
                ended.append(self.branching.key_of(claim))
                self._claims.drop(claim)
                clearing |= self._give_up(ended[-1])
        return clearing

    def _played_for_their_branches(self) -> list[RolloutKey]:
        """Finished rollouts from the prompt some of whose branches are still to be begun. Where they repeat themselves, they
        are played again, so that those branches find the memory and the tools that they would have found (law 8)."""
        if not self.table.is_exact:
            return []
        again = {self.branching.descent(key)[0].parent for key in self._anew}
        for key in again:
            del self._outcomes[key]
        return sorted(again)

    def _start(
        self, key: RolloutKey, opened: Opening, seat: Seat | None, *, past: Past | None, known: ScoredTrajectory | None
    ) -> None:
        playing = self.table.play(self.task, key, opened, seat, past=past, known=known, forked_anew=partial(self._forking, key))
        self._playing[key] = asyncio.ensure_future(playing)

    async def _forking(self, key: RolloutKey) -> Forking:
        await self.start_over(key)
        return _Forking(self, key)

    def _give_up(self, key: RolloutKey) -> set[asyncio.Task[None]]:
        """Returns what is still to be waited for, if anything."""
        logger.debug("branch %s is given up: another comes before it, or its parent begins anew", key)
        self._outcomes.pop(key, None)
        self._anew.pop(key, None)
        if (spending := self._spending.pop(key, None)) is not None:
            self.table.observer.displaced(key, spending.so_far)
        playing = self._playing.pop(key, None)
        if playing is None:
            return set()
        clearing = asyncio.ensure_future(_clear(playing, *self._forked.pop(key, (None, None))))
        self._given_up.add(clearing)
        return {clearing}

    def _take_over(self, scored: ScoredTrajectory) -> None:
        """Put a finished rollout into the tree, and the branches that it asked for: those that finished, the others anew."""
        trajectory = scored.trajectory
        self._outcomes[trajectory.key] = scored
        completions = [turn.completion for turn in trajectory.turns]
        for at in forks_at(trajectory):
            past = Past(prompt_ids=trajectory.prompt_ids, turns=trajectory.turns[:at], parent=trajectory.key)
            verdict = self.branching.verdict(completions[: at + 1], seed=self.table.seed_of(trajectory.key))
            for path in verdict.paths:
                key = self.claim(Claim(at=at, parent=trajectory.key, path=path))
                if key is None:
                    continue
                if (branch := self._finished(key, past)) is not None:
                    self._take_over(branch)
                else:
                    self._anew[key] = past

    def _finished(self, key: RolloutKey, past: Past) -> ScoredTrajectory | None:
        """What became of the branch `key` before the run was interrupted, if it grows out of `past`."""
        scored = self.table.finished.get(key)
        return None if scored is None or _shared(scored.trajectory) != past.ids else scored

    def _begin_anew(self) -> None:
        """Once all claims of finished rollouts are known, so that none is begun that another displaces."""
        anew, self._anew = self._anew, {}
        for key, past in anew.items():
            self._playing[key] = asyncio.ensure_future(self._play_anew(key, past))

    async def _play_anew(self, key: RolloutKey, past: Past) -> Outcome:
        opened = await self.table.open(self.task, key, past)
        if isinstance(opened, Opened):
            environment = _ForkedEnvironment(past, is_cached=False)
            await environment.come(opened.environment)
            opened.environment, self._spending[key] = environment, environment.spending
        return await self.table.play(self.task, key, opened, None, past=past, forked_anew=partial(self._forking, key))


class _Forking:
    """Implements `Forking` for one try of one rollout."""

    def __init__(self, tree: Tree, key: RolloutKey) -> None:
        self._tree, self._key = tree, key
        self._due: dict[RolloutKey, _ForkedEnvironment] = {}  # whose environment is to be forked now
        self._on_our_engine: list[_ForkedEnvironment] = []

    def sampled(self, seat: Seat, past: Past, completion: Completion) -> None:
        tree, table = self._tree, self._tree.table
        completions = [*(turn.completion for turn in past.turns), completion]
        verdict = tree.branching.verdict(completions, seed=table.seed_of(self._key))
        shared = Past(prompt_ids=past.prompt_ids, turns=past.turns, parent=self._key)
        for path in verdict.paths:
            key = tree.claim(Claim(at=len(past.turns), parent=self._key, path=path))
            if key is None or tree.take_over(key, shared):
                continue
            forked = seat.branch(key, max_tokens=table.player.sampling.max_tokens - past.num_response_tokens)
            environment = self._due[key] = _ForkedEnvironment(shared, is_cached=forked is not None)
            if forked is not None:
                self._on_our_engine.append(environment)
            tree.begin(key, environment, shared, forked)

    async def split(self, environment: Environment) -> None:
        due, self._due = self._due, {}
        for key, coming in due.items():
            if coming.is_closed:
                continue
            try:
                forked = await fork(environment, seed=self._tree.table.seed_of(key))
            except MachineError as error:  # the branch's trouble; its parent has what it needs
                coming.fail(error)
            else:
                await coming.come(forked)

    async def part(self) -> None:
        """A branch has copied what it needs once it got its first completion. It waits for nobody meanwhile."""
        for each in self._on_our_engine:
            await each.needed.wait()


class _Spending:
    """Counts what a branch takes by itself."""

    def __init__(self, past: Past, *, is_cached: bool) -> None:
        """
        Args:
            is_cached: it finds `past` in its parent's KV memory, all but the last id, which is fed.
        """
        self._num_context = len(past.ids)
        self._num_cached = self._num_context - 1 if is_cached else 0
        self._generated = self._prefilled = 0
        self._is_sampling = True

    def sampled(self, completion: Completion) -> None:
        self._prefilled += self._num_context - completion.cached_tokens
        self._generated += len(completion.ids)
        self._num_context += len(completion.ids)
        self._num_cached = self._num_context - 1
        self._is_sampling = False

    def observed(self, observation: Observation) -> None:
        self._num_context += len(observation.ids)
        self._is_sampling = observation.stop_reason is None

    def ended(self) -> None:
        self._is_sampling = False

    @property
    def so_far(self) -> Spent:
        under_way = self._num_context - self._num_cached if self._is_sampling else 0
        return Spent(
            generated_tokens=self._generated, prefilled_tokens=self._prefilled + under_way, is_sampling=self._is_sampling
        )


class _ForkedEnvironment:
    """The environment of a branch, which samples its first completion while the parent still has to fork it."""

    def __init__(self, past: Past, *, is_cached: bool) -> None:
        self.spending = _Spending(past, is_cached=is_cached)
        self.needed = asyncio.Event()  # for the first time, or never again
        self.is_closed = False
        self._coming: asyncio.Future[Environment] = asyncio.get_running_loop().create_future()

    async def come(self, environment: Environment) -> None:
        if self._is_unwanted:
            await environment.close()
        else:
            self._coming.set_result(environment)

    def fail(self, error: MachineError) -> None:
        if not self._is_unwanted:
            self._coming.set_exception(error)

    @property
    def _is_unwanted(self) -> bool:
        """The branch was closed, or it was cancelled while it waited."""
        return self.is_closed or self._coming.cancelled()

    async def start(self) -> Observation:
        return await (await self._coming).start()

    async def step(self, completion: Completion, *, num_tokens_left: int) -> Observation:
        self.needed.set()
        self.spending.sampled(completion)
        observation = await (await self._coming).step(completion, num_tokens_left=num_tokens_left)
        self.spending.observed(observation)
        return observation

    async def fork(self, *, seed: int) -> Environment:
        return await fork(await self._coming, seed=seed)

    async def close(self) -> None:
        self.needed.set()
        self.spending.ended()
        self.is_closed = True
        if self._coming.done() and not self._coming.cancelled() and self._coming.exception() is None:
            await self._coming.result().close()
        self._coming.cancel()


async def _clear(playing: asyncio.Task[Outcome], opened: Opened | None, seat: Seat | None) -> None:
    """End a branch, and give back what it was given: it may not have taken that up yet."""
    await end([playing])
    if seat is not None:
        seat.leave()
    if opened is not None:
        await opened.close()


def _shared(trajectory: Trajectory) -> tuple[int, ...]:
    """Prompt and response up to where it forked."""
    return tuple(trajectory.ids[: len(trajectory.prompt_ids) + trajectory.forked_at])
