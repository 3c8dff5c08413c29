"""Where a rollout forks, and which forks a task can afford: ARPO's entropy-based adaptive rollout.

ARPO (arXiv 2507.19849), section on entropy-based adaptive rollout: of the M rollouts of a task, N begin at the prompt. A
rollout branches where a tool's result leaves it less certain than it was at its start; M - N rollouts are kept for that, and
those that remain begin at the prompt. AEPO (arXiv 2510.14545) finds N task by task, and damps branches that follow one another.
Everything here is a pure function of what was sampled and of the seeds of rollouts, so
the tree of a task is the same in every run, whichever rollout is faster.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Self

from pydantic import Field, model_validator

from strop.config import Config
from strop.engine.protocol import Entropies
from strop.errors import UserError
from strop.rollout.player import rollout_seed
from strop.types import Group, RolloutKey, Trajectory, derive_seed

_SMALL_SHIFT = 0.01  # a |βΔH| below which only the coin decides


class Scale(StrEnum):
    """How the entropies of the first k tokens are summed up. β belongs to one scale: with another one βΔH may vanish."""

    SUM = "sum"  # sum / log V of the whole distribution's
    PAPER = "paper"  # sum / V
    MEAN = "mean"  # mean / log V, in [0, 1]; the same as SUM if β is k times as large
    TOP10 = "top10"  # sum / log V of -p log p over the ten likeliest tokens only: what the released code computes


class Rule(StrEnum):
    """How a probability becomes branches."""

    COIN = "coin"  # the released code: each of the Z paths tosses a coin of its own
    THRESHOLD = "threshold"  # the paper: all Z paths if the probability exceeds τ


class ProbedAt(StrEnum):
    """Which completion's first k tokens measure how uncertain an observation made the policy."""

    AFTER_OBSERVATION = "after_observation"  # the completion after the observation: the paper
    SEGMENT_BEFORE_CALL = "segment_before_call"  # the completion that called the tool: the released code


