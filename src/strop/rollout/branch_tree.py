"""Plays the rollouts of one task that branch, all at once. A completion decides whether the rollout forks before it.

No rollout waits for a decision. The first tokens of a completion decide whether to fork before it, while the rest is sampled;
an engine that cannot tell them earlier tells them at its end. The branch begins where the observation ends, on the parent's
engine and from its KV memory, with a fork of the parent's tools; the completion stays the parent's. A branch for which the
parent's engine has no room is the next to start there, in the memory that its parent leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from strop.errors import MachineError, UserError
from strop.rollout.branching import Branching, Claim, Claims, forks_at
from strop.rollout.environment import Environment, ForkableEnvironment, end
from strop.rollout.player import BatchPlayer, Opened, Past, Result, Spent
from strop.rollout.scheduler.batch import Lease
from strop.types import RolloutKey, ScoredTrajectory, Task, Trajectory

logger = logging.getLogger(__name__)


class Tree:
    """The rollouts of one task and their branches. Single use."""

    def __init__(self, task: Task, batch_player: BatchPlayer, branching: Branching, *, budget: int) -> None:
        """
        Args:
            budget: M - N, the branches that the task may have.
        """
        self.task, self.batch_player, self.branching = task, batch_player, branching
        self.leases: dict[RolloutKey, Lease] = {}  # of the newest try
        self._claims = Claims(budget, branching)
        self._playing: dict[RolloutKey, asyncio.Task[Result]] = {}
        self._results: dict[RolloutKey, Result] = {}
        self._to_begin: dict[RolloutKey, Past] = {}  # branches of finished rollouts that have not begun
        self._forked: dict[RolloutKey, Opened] = {}  # what each branch was given
        self._forkings: dict[RolloutKey, Forking] = {}  # of the newest try
        self._ending: set[asyncio.Task[None]] = set()

    async def play(self, keys: Sequence[RolloutKey]) -> list[Result]:
        """Play the rollouts `keys`, which begin at the prompt, and all their branches. Finished ones are not played again."""
        batch_player = self.batch_player
        for key in keys:
            if key in batch_player.finished:
                self._restore(batch_player.finished[key])
        again = self._played_for_their_branches()
        for key in again:
            self._drop_branches(key)
        fresh = [key for key in keys if key not in batch_player.finished or key in again]
        try:
            for key in fresh:
                self._start(key, known=batch_player.finished.get(key))
            self._begin_restored()
            while self._playing:
                done, _ = await asyncio.wait(self._playing.values(), return_when=asyncio.FIRST_COMPLETED)
                for key in [key for key, task in self._playing.items() if task in done]:
                    self._results[key] = self._playing.pop(key).result()
        finally:
            await end(list(self._playing.values()))
            if self._ending:
                await asyncio.wait(self._ending)
        results = [self._results[key] for key in sorted(self._results)]
        return self._without_identical(results) if self.branching.config.replace_identical else results

    def _without_identical(self, results: Sequence[Result]) -> list[Result]:
        """Leave out what an earlier rollout of the tree says too. One that others branched off stays, for their sake."""
        played = [result.trajectory for result in results if isinstance(result, ScoredTrajectory)]
        earliest = {tuple(trajectory.ids): trajectory.key for trajectory in reversed(played)}
        parents, identical = set[RolloutKey | None](), set[RolloutKey]()
        for trajectory in reversed(played):  # branches before their parents
            if earliest[tuple(trajectory.ids)] == trajectory.key or trajectory.key in parents:
                parents.add(trajectory.parent)
            else:
                identical.add(trajectory.key)
                self.batch_player.observer.replaced(trajectory.key)
        return [
            result for result in results if not isinstance(result, ScoredTrajectory) or result.trajectory.key not in identical
        ]

    def claim(self, claim: Claim) -> RolloutKey | None:
        """Return the key of the branch to play; None if the budget is spent on claims that are earlier in the order."""
        refused = self._claims.add(claim)
        if refused is not None and refused != claim:
            self._end_branch(self.branching.key_of(refused))
        return None if refused == claim else self.branching.key_of(claim)

    def begin(self, key: RolloutKey, opened: Opened, lease: Lease) -> None:
        """Play a branch that was just forked."""
        self.batch_player.started(key)
        self.batch_player.opened.add(opened)
        self._forked[key], self.leases[key] = opened, lease
        self._start(key, past=opened.past, begun=(opened, lease), known=self._finished(key, opened.past))

    def restore(self, key: RolloutKey, past: Past) -> bool:
        """Whether branch `key` finished before the run was interrupted, with the same `past`, and need not be played."""
        scored = self._finished(key, past)
        if scored is None:
            return False
        self._restore(scored)
        if self._to_begin and self.batch_player.is_exact:
            self._drop_branches(key)
            del self._results[key]
            return False
        self._begin_restored()
        return True

    async def start_over(self, parent: RolloutKey) -> None:
        """Remove everything that branched off `parent`."""
        if ending := self._drop_branches(parent):
            await asyncio.wait(ending)

    def _drop_branches(self, parent: RolloutKey) -> set[asyncio.Task[None]]:
        """Return what is still ending."""
        ending: set[asyncio.Task[None]] = set()
        ended = [parent]
        for claim in self._claims.accepted:  # in this order a branch comes after its parent
            if claim.parent in ended:
                ended.append(self.branching.key_of(claim))
                self._claims.drop(claim)
                ending |= self._end_branch(ended[-1])
        return ending

    def _played_for_their_branches(self) -> list[RolloutKey]:
        """Finished rollouts from the prompt with branches that have not begun.

        If rollouts repeat exactly, they are played again, so that the branches find the KV memory and the tools that they would
        have found without the interruption.
        """
        if not self.batch_player.is_exact:
            return []
        again = {self.branching.descent(key)[0].parent for key in self._to_begin}
        for key in again:
            del self._results[key]
        return sorted(again)

    def _start(
        self,
        key: RolloutKey,
        *,
        past: Past | None = None,
        begun: tuple[Opened, Lease] | None = None,
        known: ScoredTrajectory | None = None,
    ) -> None:
        make_forking = partial(self._make_forking, key)
        playing = self.batch_player.play(self.task, key, past=past, begun=begun, known=known, make_forking=make_forking)
        self._playing[key] = asyncio.ensure_future(playing)

    async def _make_forking(self, key: RolloutKey) -> Forking:
        await self.start_over(key)
        forking = self._forkings[key] = Forking(self, key)
        return forking

    def _end_branch(self, key: RolloutKey) -> set[asyncio.Task[None]]:
        """Return what is still ending."""
        logger.debug("branch %s ends: another one is earlier in the order, or its parent begins again", key)
        self._results.pop(key, None)
        self._to_begin.pop(key, None)
        if (forking := self._forkings.pop(key, None)) is not None:
            forking.is_displaced = True
        if (lease := self.leases.pop(key, None)) is not None:
            self.batch_player.observer.displaced(key, _spent(lease))
        playing = self._playing.pop(key, None)
        if playing is None:
            return set()
        ending = asyncio.ensure_future(_clear(playing, self._forked.pop(key, None), lease))
        self._ending.add(ending)
        return {ending}

    def _restore(self, scored: ScoredTrajectory) -> None:
        """Put a finished rollout into the tree, with its finished branches. Its other branches begin later."""
        trajectory = scored.trajectory
        self._results[trajectory.key] = scored
        entropies = [turn.completion.entropies for turn in trajectory.turns]
        for at in forks_at(trajectory):
            past = Past(prompt_ids=trajectory.prompt_ids, turns=trajectory.turns[:at], parent=trajectory.key)
            verdict = self.branching.decision(trajectory.key, entropies[: at + 1], self.batch_player.seed_of)
            for path in verdict.paths:
                key = self.claim(Claim(at=at, parent=trajectory.key, path=path))
                if key is None:
                    continue
                if (branch := self._finished(key, past)) is not None:
                    self._restore(branch)
                else:
                    self._to_begin[key] = past

    def _finished(self, key: RolloutKey, past: Past) -> ScoredTrajectory | None:
        """The result of branch `key` from before the interruption, if it has this `past`."""
        scored = self.batch_player.finished.get(key)
        return None if scored is None or _shared(scored.trajectory) != past.ids else scored

    def _begin_restored(self) -> None:
        """Called when all claims of finished rollouts are known, so that no branch begins that another one displaces."""
        to_begin, self._to_begin = self._to_begin, {}
        for key, past in to_begin.items():
            self._start(key, past=past)


class Forking:
    """Forks one rollout while it is played, in one try. The methods are called in this order, turn by turn."""

    def __init__(self, tree: Tree, key: RolloutKey) -> None:
        self._tree, self._key = tree, key
        self._forks: asyncio.Task[None] | None = None
        self._running: list[Lease] = []
        self.is_displaced = False

    def begin(self, lease: Lease) -> None:
        """The try has its lease."""
        if not self.is_displaced:  # else it is about to be cancelled
            self._tree.leases[self._key] = lease

    def decide(self, lease: Lease, past: Past, entropies: Sequence[float], opened: Opened) -> None:
        """Request branches with `lease` at the end of `past`, and begin to fork the environment of `opened` for them.

        Args:
            past: ends with an observation.
            entropies: of the first tokens that were sampled after it.
        """
        if self.is_displaced:  # and about to be cancelled
            return
        tree, batch_player, due = self._tree, self._tree.batch_player, dict[RolloutKey, Opened]()
        of_turns = [*(turn.completion.entropies for turn in past.turns), entropies]
        verdict = tree.branching.decision(self._key, of_turns, batch_player.seed_of)
        shared = Past(prompt_ids=past.prompt_ids, turns=past.turns, parent=self._key)
        for path in verdict.paths:
            key = tree.claim(Claim(at=len(past.turns), parent=self._key, path=path))
            if key is None or tree.restore(key, shared):
                continue
            forked = lease.branch(key, max_tokens=batch_player.player.sampling.max_tokens - past.num_response_tokens)
            due[key] = Opened(past=shared)
            if forked.run is not None:
                self._running.append(forked)
            tree.begin(key, due[key], forked)
        if due:
            self._forks = asyncio.ensure_future(self._fork(opened, due))

    async def settle(self) -> None:
        """Return when the environment was forked. It is used again, or closed, afterwards."""
        forks, self._forks = self._forks, None
        if forks is not None:
            await forks

    async def part(self) -> None:
        """Return when the branches that run have what they need of the rollout's memory. Called once, at its end."""
        for branch in self._running:
            await branch.is_independent.wait()

    async def _fork(self, opened: Opened, due: dict[RolloutKey, Opened]) -> None:
        environment = await opened.environment
        for key, coming in due.items():
            if coming.is_closed:
                continue
            try:
                forked = await fork(environment, seed=self._tree.batch_player.seed_of(key))
            except MachineError as error:  # a fault of the branch; its parent has what it needs
                coming.fail(error)
            else:
                await coming.come(forked)


