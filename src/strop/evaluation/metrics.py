"""Metrics of a set of scored rollouts, the same for training steps and for evaluations.

Rates are summed errors over summed calls, never averages of averages.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.rewards.base import ACCURACY, Reward
from strop.types import Group, RolloutKey, ScoredTrajectory


@dataclass(frozen=True, slots=True)
class Verdict:
    """Parts that say what is right. The first of them that a rollout has decides."""

    parts: Mapping[str, float]
    """By name, the value above which an answer is right."""

    def __call__(self, scored: ScoredTrajectory) -> bool | None:
        """Whether that part is above its value; None if the rollout has no such part."""
        values = scored.reward_parts
        return next((values[name] > bound for name, bound in self.parts.items() if name in values), None)


USUAL = Verdict({ACCURACY: 0.0})
"""For an unknown reward."""


def verdict_of(reward: Reward) -> Verdict:
    """The parts of `reward` that say what is right.

    In a sum it is the part called `accuracy`, of any kind; for tasks without it the first part that compares an answer (math,
    code, r1_zero, question_only, arpo) or a user's own function with `right_above`.
    """
    return Verdict({part: reward.right_above(part) for part in reward.verifying_parts})


def require_verdict(reward: Reward, why: str) -> None:
    """Raise `ValueError`, which begins with `why`, if nothing in `reward` says what is right."""
    if not verdict_of(reward).parts:
        raise ValueError(
            f"{why}, but no part of reward says what is right. Give it one that does: math, code, r1_zero, question_only, arpo,"
            " a part called accuracy, or a function with right_above."
        )


FORM = "format"
"""The name of the part of a reward that says whether a response is well formed, in recipes that have one."""


class ResponseKind(StrEnum):
    """The three kinds of CS336 assignment 5, section 3.2; without a part called `format` a response is right or wrong."""

    RIGHT = "right"
    WRONG = "wrong"
    WELL_FORMED = "well formed but wrong"
    UNFORMED = "not well formed"


def kind_of(scored: ScoredTrajectory, *, is_right: bool) -> ResponseKind:
    if is_right:
        return ResponseKind.RIGHT
    if FORM not in scored.reward_parts:
        return ResponseKind.WRONG
    return ResponseKind.WELL_FORMED if scored.reward_parts[FORM] > 0 else ResponseKind.UNFORMED


DURATIONS = "time/tool_calls/"
"""Prefix of the metrics of a tool's histogram of durations."""

