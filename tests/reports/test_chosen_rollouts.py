"""Which rollouts a report shows: a few of a few groups, each with its stop reason and the outcomes of its calls."""

import re

import pytest
from pydantic import TypeAdapter

from strop.reports.page import write_report
from strop.run_directory import LineWriter, RunDirectory, write_json
from strop.types import (
    Completion,
    FinishReason,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)

KINDS = (*StopReason, *ToolOutcome)
USUAL = (StopReason.ANSWERED, ToolOutcome.STDOUT)


def rollout(*kinds, task_index=0, attempt=0):
    """One of two turns that ends for the stop reason among `kinds`, and calls for its outcomes in the first."""
    outcomes = [kind for kind in kinds if isinstance(kind, ToolOutcome)]
    calls = tuple(
        ToolCall(
            name="" if outcome is ToolOutcome.MALFORMED else "python",
            arguments='{"code": "print(1)"}',
            outcome=outcome,
            text="1",
            duration_s=0.1,
        )
        for outcome in outcomes
    )
    completion = Completion(
        ids=(1, 2),
        logprobs=(-0.1, -0.2),
        entropies=(0.3, 0.4),
        is_forced=(False, False),
        spans=((0, 2),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    turns = [
        Turn(completion=completion, calls=made, observation_ids=(), completion_text="so", observation_text="")
        for made in (calls, ())
    ]
    trajectory = Trajectory(
        key=RolloutKey(task_index=task_index, attempt=attempt),
        task_id=f"t{task_index}",
        prompt_ids=(1,),
        turns=tuple(turns),
        stop_reason=next((kind for kind in kinds if isinstance(kind, StopReason)), StopReason.ANSWERED),
    )
    return ScoredTrajectory(trajectory=trajectory, reward=0.0, reward_parts={"accuracy": 0.0})


def write_step(run, step, groups):
    """The rollouts of a step and what was decided of them; `groups`: question -> the kinds of each of its rollouts."""
    writer, selected = LineWriter(run.stage("rl").rollouts(step)), []
    for task_index, (question, members) in enumerate(groups.items()):
        task = Task(id=f"t{task_index}", question=question, answer="1", source="by hand")
        played = [rollout(*kinds, task_index=task_index, attempt=attempt) for attempt, kinds in enumerate(members)]
        for scored in played:
            writer.append(
                {"rollout": TypeAdapter(ScoredTrajectory).dump_python(scored, mode="json"), "weights": {"0": "c0ffee"}}
            )
        entries = [
            {
                "key": TypeAdapter(RolloutKey).dump_python(scored.trajectory.key, mode="json"),
                "is_kept": True,
                "reason": "all are",
                "figures": {},
                "advantage": 0.0,
                "reward": scored.reward,
            }
            for scored in played
        ]
        selected.append({"task": TypeAdapter(Task).dump_python(task, mode="json"), "task_index": 0, "rollouts": entries})
    writer.close()
    write_json(run.stage("rl").selection(step), {"groups": selected})


def page_of(path, *steps):
    run = RunDirectory(path)
    write_json(run.manifest, {"format": 1, "name": "rare", "stages": {"rl": {"kind": "rl"}}})
    for step, groups in enumerate(steps, start=1):
        write_step(run, step, groups)
    return write_report(run).read_text(encoding="utf-8")


def shown(page):
    """Of each rollout of the page: its group's question, its name, why it ended and what became of its calls."""
    rows = []
    for group in page.split('<article class="group card">')[1:]:
        question = re.search(r'<p class="question">(.*?)</p>', group)[1]
        for row in group.split('<details class="rollout')[1:]:
            name = re.search(r'<span class="name">(.*?)</span>', row)[1]
            stop_reason = re.search(r'<span class="facts">[^<]* · ([^<·]*)</span>', row)[1]
            marks = re.findall(r'<i class="(\w+)" title="[^"]*: ([^"]*)">', row)
            calls = re.findall(r'<p class="call (\w+)">.*?<span class="outcome">(.*?)</span>', row)
            assert marks == calls  # in the row itself, and in what it opens to
            rows.append((question, name, stop_reason, calls))
    return rows


def in_words(kind):
    return kind.value.replace("_", " ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in USUAL])
def test_a_rollout_is_shown_with_its_stop_reason_and_the_outcomes_of_its_calls(tmp_path, kind):
    [_, (_, name, stop_reason, calls)] = shown(page_of(tmp_path, {"a": [USUAL, (kind,)]}))
    assert name == "attempt 1"
    if isinstance(kind, ToolOutcome):
        assert calls == [("wrong" if kind.is_error else "right", in_words(kind))]
    else:
        assert (stop_reason, calls) == (in_words(kind), [])


def test_a_step_shows_eight_rollouts_of_two_groups(tmp_path):
    page = page_of(tmp_path, {f"usual {number}": [USUAL] * 12 for number in range(3)})
    assert [question for question, *_ in shown(page)] == ["usual 0"] * 8 + ["usual 1"] * 8
    assert "8 shown" in page