def _spent(lease: Lease) -> Spent:
    prefilled_tokens = lease.prefilled_tokens + lease.num_unread
    return Spent(generated_tokens=lease.generated_tokens, prefilled_tokens=prefilled_tokens, is_sampling=lease.num_unread > 0)


async def _clear(playing: asyncio.Task[Result], opened: Opened | None, lease: Lease | None) -> None:
    """End a branch, and close what it was given, which it may not have used yet."""
    await end([playing])
    if lease is not None:
        lease.close()
    if opened is not None:
        await opened.close()


def _shared(trajectory: Trajectory) -> tuple[int, ...]:
    """Prompt and response up to the fork."""
    return tuple(trajectory.ids[: len(trajectory.prompt_ids) + trajectory.forked_at])


async def play_ahead(
    index: int, task: Task, batch_player: BatchPlayer, branching: Branching, num_rollouts: int
) -> tuple[int, BatchPlayer, list[Result]]:
    """Return how many rollouts of a task begin at the prompt; with `monitoring_weight`, the first one is played for that.

    It is among the finished ones of the returned player, as after an interruption, and its branches follow; or it failed, and
    is the third value.
    """
    first, failed = RolloutKey(task_index=index, attempt=0), list[Result]()
    if branching.config.monitoring_weight is not None and first not in batch_player.finished:
        result = await batch_player.play(task, first)
        if isinstance(result, ScoredTrajectory):
            batch_player = replace(batch_player, finished={**batch_player.finished, first: result})
        else:
            failed = [result]
    known = batch_player.finished.get(first)
    return branching.num_first([] if known is None else [known.trajectory], num_rollouts), batch_player, failed


