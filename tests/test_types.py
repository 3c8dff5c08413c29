import dataclasses
import json
import pickle
import tracemalloc

import numpy
import pytest
from pydantic import TypeAdapter

from strop.types import (
    Completion,
    FinishReason,
    Floats,
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


def turn(ids, observation_ids=(), *, is_forced=None, calls=()):
    completion = Completion(
        ids=tuple(ids),
        logprobs=tuple(-float(token) for token in ids),
        entropies=(),
        is_forced=tuple(is_forced or [False] * len(ids)),
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    return Turn(
        completion=completion,
        calls=tuple(calls),
        observation_ids=tuple(observation_ids),
        completion_text="",
        observation_text="",
    )


def trajectory(*turns, stop_reason=StopReason.ANSWERED):
    key = RolloutKey(task_index=0, attempt=0)
    return Trajectory(key=key, task_id="t", prompt_ids=(1, 2), turns=turns, stop_reason=stop_reason)


def call(outcome):
    return ToolCall(name="python", arguments="{}", outcome=outcome, text="", duration_s=0.0)


def test_the_ids_of_a_trajectory_are_prompt_completions_and_observations_as_they_arose():
    played = trajectory(turn([3, 4], [5]), turn([6]))
    assert played.ids == [1, 2, 3, 4, 5, 6]
    assert played.num_response_tokens == 4


def test_the_mask_is_on_what_was_sampled_and_off_on_prompt_observation_and_forced_tokens():
    played = trajectory(turn([3, 4], [5], is_forced=[True, False]), turn([6]))
    assert played.loss_mask == [False, False, False, True, False, True]
    assert played.sampled_logprobs == [0, 0, -3, -4, 0, -6]


@pytest.mark.parametrize(
    ("outcome", "is_error"),
    [(outcome, outcome not in ("stdout", "echo", "empty", "too_many_calls", "not_run")) for outcome in ToolOutcome],
)
def test_an_error_is_the_agents_mistake_and_decided_by_its_outcome(outcome, is_error):
    assert outcome.is_error == is_error
    assert trajectory(turn([3], calls=[call(outcome), call(ToolOutcome.STDOUT)])).num_errors == is_error


def test_a_call_that_a_limit_kept_from_being_run_is_none():
    assert [outcome for outcome in ToolOutcome if not outcome.is_counted] == ["too_many_calls", "not_run"]


@pytest.mark.parametrize("stop_reason", StopReason)
def test_only_a_budget_of_tokens_truncates(stop_reason):
    assert trajectory(turn([3]), stop_reason=stop_reason).is_truncated == (stop_reason in ("length", "overflow"))


@pytest.mark.parametrize(("rewards", "is_tied"), [([], True), ([1.0], True), ([1.0, 1.0], True), ([1.0, 0.0], False)])
def test_a_group_is_tied_when_there_is_nothing_to_compare(rewards, is_tied):
    scored = tuple(ScoredTrajectory(trajectory=trajectory(), reward=reward, reward_parts={}) for reward in rewards)
    task = Task(id="t", question="?", answer="!", source="test")
    assert Group(task=task, task_index=0, trajectories=scored).is_tied == is_tied


def test_the_canonical_order_of_rollouts_is_task_attempt_branch():
    keys = [RolloutKey(task_index=t, attempt=a, branch=b) for t in (0, 1) for a in (0, 1) for b in (0, 1)]
    assert sorted([*keys[4:], *keys[:4]]) == keys


def test_nouns_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory().task_id = "another"


def test_log_probs_and_entropies_are_equal_to_tuples_and_never_change():
    whole = dataclasses.replace(turn([5, 6, 7]).completion, entropies=[0.1, 0.2, 0.3])
    assert whole.logprobs == (-5.0, -6.0, -7.0)
    assert (*whole.logprobs[1:], whole.entropies[0]) == (-6.0, -7.0, 0.1)
    assert isinstance(whole.logprobs[:2], Floats)
    assert hash(whole) == hash(dataclasses.replace(whole, entropies=(0.1, 0.2, 0.3)))
    assert whole.logprobs != whole.entropies
    assert pickle.loads(pickle.dumps(whole)) == whole
    adapter = TypeAdapter(Completion)
    read = adapter.validate_json(adapter.dump_json(whole))
    assert read == whole
    assert isinstance(read.entropies, Floats)
    with pytest.raises(TypeError):
        whole.logprobs[0] = 0.0


def test_what_is_no_id_is_kept_as_it_is_and_changes_no_other():
    other = dataclasses.replace(turn([77_777, 1]).completion, ids=(numpy.int64(77_777), True))
    assert [type(each) for each in other.ids] == [numpy.int64, bool]
    assert [type(each) for each in turn([77_777, 1]).completion.ids] == [int, int]


def test_a_token_of_a_long_completion_takes_at_most_40_bytes():
    """As a tuple of new objects each id takes 36, each log-prob and entropy 32, and each flag 8."""
    num, ids = 10_000, [1000 + place % 500 for place in range(10_000)]
    tracemalloc.start()
    completion = Completion(
        ids=tuple(json.loads(json.dumps(ids))),
        logprobs=[-float(place) for place in range(num)],
        entropies=[float(place) for place in range(num)],
        is_forced=(False,) * num,
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(completion.ids) == num
    assert taken < 40 * num + 50_000 + 36 * 500  # the ids that no other completion had
