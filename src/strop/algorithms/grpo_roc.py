"""GRPO-RoC, resampling on correct: sample twice the group, keep clean successes and a fair share of the failures.

rStar2-Agent (arXiv 2508.20722) section 2.2.3. It is GRPO with another `select`. Departures: the paper's weight 1/p_total is
infinite for a flawless rollout, so `eps_roc` is added; its halves become floor(n_neg G / N), so that any N >= G is served; and
what "sample with probability" means without replacement is fixed as seeded Gumbel top-k, whose noise belongs to each rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from pydantic import Field

from strop.algorithms.grpo import GroupMethod
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import (
    Decision,
    Selection,
    check_group_size,
    describe_voids,
    drop_all,
    tie_of,
)
from strop.types import Group, RolloutKey, Trajectory, derive_seed

REPETITION_NGRAM = 5  # tokens
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def error_ratio(trajectory: Trajectory) -> float:
    """p_err, rStar2-Agent Eq. 4: the share of tool calls that went wrong; 0.5 without a call, to encourage tool use.

    A call that a limit kept from being run is no call here, for nothing came of it: the one on which the rollout ended, and
    those beyond what a turn may hold, which the authors' released code does not read either.
    """
    outcomes = [call.outcome for call in trajectory.calls if call.outcome.is_counted]
    return sum(outcome.is_error for outcome in outcomes) / len(outcomes) if outcomes else 0.5


def error_ratio_in_text(trajectory: Trajectory) -> float:
    """p_err of the released code: the share of tool responses that hold "error" in any case; 0.5 without a response."""
    responses = [call.text for at, turn in enumerate(trajectory.turns) if trajectory.is_answered(at) for call in turn.calls]
    return sum("error" in text.lower() for text in responses) / len(responses) if responses else 0.5


def format_penalty(trajectory: Trajectory, *, counts_first_turn: bool = True) -> float:
    """p_format, rStar2-Agent Eq. 5: 1 without an answer tag, else min(1, (answers - 1) / turns).

    Tags are counted in what the policy sampled, never in observations or the prompt. Unbalanced tags give 1, as in the
    authors' released code.

    Args:
        counts_first_turn: False divides by the turns after the first, and gives 1 where there are none: the released code,
            which looks for turns in the response, whose first turn begins in the prompt.
    """
    text = "".join(turn.completion_text for turn in trajectory.turns)
    num_answers = text.count(ANSWER_OPEN)
    if num_answers == 0 or num_answers != text.count(ANSWER_CLOSE):
        return 1.0
    num_turns = len(trajectory.turns) - (not counts_first_turn)
    return min(1.0, (num_answers - 1) / num_turns) if num_turns > 0 else 1.0


def repeated_share(trajectory: Trajectory) -> float:
    """p_repeat: 1 - different / all n-grams of the tokens that the policy sampled, none across turns; 0 where there is none.

    rStar2-Agent section 4.3.1 lowers the weight of correct rollouts that repeat themselves, found by n-grams as in
    Phi-4-reasoning, and finds it harmful: two alike tool calls that verify a result look like repetition. It gives no
    formula; this is the share that the n-gram penalties of rewards have.
    """
    grams = [
        turn.completion.ids[start : start + REPETITION_NGRAM]
        for turn in trajectory.turns
        for start in range(len(turn.completion.ids) - REPETITION_NGRAM + 1)
    ]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


class GRPORoC(GroupMethod):
    """Learns from `group_size` rollouts out of `oversample` times as many."""

    class Config(GroupMethod.Config):
        """Keys of `kind = "grpo_roc"`."""

        oversample: float = Field(
            2.0, ge=1, description="Rollouts that are sampled for each that is kept; 1 keeps every rollout."
        )
        # greedy: the released code of rStar2-Agent
        selection: Literal["sampled", "greedy"] = Field(
            "sampled", description="How positives are chosen: drawn by weight, or the lowest p_total first."
        )
        eps_roc: float = Field(1e-2, gt=0, description="A positive has the weight 1 / (p_total + eps_roc).")
        # 0 in the paper, 2 in the released code
        min_positives: int = Field(0, ge=0, description="Least number of positives to keep, if there are as many.")
        min_negatives: int = Field(0, ge=0, description="Least number of negatives to keep, if there are as many.")
        # half_even: the released code
        quota_rounding: Literal["floor", "half_even"] = Field(
            "floor", description="Rounding of the number of negatives to keep."
        )
        # text, later: the released code
        errors: Literal["typed", "text"] = Field(
            "typed", description='What counts as an error in p_err: the outcome of a call, or "error" in its response.'
        )
        turns: Literal["all", "later"] = Field(
            "all", description="Turns that p_format divides by; later: those after the first, and 1 for a single turn."
        )
        # Harmful: section 4.3.1
        repetition_weight: float = Field(0.0, ge=0, description="Weight of repetition in p_total.")
        drop_tied: bool = Field(True, description="Leave out tied groups, before and after selection.")
        # Eq. 6; token_mean in the released code
        aggregation: Aggregation = Field(Aggregation.GROUP_TOKEN_MEAN, description="How token losses are averaged.")

    config: Config

    def num_rollouts(self, group_size: int) -> int:
        """N = G * oversample, to the nearest. Raises `ConfigError` for a group of one."""
        check_group_size(group_size)
        return math.floor(group_size * self.config.oversample + 0.5)

    def choose(self, group: Group, *, group_size: int, seed: int) -> Selection:
        """Draws positives by quality and negatives uniformly, in proportion to their numbers.

        Ties are judged before and after. Of a group with voids, N' rollouts of N are left: G' = floor(G N' / N) are kept,
        and none if that is below 2. N = G keeps all.
        """
        num_rollouts = self.num_rollouts(group_size)
        num_kept = group_size * min(len(group.trajectories), num_rollouts) // num_rollouts  # G'
        candidates = self._draw(group, seed)
        figures = [candidate.figures for candidate in candidates]
        if num_kept < 2:
            return drop_all(group, describe_voids(group, num_rollouts), figures)
        if self.config.drop_tied and (tie := tie_of(group.trajectories, by=self.config.tied_by)):
            return drop_all(group, tie, figures)
        num_positives = sum(candidate.is_positive for candidate in candidates)
        quota = self._positive_quota(num_positives, len(candidates) - num_positives, num_kept)
        decisions = tuple(candidate.decide(quota if candidate.is_positive else num_kept - quota) for candidate in candidates)
        selection = Selection(group=group, decisions=decisions)
        if self.config.drop_tied and (tie := tie_of(selection.kept, by=self.config.tied_by)):
            return drop_all(group, f"after selection a {tie}", figures)
        return selection

    def _positive_quota(self, num_positives: int, num_negatives: int, num_kept: int) -> int:
        """How many positives to keep: what floor(n_neg G' / N') negatives leave, then the minority floors."""
        share = Fraction(num_negatives * num_kept, num_positives + num_negatives)
        quota = num_kept - (math.floor(share) if self.config.quota_rounding == "floor" else round(share))
        least = min(self.config.min_positives, num_positives)
        most = num_kept - min(self.config.min_negatives, num_negatives)
        if least > most:  # too few to serve both floors: stay in proportion
            return quota
        return max(least, min(quota, most))

    def _draw(self, group: Group, seed: int) -> list[_Candidate]:
        """Every rollout with its place in the draw of its side, in the group's order."""
        found: dict[int, _Candidate] = {}
        for side in (True, False):
            rows = [row for row, scored in enumerate(group.trajectories) if (scored.reward > 0) == side]
            trajectories = [group.trajectories[row].trajectory for row in rows]
            penalties = [self._penalties(trajectory) for trajectory in trajectories]
            weights = [1.0 / (self._total(each) + self.config.eps_roc) if side else 1.0 for each in penalties]
            keys = [trajectory.key for trajectory in trajectories]
            order = draw_order(weights, keys, seed, is_greedy=self.config.selection == "greedy")
            for place, drawn in enumerate(order, start=1):
                found[rows[drawn]] = _Candidate(
                    is_positive=side,
                    penalties=penalties[drawn],
                    weight=weights[drawn],
                    place=place,
                    num_drawn_from=len(rows),
                )
        return [found[row] for row in range(len(group.trajectories))]

    def _penalties(self, trajectory: Trajectory) -> dict[str, float]:
        """Of which p_total is made."""
        p_err_of = error_ratio_in_text if self.config.errors == "text" else error_ratio
        found = {"p_repeat": repeated_share(trajectory)} if self.config.repetition_weight else {}
        return found | {
            "p_err": p_err_of(trajectory),
            "p_format": format_penalty(trajectory, counts_first_turn=self.config.turns == "all"),
        }

    def _total(self, penalties: Mapping[str, float]) -> float:
        return penalties["p_err"] + penalties["p_format"] + self.config.repetition_weight * penalties.get("p_repeat", 0.0)


def draw_order(weights: Sequence[float], keys: Sequence[RolloutKey], seed: int, *, is_greedy: bool = False) -> list[int]:
    """Indices in the order in which sampling without replacement, with probability in proportion to weight, draws them.

    Gumbel top-k (Kool et al., arXiv:1903.06059): the order of log weight + Gumbel noise. The noise is a pure function of
    (seed, key), so that neither the order of the rollouts nor the presence of others changes it. Greedy: by weight
    alone, equal weights in the order of the noise.
    """
    noise = [_gumbel(seed, key) for key in keys]
    if is_greedy:
        return sorted(range(len(weights)), key=lambda index: (-weights[index], -noise[index]))
    return sorted(range(len(weights)), key=lambda index: -(math.log(weights[index]) + noise[index]))


def _gumbel(seed: int, key: RolloutKey) -> float:
    bits = derive_seed("grpo_roc", seed, key.task_index, key.attempt, key.branch)
    uniform = ((bits >> 11) + 0.5) / 2.0**52  # 52 bits: in float64 neither 0 nor 1
    return -math.log(-math.log(uniform))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One rollout of a group, and its place (from 1) in the draw among the `num_drawn_from` of its side."""

    is_positive: bool
    penalties: Mapping[str, float]
    weight: float
    place: int
    num_drawn_from: int

    @property
    def figures(self) -> dict[str, float]:
        return {**self.penalties, "weight": self.weight, "draw_order": float(self.place)}

    def decide(self, quota: int) -> Decision:
        """Kept if it was among the first `quota` that were drawn."""
        is_kept = self.place <= quota
        side = "correct" if self.is_positive else "wrong"
        reason = (
            f"{'kept' if is_kept else 'dropped'}: {side}, draw {self.place} of {self.num_drawn_from}"
            f" ({min(quota, self.num_drawn_from)} kept), p_err {self.penalties['p_err']:.2f},"
            f" p_format {self.penalties['p_format']:.2f}"
        )
        return Decision(is_kept=is_kept, reason=reason, figures=self.figures)
