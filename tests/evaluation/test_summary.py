from dataclasses import replace

import pytest

from strop.evaluation.metrics import rollout_metrics, tool_call_metrics
from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)


def group(*rollouts, num_void=0, tool="python"):
    """Rollouts given as turns of (outcome, seconds)."""
    return Group(
        task=Task(id="t", question="?", answer="1", source="by hand"),
        task_index=0,
        trajectories=tuple(scored(turns, attempt, tool) for attempt, turns in enumerate(rollouts)),
        num_void=num_void,
    )


def scored(turns, attempt, tool):
    trajectory = Trajectory(
        key=RolloutKey(task_index=0, attempt=attempt),
        task_id="t",
        prompt_ids=(1,),
        turns=tuple(turn(calls, tool) for calls in turns),
        stop_reason=StopReason.ANSWERED,
    )
    return ScoredTrajectory(trajectory=trajectory, reward=0.0, reward_parts={})


def turn(calls, tool):
    return Turn(
        completion=Completion(
            ids=(2,),
            logprobs=(-0.5,),
            entropies=(0.1,),
            is_forced=(False,),
            spans=((0, 1),),
            finish_reason=FinishReason.STOP,
            cached_tokens=0,
        ),
        calls=tuple(
            ToolCall(name=tool, arguments="{}", outcome=outcome, text="", duration_s=seconds) for outcome, seconds in calls
        ),
        observation_ids=(),
        completion_text="",
        observation_text="",
    )


def test_calls_and_latencies_are_those_of_all_rollouts_together():
    quick, slow = (ToolOutcome.STDOUT, 0.1), (ToolOutcome.TIMEOUT, 4.0)
    one_call, three_calls_in_two_turns = [[quick], []], [[(ToolOutcome.ERROR, 0.2), (ToolOutcome.EMPTY, 0.3)], [slow]]
    assert tool_call_metrics([group(one_call), group(three_calls_in_two_turns, num_void=1)]) == {
        "rollout/tool_calls_dispatched": 4.0,
        "time/tool_latency_mean_s": pytest.approx(1.15),  # 4.6 / 4; the mean of the rollouts' means would be (0.1 + 1.5) / 2
        "time/tool_latency_p50_s": 0.2,  # 2 of 4 take no longer
        "time/tool_latency_p95_s": 4.0,  # 3 of 4 are not yet 95 %
        "time/tool_calls/python/0.03-0.1s": 1.0,  # 0.1 itself is within
        "time/tool_calls/python/0.1-0.3s": 2.0,
        "time/tool_calls/python/3-10s": 1.0,
    }


def test_each_tool_has_a_histogram_of_its_own_and_a_thin_tail_shows_in_it():
    searches = [(ToolOutcome.STDOUT, 0.002)] * 499 + [(ToolOutcome.STDOUT, 120.0)]
    runs = [(ToolOutcome.STDOUT, 0.0), (ToolOutcome.TIMEOUT, 1000.0), (ToolOutcome.ECHO, 1000.5), (ToolOutcome.MALFORMED, 0.0)]
    metrics = tool_call_metrics([group([searches], tool="search"), group([runs])])
    assert histogram_of(metrics) == {
        "search/0.001-0.003s": 499,
        "search/100-300s": 1,  # one of 500: no percentile that is told sees it
        "python/0-0.001s": 1,
        "python/300-1000s": 1,
        "python/over-1000s": 1,
    }


@pytest.mark.parametrize("duration_s", [0.0, 0.001, 0.0011, 0.5, 3.0, 119.9, 7200.0])
def test_a_duration_lies_in_the_bucket_that_its_name_says(duration_s):
    [(name, count)] = histogram_of(tool_call_metrics([group([[(ToolOutcome.STDOUT, duration_s)]])])).items()
    bucket = name.removeprefix("python/").removesuffix("s")
    low, high = (bucket.removeprefix("over-"), "inf") if bucket.startswith("over-") else bucket.split("-")
    assert float(low) < duration_s <= float(high) or duration_s == float(low) == 0
    assert count == 1


def histogram_of(metrics):
    prefix = "time/tool_calls/"
    return {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("num_calls", "median", "p95"),
    [(1, 0.01, 0.01), (2, 0.01, 0.02), (3, 0.02, 0.03), (20, 0.10, 0.19), (21, 0.11, 0.20), (100, 0.50, 0.95)],
)
def test_percentiles_are_latencies_that_some_call_had(num_calls, median, p95):
    calls = [(ToolOutcome.STDOUT, place / 100) for place in range(num_calls, 0, -1)]  # 10 ms, 20 ms, ..., slowest first
    metrics = tool_call_metrics([group([calls])])
    assert (metrics["time/tool_latency_p50_s"], metrics["time/tool_latency_p95_s"]) == (median, p95)


def test_latency_is_that_of_the_calls_which_reached_a_tool():
    unasked = [
        ToolOutcome.MALFORMED,
        ToolOutcome.UNCLOSED,
        ToolOutcome.UNKNOWN_TOOL,
        ToolOutcome.WRONG_ARGUMENTS,
        ToolOutcome.TOO_MANY_CALLS,
        ToolOutcome.NOT_RUN,
    ]
    asked = [outcome for outcome in ToolOutcome if outcome not in unasked]
    metrics = tool_call_metrics([group([[(outcome, 0.0) for outcome in unasked]], [[(outcome, 0.5) for outcome in asked]])])
    assert metrics["rollout/tool_calls_dispatched"] == 7
    assert metrics["time/tool_latency_mean_s"] == metrics["time/tool_latency_p50_s"] == 0.5  # no 0 of a call that never was


@pytest.mark.parametrize("groups", [[], [group()], [group([[]])], [group([[(ToolOutcome.MALFORMED, 0.0)]])]])
def test_without_a_call_there_is_a_zero_of_calls_and_no_latency(groups):
    assert tool_call_metrics(groups) == {"rollout/tool_calls_dispatched": 0.0}


def test_reflection_words_are_counted_per_thousand_sampled_tokens():
    one = group([()], [(), ()])
    texts = iter(["Wait, is that wrong? Let me check.", "The waiter is right.", "However, no."])
    said = [
        replace(
            each,
            trajectory=replace(
                each.trajectory, turns=tuple(replace(turn, completion_text=next(texts)) for turn in each.trajectory.turns)
            ),
        )
        for each in one.trajectories
    ]
    found = rollout_metrics([replace(one, trajectories=tuple(said))])
    assert found["rollout/reflection_words_per_1000_tokens"] == pytest.approx(1000 * 4 / 3)  # wait, wrong, check, however