class BranchingConfig(Config):
    """Parameters of ARPO and AEPO. The stage sets M, the number of rollouts of a task."""

    initial_rollouts: int = Field(
        ge=1, le=10**6, description="N: rollouts of a task that begin at the prompt; 8 of 16 in the published runs."
    )
    beam_size: int = Field(
        default=2, ge=2, le=1000, description="1 + Z: the rollout itself, and at most Z branches at one observation."
    )
    probe_tokens: int = Field(default=20, ge=1, le=10**6, description="k: tokens whose entropy is measured.")
    base_probability: float = Field(default=0.5, ge=0, le=1, description="α: probability of a branch if entropy is unchanged.")
    entropy_weight: float = Field(default=0.2, ge=0, le=10**6, description="β: weight of the change of entropy, for `scale`.")
    scale: Scale = Field(default=Scale.SUM, description="How the entropies of the first k tokens are summed up.")
    rule: Rule = Field(default=Rule.COIN, description="How a probability becomes branches.")
    threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description='τ of `rule = "threshold"`; not set: α, so that a rollout branches where its entropy rose.',
    )
    probe: ProbedAt = Field(default=ProbedAt.AFTER_OBSERVATION, description="Which completion's entropy is measured.")
    spread_budget: bool = Field(
        default=False,
        description="Give each rollout from the prompt the same share of the branches, and each of its observations one before"
        " any has two. Default: earliest observations first.",
    )
    replace_identical: bool = Field(
        default=False, description="Replace rollouts whose tokens are those of another one of the tree, once, from the prompt."
    )
    # AEPO's released code: 0.05 and 0.5
    branch_penalty: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="AEPO: by how much of itself the probability falls for each observation in a row, just before, at which the"
        " rollout branched.",
    )
    monitoring_weight: float | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="AEPO: β of the budget. The first rollout of a task is played ahead, and N is M σ(β (its entropy at the"
        " start − its mean entropy after observations)), rounded down, plus 1. Not set: N is `initial_rollouts`.",
    )

    @property
    def entropies(self) -> Entropies:
        """What completions have to report."""
        return Entropies.TOP10 if self.scale is Scale.TOP10 else Entropies.FULL

    @model_validator(mode="after")
    def _check_threshold(self) -> Self:
        if self.threshold is not None and self.rule is not Rule.THRESHOLD:
            raise ValueError(f'threshold is {self.threshold}, but rule is "coin", which has none. Set rule = "threshold".')
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision at one observation of one rollout."""

    delta_h: float  # ΔH, on the configured scale
    weighted: float  # βΔH
    probability: float  # α + βΔH, within [0, 1], times AEPO's penalty
    paths: tuple[int, ...]  # which of the branches 1 .. Z are wanted; the budget may refuse them


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """The rule for one stage and one vocabulary."""

    config: BranchingConfig
    vocab_size: int

    @property
    def num_awaited(self) -> int:
        """Tokens after an observation that are sampled before `verdict` can decide whether to fork there."""
        return self.config.probe_tokens if self.config.probe is ProbedAt.AFTER_OBSERVATION else 0

    def num_first(self, trajectories: Iterable[Trajectory], num_rollouts: int) -> int:
        """Return N, how many of `num_rollouts` rollouts of a task begin at the prompt.

        AEPO (arXiv 2510.14545), entropy pre-monitoring: m = k σ(β (H_root - mean H_tool)), each H over the first tokens of a
        completion; rounding is its released code's. That also counts the first completion as one of a tool's, and throws the
        rollout away that it measures. Where nothing is observed σ is 1/2.

        Args:
            trajectories: the task's, the first one from the prompt among them; without it N is `initial_rollouts`.
        """
        weight = self.config.monitoring_weight
        first = next((each for each in trajectories if (each.key.attempt, each.key.branch) == (0, 0)), None)
        if weight is None or first is None:
            return min(num_rollouts, self.config.initial_rollouts)
        root, *after = (self._entropy(turn.completion.entropies) for turn in first.turns)
        gap = root - math.fsum(after) / len(after) if after else 0.0
        share = (1 + math.tanh(weight * gap / 2)) / 2  # σ, which exp would overflow in
        return min(num_rollouts, int(num_rollouts * share) + 1)

    def decision(self, key: RolloutKey, entropies: Sequence[Sequence[float]], seed_of: Callable[[RolloutKey], int]) -> Verdict:
        """Return the `verdict` of rollout `key` at its newest observation, with what it decided at those before.

        Args:
            entropies: as of `verdict`.
            seed_of: the seed of a rollout.
        """
        if self.config.branch_penalty == 0:
            return self.verdict(entropies, seed=seed_of(key))
        descent, num_in_a_row = self.descent(key), 0
        for at in range(1, len(entropies)):
            decides = next((claim.parent for claim in descent if claim.at >= at), key)
            verdict = self.verdict(entropies[: at + 1], seed=seed_of(decides), num_in_a_row=num_in_a_row)
            num_in_a_row = num_in_a_row + 1 if verdict.paths else 0
        return verdict

    def verdict(self, entropies: Sequence[Sequence[float]], *, seed: int, num_in_a_row: int = 0) -> Verdict:
        """Decide whether to fork at the newest observation, which lies between the last two completions.

        AEPO (arXiv 2510.14545), entropy-balanced adaptive rollout: P = (α + βΔH) (1 - penalty(l)), where penalty(l) is l times
        `branch_penalty`, at most 1, as in its released code, which counts l over all rollouts of a task. With 0 it is ARPO.

        Args:
            entropies: of the tokens of each completion of the rollout so far, shared ones included; at least two. The first
                completion measures how certain the rollout was at its start, and its branches too, because they share it. Of
                the last one, `num_awaited` tokens are enough.
            seed: of the rollout.
            num_in_a_row: l, the observations just before this one at which the rollout wanted branches, granted or not.

        Raises:
            UserError: the engine reports no entropies.
        """
        config, at = self.config, len(entropies) - 1
        probed = entropies[at] if config.probe is ProbedAt.AFTER_OBSERVATION else entropies[at - 1]
        delta_h = self._entropy(probed) - self._entropy(entropies[0])
        weighted = config.entropy_weight * delta_h
        probability = min(1.0, max(0.0, config.base_probability + weighted)) * max(
            0.0, 1 - config.branch_penalty * num_in_a_row
        )
        paths = self._wanted(probability, seed=seed, at=at)
        return Verdict(delta_h=delta_h, weighted=weighted, probability=probability, paths=paths)

    def key_of(self, claim: Claim) -> RolloutKey:
        """Return the key of a branch. Its number in base 1 + Z has one digit for each observation, the first one last.

        A digit is 0 where the rollout continued, and z where it is the z-th branch. So every branch has its own number.
        """
        return replace(claim.parent, branch=claim.parent.branch + claim.path * self.config.beam_size ** (claim.at - 1))

    def descent(self, key: RolloutKey) -> list[Claim]:
        """Return the claims that led to a branch, the oldest first; empty for a rollout from the prompt."""
        claims, parent, rest, at = [], replace(key, branch=0), key.branch, 0
        while rest:
            rest, path = divmod(rest, self.config.beam_size)
            at += 1
            if path:
                claims.append(Claim(at=at, parent=parent, path=path))
                parent = self.key_of(claims[-1])
        return claims

    def turn_of(self, claim: Claim) -> int:
        """The sum of the paths that lead to a branch: 1 for the first at each observation of a rollout from the prompt."""
        return sum(each.path for each in self.descent(self.key_of(claim)))

    def _wanted(self, probability: float, *, seed: int, at: int) -> tuple[int, ...]:
        config = self.config
        paths = range(1, config.beam_size)
        if config.rule is Rule.COIN:
            return tuple(path for path in paths if derive_seed("branch", seed, at, path) / 2**63 < probability)
        threshold = config.base_probability if config.threshold is None else config.threshold
        return tuple(paths) if probability > threshold else ()

    def _entropy(self, entropies: Sequence[float]) -> float:
        """Of the first k tokens of a completion; of all if there are fewer."""
        if not entropies:
            raise UserError(
                "branching needs the entropy of sampled tokens, but the engine reports none. Use an engine that does, or leave"
                " branching out."
            )
        first = entropies[: self.config.probe_tokens]
        total = math.fsum(first)
        match self.config.scale:
            case Scale.SUM | Scale.TOP10:
                return total / math.log(self.vocab_size)
            case Scale.PAPER:
                return total / self.vocab_size
            case Scale.MEAN:
                return total / (len(first) * math.log(self.vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Claim:
    """A branch that a rollout wants. Claims are ordered by the turns before the fork, then by rollout, then by path."""

    at: int  # turns that the branch shares with its parent
    parent: RolloutKey
    path: int  # 1 .. Z


class Claims:
    """The accepted claims of one task: the first ones in their order, as many as the budget holds.

    Which rollout reaches an observation first is chance. So a claim that is earlier in the order displaces the last one, whose
    branch ends, and a claim that is too late in the order is refused. In the end the tree is that of rollouts in lock-step,
    observation by observation, although no rollout waits for another.

    With `spread_budget` the rollouts from the prompt take turns, and so do the observations of each. This tree too depends on
    no timing: what a rollout keeps is always the beginning of its own order, in which no branch is before its parent.
    """

    def __init__(self, budget: int, branching: Branching | None = None) -> None:
        self._budget = budget
        self._spreads = branching if branching is not None and branching.config.spread_budget else None
        self._accepted: list[Claim] = []

    def add(self, claim: Claim) -> Claim | None:
        """Return the claim that is not accepted from now on: another one, this one, or none."""
        insort(self._accepted, claim)
        if len(self._accepted) <= self._budget:
            return None
        last = self._accepted[-1] if self._spreads is None else self._last_in_turn(self._spreads)
        self._accepted.remove(last)
        return last

    def _last_in_turn(self, branching: Branching) -> Claim:
        """The last one of the rollout from the prompt with most claims, in the order in which its observations take turns."""
        of_root: defaultdict[int, list[Claim]] = defaultdict(list)
        for claim in self._accepted:
            of_root[claim.parent.attempt].append(claim)
        claims = of_root[max(of_root, key=lambda root: (len(of_root[root]), root))]
        return max(claims, key=lambda claim: (branching.turn_of(claim), claim))

    def drop(self, claim: Claim) -> None:
        """The rollout of the claim begins again, and its branches with it."""
        if claim in self._accepted:
            self._accepted.remove(claim)

    @property
    def accepted(self) -> tuple[Claim, ...]:
        return tuple(self._accepted)


def forks_at(trajectory: Trajectory) -> range:
    """Return the observations at which a rollout may have branched, by the number of turns before them.

    These are its own observations after which it continued. A branch's own begin after the one at which it forked.
    """
    num_shared = 0
    num_tokens = 0
    while num_tokens < trajectory.forked_at:
        turn = trajectory.turns[num_shared]
        num_tokens += len(turn.completion.ids) + len(turn.observation_ids)
        num_shared += 1
    return range(num_shared + 1, len(trajectory.turns))


def branch_metrics(groups: Sequence[Group], branching: Branching, *, seed: int, num_rollouts: int) -> dict[str, float]:
    """Return the metrics `branching/*` of a step, computed from what was sampled, so that a resumed step gives the same.

    Metrics of decisions are left out if no rollout had an observation.

    Args:
        seed: of the batch that the groups were played in.
        num_rollouts: M.
    """
    trajectories = [scored.trajectory for group in groups for scored in group.trajectories]
    num_first = {group.task_index: branching.num_first(group.tree, num_rollouts) for group in groups}
    verdicts, num_fresh = [], 0
    for trajectory in trajectories:
        if trajectory.key.attempt >= num_first[trajectory.key.task_index]:  # begins at the prompt to fill a group
            num_fresh += 1
            continue
        entropies = [turn.completion.entropies for turn in trajectory.turns]
        for at in forks_at(trajectory):
            verdicts.append(branching.decision(trajectory.key, entropies[: at + 1], partial(rollout_seed, seed)))
    num_paths = branching.config.beam_size - 1
    num_branches = sum(trajectory.parent is not None for trajectory in trajectories)
    metrics = {
        "branching/branches_per_task": num_branches / max(1, len(groups)),
        "branching/fresh_per_task": num_fresh / max(1, len(groups)),
        "branching/decisions": float(len(verdicts)),
        "branching/tokens_shared": float(sum(trajectory.forked_at for trajectory in trajectories)),
        "branching/duplicates": float(sum(_num_duplicates(group) for group in groups)),
        **_savings(trajectories),
    }
    if not verdicts:
        return metrics
    num = len(verdicts)
    return metrics | {
        "branching/delta_h_mean": math.fsum(each.delta_h for each in verdicts) / num,
        "branching/weighted_delta_h_mean": math.fsum(each.weighted for each in verdicts) / num,
        "branching/weighted_delta_h_abs_max": max(abs(each.weighted) for each in verdicts),
        "branching/probability_mean": math.fsum(each.probability for each in verdicts) / num,
        "branching/wanted_rate": sum(len(each.paths) for each in verdicts) / (num * num_paths),
        "branching/branch_rate": num_branches / (num * num_paths),
    }


def _num_duplicates(group: Group) -> int:
    """How many rollouts of a group say nothing that another one does not say."""
    return len(group.trajectories) - len({tuple(scored.trajectory.ids) for scored in group.trajectories})


def _savings(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of calls and tokens that branches got from their parents, of what the rollouts would cost one by one.

    Of prefilled tokens only observations count: rollouts of a task share its prompt, branched or not.
    """
    shared: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for trajectory in trajectories:
        num_tokens = 0
        for turn in trajectory.turns:
            of_turn = {
                "calls": sum(call.outcome.is_dispatched for call in turn.calls),
                "sampled": len(turn.completion.ids),
                "prefilled": len(turn.observation_ids),
            }
            total.update(of_turn)
            num_tokens += len(turn.completion.ids) + len(turn.observation_ids)
            if num_tokens <= trajectory.forked_at:
                shared.update(of_turn)
    return {f"branching/{name}_saved_fraction": shared[name] / num for name, num in total.items() if num}


def entropy_warning(metrics: dict[str, float], branching: Branching) -> str:
    """Return a warning if entropy changed the probability of no decision; empty if it did, or if there was none."""
    largest = metrics.get("branching/weighted_delta_h_abs_max")
    if largest is None or largest >= _SMALL_SHIFT:
        return ""
    config = branching.config
    return (
        f"entropy does not influence where rollouts branch: |βΔH| is at most {largest:.2g}, so the probability is"
        f" branching.base_probability = {config.base_probability:g} everywhere. With branching.scale = {config.scale.value!r},"
        f" branching.entropy_weight = {config.entropy_weight:g} is too small: use scale = 'top10' or 'sum', or raise it."
    )
