"""Branch trees made by hand: the rollout `n` has the tokens 10n, 10n + 1, ... of its own, and its parent's before its fork."""

from strop.types import Completion, FinishReason, Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn

PROMPT = (1, 2)


def grow(sizes, parents=(), keys=None):
    """One trajectory for each size (own tokens); `parents` maps a row to (row of its parent, where it forks)."""
    parents, rows = dict(parents), []
    for row, size in enumerate(sizes):
        parent, fork = parents.get(row, (None, 0))
        inherited = rows[parent].ids[len(PROMPT) : len(PROMPT) + fork] if parent is not None else []
        rows.append(_trajectory(row, [*inherited, *(10 * row + 3 + n for n in range(size))], parent, fork))
    return rows


def group_of(trajectories, rewards, excluded=()):
    scored = zip(trajectories, rewards, strict=True)
    return Group(
        task=Task(id="t", question="?", answer="1", source="by hand"),
        task_index=0,
        trajectories=tuple(ScoredTrajectory(trajectory=each, reward=reward, reward_parts={}) for each, reward in scored),
        excluded=tuple(excluded),
    )


def _trajectory(row, ids, parent, fork):
    completion = Completion(
        ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        entropies=(),
        is_forced=(False,) * len(ids),
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    turn = Turn(completion=completion, calls=(), observation_ids=(), completion_text="", observation_text="")
    return Trajectory(
        key=RolloutKey(task_index=0, attempt=row),
        task_id="t",
        prompt_ids=PROMPT,
        turns=(turn,),
        stop_reason=StopReason.ANSWERED,
        parent=None if parent is None else RolloutKey(task_index=0, attempt=parent),
        forked_at=fork,
    )
