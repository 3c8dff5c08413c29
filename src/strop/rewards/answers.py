"""Finds the answer in what a policy wrote: in the answer tag of its last turn, and nowhere else.

rStar2-Agent (arXiv 2508.20722), section 2.1. Its released code reads the whole decoded response, tool output included, so
that printing the answer can earn the reward; here tool output, earlier turns and truncated rollouts hold no answer.
"""

from __future__ import annotations

from strop.tasks.boxes import boxed
from strop.types import StopReason, Trajectory

OPENING, CLOSING = "<answer>", "</answer>"


def final_text(trajectory: Trajectory) -> str | None:
    """What the policy wrote in its last turn; None when it did not end the rollout itself."""
    if trajectory.stop_reason is not StopReason.ANSWERED or not trajectory.turns:
        return None
    return trajectory.turns[-1].completion_text


def last_answer_block(text: str) -> str | None:
    """What stands inside the last closed pair of answer tags."""
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, max(end, 0))
    return text[start + len(OPENING) : end] if 0 <= start < end else None


def extract_answer(trajectory: Trajectory, *, needs_box: bool) -> str | None:
    r"""The `\boxed{}` inside the last answer tag of the last turn; without `needs_box` the whole tag where it has none.

    Boxes with different contents are no answer: nothing says which one is meant, and a policy must not learn to try several.
    """
    text = final_text(trajectory)
    block = None if text is None else last_answer_block(text)
    if block is None:
        return None
    boxes = boxed(block)
    if len({box.strip() for box in boxes if "\\boxed" not in box}) > 1:
        return None
    answer = boxes[-1] if boxes else "" if needs_box else block
    return answer.strip() or None


def has_answer_format(trajectory: Trajectory) -> bool:
    r"""Whether the policy ended the rollout itself and wrote one answer tag in all of it, with one `\boxed{}` inside."""
    text = final_text(trajectory)
    if text is None:
        return False
    written = "".join(turn.completion_text for turn in trajectory.turns)
    block = last_answer_block(text)
    return written.count(OPENING) == written.count(CLOSING) == 1 and block is not None and len(boxed(block)) == 1
