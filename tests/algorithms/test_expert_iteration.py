"""What expert iteration keeps, and in which batches it is imitated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strop.stages.expert_iteration import epoch_batches, select_right
from strop.types import Completion, FinishReason, Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn


def group(*rollouts, num_void=0):
    """Each rollout as (what it said, turn by turn, reward)."""
    return Group(
        task=Task(id="t", question="?", answer="1", source="by hand"),
        task_index=0,
        trajectories=tuple(scored(turns, reward, attempt) for attempt, (turns, reward) in enumerate(rollouts)),
        num_void=num_void,
    )


def scored(turns, reward, attempt):
    trajectory = Trajectory(
        key=RolloutKey(task_index=0, attempt=attempt),
        task_id="t",
        prompt_ids=(1,),
        turns=tuple(turn(ids) for ids in turns),
        stop_reason=StopReason.ANSWERED,
    )
    return ScoredTrajectory(trajectory=trajectory, reward=reward, reward_parts={})


def turn(ids):
    completion = Completion(
        ids=ids,
        logprobs=(0.0,) * len(ids),
        entropies=(),
        is_forced=(False,) * len(ids),
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    return Turn(completion=completion, calls=(), observation_ids=(9,), completion_text="", observation_text="")


def is_right(scored):
    return scored.reward > 0


def kept(selection):
    return [scored.trajectory.key.attempt for scored in selection.kept]


def test_what_is_right_is_kept_and_what_is_wrong_is_not():
    selection = select_right(group((((5, 6),), 1.0), (((5, 7),), 0.0), (((5, 8),), 1.0)), is_right=is_right)
    assert kept(selection) == [0, 2]
    assert [decision.reason for decision in selection.decisions] == [
        "kept: it is right",
        "dropped: it is wrong",
        "kept: it is right",
    ]


def test_a_group_whose_rollouts_are_all_void_or_wrong_keeps_none():
    assert kept(select_right(group(num_void=4), is_right=is_right)) == []
    assert kept(select_right(group((((5,),), 0.0)), is_right=is_right)) == []


@given(num=st.integers(0, 200), batch_size=st.integers(1, 40), epoch=st.integers(0, 5), seed=st.integers(0, 9))
def test_every_epoch_has_every_row_once_in_batches_of_nearly_one_size(num, batch_size, epoch, seed):
    rows = list(range(num))
    batches = epoch_batches(rows, batch_size=batch_size, epoch=epoch, seed=seed)
    assert sorted(row for batch in batches for row in batch) == rows
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == -(-num // batch_size)
    assert all(0 < size <= batch_size for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_33_rows_in_batches_of_32_are_17_and_16():
    assert [len(batch) for batch in epoch_batches(range(33), batch_size=32, epoch=0, seed=0)] == [17, 16]


def test_the_order_of_an_epoch_hangs_on_seed_and_epoch_alone():
    def order(*, epoch, seed):
        return epoch_batches(range(20), batch_size=20, epoch=epoch, seed=seed)[0]

    assert order(epoch=1, seed=3) == order(epoch=1, seed=3)
    assert order(epoch=1, seed=3) != order(epoch=2, seed=3)
    assert order(epoch=1, seed=3) != order(epoch=1, seed=4)
