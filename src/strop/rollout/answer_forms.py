r"""The forms in which a policy is asked to write its answer, so that a reward which reads another one is noticed."""

from __future__ import annotations

from enum import StrEnum


class AnswerForm(StrEnum):
    """Where a grader looks for the answer. A prompt lists those in which its answers are found; a reward has one a grader."""

    BOX_IN_TAG = "box_in_tag"
    TAG = "tag"
    BOX = "box"
    R1_ZERO = "r1_zero"
    ARPO = "arpo"
    CODE = "code"

    @property
    def words(self) -> str:
        """Behind "reads" or "found in"."""
        return _WORDS[self]


_WORDS = {
    AnswerForm.BOX_IN_TAG: r"a \boxed{} inside <answer> tags",
    AnswerForm.TAG: "<answer> tags, with a box in them or without",
    AnswerForm.BOX: r"a \boxed{} anywhere in the last turn",
    AnswerForm.R1_ZERO: "what stands behind `</think> <answer>`",
    AnswerForm.ARPO: r"thoughts in <think> tags, then a \boxed{} inside the one pair of <answer> tags",
    AnswerForm.CODE: "the last fenced code block of the last turn",
}