_BOUNDS_S = ("0", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30", "100", "300", "1000")
BUCKETS = (*(f"{low}-{high}s" for low, high in itertools.pairwise(_BOUNDS_S)), f"over-{_BOUNDS_S[-1]}s")
"""Buckets of durations, in ascending order; each includes its upper bound."""

_UPPER_S = tuple(map(float, _BOUNDS_S[1:]))


REFLECTION = re.compile(  # rStar2-Agent (arXiv 2508.20722), section 5.4 and its two traces, and their kin, with inflected forms
    r"(?<![\w-])(?:(?:double|cross)?-?check(?:s|ed|ing)?|(?:re-?|cross-?)?verif(?:y|ies|ied|ying)|(?:re-?)?validat(?:e|es|ed|ing)"
    r"|confirm(?:s|ed|ing)?|re-?(?:run|runs|running|execute|executes|executing)"
    r"|re-?(?:evaluate|evaluates|evaluating|consider|examine|calculate|compute|think)|(?:try|tries|trying) again"
    r"|debug(?:s|ged|ging)?|fix(?:es|ed|ing)?|correct(?:ed|ing|ly)?|errors?|mistakes?|wrong|inconsisten(?:t|cy|cies)"
    r"|but|however|wait|actually|alternatively|instead|perhaps|maybe)(?![\w-])",
    re.IGNORECASE,
)
"""English words that signal reflection. The list is ours: the paper gives only examples."""
_NUM_READ = 1024  # rollouts of a step whose texts are searched for such words, at 8 MB a second


def tool_error_rate(trajectories: Sequence[ScoredTrajectory]) -> float:
    """Return the share of calls that failed by the policy's fault. There must be at least one call."""
    return sum(scored.trajectory.num_errors for scored in trajectories) / _num_calls(trajectories)


def rollout_metrics(groups: Sequence[Group], verdict: Verdict = USUAL) -> dict[str, float]:
    """Return the metrics `rollout/*` and `groups/*` over all rollouts of a batch, before any selection.

    Metrics without a value are absent: the tool-error rate without a call, the length of correct rollouts without one, the
    accuracy if `verdict` judges no rollout. Whether a group is all right or all wrong depends only on the verdicts.
    """
    scored = [each for group in groups for each in group.trajectories]
    num_void = sum(group.num_void for group in groups)
    verdicts = [{verdict(each) for each in group.trajectories} for group in groups]
    metrics: dict[str, float] = {
        "rollout/void_fraction": num_void / max(1, num_void + len(scored)),
        "groups/all_right": float(verdicts.count({True})),
        "groups/all_wrong": float(verdicts.count({False})),
    }
    if not scored:
        return metrics  # void rollouts never enter a mean as 0
    num = len(scored)
    correct = [each for each in scored if verdict(each)]
    wrong = [each for each in scored if verdict(each) is False]
    metrics |= {
        "rollout/reward_mean": sum(each.reward for each in scored) / num,
        **({"rollout/accuracy": len(correct) / (len(correct) + len(wrong))} if correct or wrong else {}),
        "rollout/tool_calls_mean": _num_calls(scored) / num,
        "rollout/length_tokens_mean": sum(each.trajectory.num_response_tokens for each in scored) / num,
        "rollout/turns_mean": sum(len(each.trajectory.turns) for each in scored) / num,
        "rollout/truncated_fraction": sum(each.trajectory.is_truncated for each in scored) / num,
        "rollout/reflection_words_per_1000_tokens": 1000 * _reflection_rate(scored[:_NUM_READ]),
    }
    for name, of in (("rollout/length_tokens_mean_correct", correct), ("rollout/length_tokens_mean_wrong", wrong)):
        if of:
            metrics[name] = sum(each.trajectory.num_response_tokens for each in of) / len(of)
    for name, of in (("rollout/tool_error_rate", scored), ("rollout/tool_error_rate_correct", correct)):
        if _num_calls(of):
            metrics[name] = tool_error_rate(of)
    for part in sorted({name for each in scored for name in each.reward_parts}):
        of_part = [each.reward_parts[part] for each in scored if part in each.reward_parts]
        metrics[f"reward/{part}_mean"] = sum(of_part) / len(of_part)
    return metrics


def tool_call_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the number of dispatched calls and their latencies: rStar2-Agent (arXiv 2508.20722), Figure 6.

    Latencies are under `time/`, as every metric that a second run does not repeat, and absent without a dispatched call.
    Percentiles are by nearest rank. Each tool has a histogram with logarithmic buckets: `time/tool_calls/<tool>/<from>-<to>s`
    counts its calls; empty buckets are absent.
    """
    calls = [call for group in groups for scored in group.trajectories for call in scored.trajectory.calls]
    dispatched = [call for call in calls if call.outcome.is_dispatched]
    latencies = sorted(call.duration_s for call in dispatched)
    metrics = {"rollout/tool_calls_dispatched": float(len(latencies))}
    if latencies:
        metrics |= {
            "time/tool_latency_mean_s": math.fsum(latencies) / len(latencies),
            "time/tool_latency_p50_s": _percentile(latencies, 50),
            "time/tool_latency_p95_s": _percentile(latencies, 95),
        }
    histogram = Counter((call.name, bisect_left(_UPPER_S, call.duration_s)) for call in dispatched)
    return metrics | {f"{DURATIONS}{tool}/{BUCKETS[place]}": float(num) for (tool, place), num in sorted(histogram.items())}


def entropy_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean entropy, in nats, of the distributions that the tokens were sampled from, without forced tokens.

    It is absent unless the engine reports the entropy of every token.
    """
    turns = [turn.completion for group in groups for each in group.trajectories for turn in each.trajectory.turns]
    if any(len(each.entropies) != len(each.ids) for each in turns):
        return {}
    sampled = [nats for each in turns for nats, forced in zip(each.entropies, each.is_forced, strict=True) if not forced]
    return {"rollout/entropy_nats": math.fsum(sampled) / len(sampled)} if sampled else {}


def num_sampled_tokens(groups: Sequence[Group], *, but: Container[RolloutKey] = ()) -> int:
    """Return the number of tokens that the policy sampled, without prompts, observations and the rollouts `but`."""
    trajectories = (scored.trajectory for group in groups for scored in group.trajectories)
    return sum(len(turn.completion.ids) for each in trajectories if each.key not in but for turn in each.turns)


def _reflection_rate(trajectories: Sequence[ScoredTrajectory]) -> float:
    """Words of `REFLECTION` per sampled token."""
    turns = [turn for scored in trajectories for turn in scored.trajectory.turns]
    num_words = sum(len(REFLECTION.findall(turn.completion_text)) for turn in turns)
    return num_words / max(1, sum(len(turn.completion.ids) for turn in turns))


def _num_calls(trajectories: Sequence[ScoredTrajectory]) -> int:
    return sum(call.outcome.is_counted for scored in trajectories for call in scored.trajectory.calls)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest of `ordered` that at least `percent` % of them do not exceed."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
