"""What a policy wrote, and the words in it."""

from __future__ import annotations

import re

from strop.types import Trajectory

# Each is no natural language: code and calls, mathematics, LaTeX commands outside it.
_NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|<(tool_call|python)>.*?(?:</\1>|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]"
    r"|\\boxed\s*\{[^{}]*\}|\\[a-zA-Z]+|</?\w+>",
    re.DOTALL,
)
# Scripts that put no space between words: every character is one. The rest: a run of letters.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+(?:['’][^\W\d_{_UNSPACED}]+)*")


def written(trajectory: Trajectory) -> str:
    """All that the policy wrote, turn after turn, without what its tools said."""
    return "".join(turn.completion_text for turn in trajectory.turns)


def final_summary(text: str, *, think_tag: str = "think", is_prefilled: bool = False) -> str | None:
    """What is said behind the last thought; all of it where nothing was thought; None where a thought does not end.

    Args:
        is_prefilled: the prompt began a thought, its opening tag is not in `text`.
    """
    opening, closing = f"<{think_tag}>", f"</{think_tag}>"
    text = opening + text if is_prefilled else text
    behind = text.rpartition(closing)[2]
    return None if opening in behind else behind.strip() or None


def words(text: str) -> list[str]:
    """Its words, case kept; of Chinese and Japanese every character is one. Digits and signs are none."""
    return _WORD.findall(text)


def prose(text: str) -> str:
    """`text` without code, tool calls, mathematics and tags."""
    return _NO_PROSE.sub(" ", text)


def num_sampled_tokens(trajectory: Trajectory) -> int:
    """Tokens that the policy sampled: the length that a reward may speak of."""
    return sum(len(turn.completion.ids) for turn in trajectory.turns)
