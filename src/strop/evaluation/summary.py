"""What a set of scored rollouts amounts to: one definition for training steps and for evaluations.

Rates are summed errors over summed calls, never averages of averages.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence

from strop.evaluation.verdict import USUAL, Verdict
from strop.types import Group, RolloutKey, ScoredTrajectory

DURATIONS = "time/tool_calls/"
"""What the names of a tool's histogram of durations begin with."""

_BOUNDS_S = ("0", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30", "100", "300", "1000")
BUCKETS = (*(f"{low}-{high}s" for low, high in itertools.pairwise(_BOUNDS_S)), f"over-{_BOUNDS_S[-1]}s")
"""Of durations, from quick to slow; the upper bound belongs to each."""

_UPPER_S = tuple(map(float, _BOUNDS_S[1:]))


def tool_error_rate(trajectories: Sequence[ScoredTrajectory]) -> float:
    """Calls that went wrong by the agent's own doing, as a share of the calls made. There must be one."""
    return sum(scored.trajectory.num_errors for scored in trajectories) / _num_calls(trajectories)


def rollout_metrics(groups: Sequence[Group], verdict: Verdict = USUAL) -> dict[str, float]:
    """Metrics `rollout/*` and `groups/*` over all rollouts of a batch, before any selection.

    A tool-error rate is left out where there was no call to go wrong: no calls is not the same as no errors. Likewise the
    length of correct rollouts where none is, and of wrong ones. Accuracy is that of the rollouts of which `verdict` says
    whether they are right, and left out where there are none; a group is all right, or all wrong, whatever else is rewarded
    in it.
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
        return metrics  # nothing to take a mean of: what is void never enters one as zero (law 3)
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
    }
    for name, of in (("rollout/length_tokens_mean_correct", correct), ("rollout/length_tokens_mean_wrong", wrong)):
        if of:
            metrics[name] = sum(each.trajectory.num_response_tokens for each in of) / len(of)
    for name, of in (("rollout/tool_error_rate", scored), ("rollout/tool_error_rate_correct", correct)):
        if _num_calls(of):
            metrics[name] = tool_error_rate(of)
    for part in sorted({name for each in scored for name in each.reward_parts}):
        of_part = [each.reward_parts[part] for each in scored if part in each.reward_parts]  # a part may be for some rows alone
        metrics[f"reward/{part}_mean"] = sum(of_part) / len(of_part)
    return metrics


def tool_call_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How many calls reached a tool, and how long each took from dispatch to result: rStar2-Agent (arXiv 2508.20722), Figure 6.

    Latencies stand under `time/`, with all that a clock says and no second run repeats. They are left out where no call was
    dispatched. Percentiles are by nearest rank: a latency that some call had. Of each tool there is a histogram, in buckets
    that grow as logarithms: `time/tool_calls/<tool>/<from>-<to>s` counts its calls, and a bucket without one is left out.
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
    """Mean entropy, in nats, of the distributions that all tokens of a batch were sampled from; forced tokens are not counted.

    Left out where the engine does not tell it for each of them: a mean over some would be of other tokens in every step.
    """
    turns = [turn.completion for group in groups for each in group.trajectories for turn in each.trajectory.turns]
    if any(len(each.entropies) != len(each.ids) for each in turns):
        return {}
    sampled = [entropy for each in turns for entropy, forced in zip(each.entropies, each.is_forced, strict=True) if not forced]
    return {"rollout/entropy_nats": math.fsum(sampled) / len(sampled)} if sampled else {}


def num_sampled_tokens(groups: Sequence[Group], *, but: Container[RolloutKey] = ()) -> int:
    """Tokens that the policy sampled, prompts and observations not counted, nor rollouts `but`."""
    trajectories = (scored.trajectory for group in groups for scored in group.trajectories)
    return sum(len(turn.completion.ids) for each in trajectories if each.key not in but for turn in each.turns)


def _num_calls(trajectories: Sequence[ScoredTrajectory]) -> int:
    return sum(call.outcome.is_counted for scored in trajectories for call in scored.trajectory.calls)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of `ordered` that at least `percent` % of them do not exceed."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