async def reopen(batch_player: BatchPlayer, task: Task, key: RolloutKey, past: Past) -> Environment:
    """Open the environment of a branch without its parent's: repeat the shared turns, and fork as before.

    The tools run again. Nothing is sampled, and the ids stay those of `past`.
    """
    player = batch_player.player
    assert player.branching is not None  # only branches have a past
    descent = player.branching.descent(key)
    environment = player.environments(task, seed=batch_player.seed_of(descent[0].parent))
    try:
        await environment.start()
        done = 0
        for claim, forked in zip(descent, [*(claim.parent for claim in descent[1:]), key], strict=True):
            for turn in past.turns[done : claim.at]:
                await environment.step(turn.completion, num_tokens_left=player.sampling.max_tokens)
            branch = await fork(environment, seed=batch_player.seed_of(forked))
            before, environment, done = environment, branch, claim.at
            await before.close()
    except BaseException:
        await environment.close()
        raise
    return environment


async def fork(environment: Environment, *, seed: int) -> Environment:
    """Fork an environment. Raises `UserError` if it has no `fork`."""
    if not isinstance(environment, ForkableEnvironment):
        raise UserError(
            f"{type(environment).__name__} cannot be forked, but the stage branches. Give it `async def fork(self, *, seed)`"
            " (strop.rollout.environment.ForkableEnvironment), or leave branching out."
        )
    return await environment.fork(seed=seed)
