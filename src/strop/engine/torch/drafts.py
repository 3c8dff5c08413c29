"""Drafts the next ids of a conversation from other attempts at its prompt, and measures how many are worth computing.

A step pads its products to one of a few sizes. When few conversations are left, drafts take the place of the padding: each is
computed as if it had been drawn, the token after it is drawn with its own uniform, and what was drawn after a wrong draft is
dropped. So drafts change the time that a completion takes, and none of its tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.engine.torch.kv_cache import Conversation

_CONTEXT = 4  # ids that a draft is looked up by, at most
_LENGTHS = (0, 1, 2, 4, 8)  # drafts for each conversation, of which the fastest is used
_TRIES = 4  # steps of each length before any is preferred
_RETRY = 32  # steps until another length is measured again
_KEPT = 0.9  # weight of the steps before, when the next one is measured


class Attempts:
    """The conversations that began with one prompt, and which ids followed which in them."""

    def __init__(self) -> None:
        self._followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._num_read: dict[Conversation, int] = {}

    def join(self, conversation: Conversation) -> None:
        """What it has at first is what the others have."""
        self._num_read[conversation] = len(conversation.ids) if self._num_read else 0

    def draft(self, conversation: Conversation, length: int) -> list[int]:
        """Return up to `length` ids: each the most frequent one after the longest context that was seen before."""
        if length:
            self._read()
        ids = conversation.ids[-_CONTEXT:]
        num_given = len(ids)
        while len(ids) < num_given + length:
            contexts = (tuple(ids[-size:]) for size in range(min(_CONTEXT, len(ids)), 0, -1))
            followers = next((self._followers[each] for each in contexts if each in self._followers), None)
            if followers is None:
                break
            ids.append(max(followers, key=followers.__getitem__))
        return ids[num_given:]

    def _read(self) -> None:
        for conversation, num_read in self._num_read.items():
            ids = conversation.ids
            for place in range(num_read, len(ids)):
                for start in range(max(0, place - _CONTEXT), place):
                    self._followers[tuple(ids[start:place])][ids[place]] += 1
            self._num_read[conversation] = len(ids)


class DraftTimes:
    """Seconds and tokens of steps, by the number of drafts for each conversation; those long ago weigh little."""

    def __init__(self) -> None:
        self._num_steps = Counter[int]()
        self._sums = dict.fromkeys(_LENGTHS, (0.0, 0.0))  # seconds, tokens

    def choose(self, most: int) -> int:
        """Return the fastest length up to `most`; now and then another one, to measure it."""
        lengths = [length for length in _LENGTHS if length <= most]
        rarest = min(lengths, key=self._num_steps.__getitem__)
        if self._num_steps[rarest] < _TRIES or self._num_steps.total() % _RETRY == 0:
            return rarest
        return min(lengths, key=lambda length: self._sums[length][0] / self._sums[length][1])

    def note(self, length: int, seconds: float, tokens_per_row: float) -> None:
        self._num_steps[length] += 1
        old_seconds, old_tokens = self._sums[length]
        self._sums[length] = _KEPT * old_seconds + seconds, _KEPT * old_tokens + tokens_per_row
