"""Finds short benchmark problems under other first and last words, of which too few n-grams are left to tell.

What such a copy keeps is one run: consecutive words and signs of the benchmark problem. A run speaks for a copy where it holds
much of what is peculiar to that problem. So words count by their rarity among the benchmark problems: 1 where one problem alone
has the word, nearly 0 where all have it. "Express your answer as a common fraction" is long and counts for little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import log

from strop.curation.text import grams, signs_and_words

_SEED_WORDS = 3  # of a run, at least; by them it is looked up
_MIN_RARE_WORDS = 1.5  # of a run: words that one benchmark problem alone has, or more that a few have
_MIN_OWN_SHARE = 0.4  # of the words of the problem that is judged: a phrase inside a longer one is none of a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a problem has in common with a benchmark problem."""

    index: int  # of the benchmark problem
    share: float  # of its words, rare ones counting more
    text: str


class Reworded:
    """The runs by which problems are recognised as copies of some of `benchmarks`.

    The other benchmark problems say how rare a word is, and so do these. Measured on MATH-500, HotpotQA and Bamboogle: with
    `min_share` 0.45 of 17 472 real problems none is an alarm that is no copy, with 0.40 three are.

    Args:
        benchmarks: the questions of all, and whether a copy of it is to be found.
        min_share: of the words of a benchmark problem, rare ones counting more, that a run must hold.
    """

    def __init__(self, benchmarks: Iterable[tuple[str, bool]], *, min_share: float) -> None:
        self.min_share = min_share
        said = [(signs_and_words(question), is_wanted) for question, is_wanted in benchmarks]
        num_with = Counter(word for words, _ in said for word in set(words))
        scale = log(len(said) + 1)
        self._words: dict[int, list[str]] = {}
        self._counted: dict[int, list[float]] = {}  # how much the words before each place count together
        self._where: dict[str, list[tuple[int, int]]] = {}  # seed -> benchmark problem, place in it
        for index, (words, is_wanted) in enumerate(said):
            if not is_wanted:
                continue
            rarity = [log((len(said) + 1) / num_with[word]) / scale for word in words]
            self._words[index] = words
            self._counted[index] = list(accumulate(rarity, initial=0.0))
            for place, seed in enumerate(grams(words, _SEED_WORDS)):
                self._where.setdefault(seed, []).append((index, place))

    def find(self, question: str) -> Run | None:
        """The run that holds the largest share of a benchmark problem, where it is large enough to tell a copy."""
        own = signs_and_words(question)
        best: tuple[float, int, int, int] | None = None
        begun: dict[tuple[int, int], int] = {}  # where a run that may go on at (problem, place) began
        for seed in grams(own, _SEED_WORDS):
            going_on: dict[tuple[int, int], int] = {}
            for index, place in self._where.get(seed, ()):
                start = begun.get((index, place), place)
                going_on[index, place + 1] = start
                end = place + _SEED_WORDS
                counted = self._counted[index]
                rare = counted[end] - counted[start]
                if rare < _MIN_RARE_WORDS or end - start < _MIN_OWN_SHARE * len(own):
                    continue
                share = rare / counted[-1]
                if share >= self.min_share and (best is None or share > best[0]):
                    best = share, index, start, end
            begun = going_on
        if best is None:
            return None
        share, index, start, end = best
        return Run(index=index, share=share, text=" ".join(self._words[index][start:end]))
