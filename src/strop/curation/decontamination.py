"""Drops problems that are in a benchmark: by shared n-grams, and reworded copies of short problems by runs of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import log
from typing import Literal

from pydantic import Field

from strop.curation.rules import RuleScope, grams, signs_and_words, words
from strop.tasks import iterate_rows
from strop.tasks.rows import RowSource
from strop.types import Task

_SEED_WORDS = 3  # minimum of a run, and the key in the index
_MIN_RARE_WORDS = 1.5  # of a run; a word of only one benchmark problem counts 1
_MIN_SHARE = 0.45  # of a benchmark problem's words, weighted by rarity, that a run must contain
_MIN_OWN_SHARE = 0.4  # of the words of the judged problem: a phrase in a longer problem is not a copy


class Reworded:
    """Finds copies of short benchmark problems with other first and last words, by runs of consecutive words and signs.

    A run must contain much of what is specific to the benchmark problem, so words are weighted by their rarity among all
    benchmark problems: 1 for a word of one problem, nearly 0 for a word of all. "Express your answer as a common fraction" is
    long and counts little. Measured with MATH-500, HotpotQA and Bamboogle on 17 472 real problems: no false alarm with a
    share of 0.45, three with 0.40.

    Args:
        benchmarks: all questions, and whether copies of each are searched.
    """

    def __init__(self, benchmarks: Iterable[tuple[str, bool]]) -> None:
        said = [(signs_and_words(question), is_wanted) for question, is_wanted in benchmarks]
        num_with = Counter(word for own, _ in said for word in set(own))
        scale = log(len(said) + 1)
        self._words: dict[int, list[str]] = {}
        self._counted: dict[int, list[float]] = {}  # total weight of the words before each place
        self._where: dict[str, list[tuple[int, int]]] = {}  # seed -> benchmark problem, place in it
        for index, (own, is_wanted) in enumerate(said):
            if not is_wanted:
                continue
            rarity = [log((len(said) + 1) / num_with[word]) / scale for word in own]
            self._words[index] = own
            self._counted[index] = list(accumulate(rarity, initial=0.0))
            for place, seed in enumerate(grams(own, _SEED_WORDS)):
                self._where.setdefault(seed, []).append((index, place))

    def find(self, question: str) -> tuple[float, int, str] | None:
        """Return the run with the largest share of a benchmark problem, if it is large enough for a copy.

        Returns:
            the share of the problem's words, weighted by rarity; which problem; the words of the run.
        """
        own = signs_and_words(question)
        best: tuple[float, int, int, int] | None = None
        begun: dict[tuple[int, int], int] = {}  # (problem, place) -> start of a run that may continue there
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
                if share >= _MIN_SHARE and (best is None or share > best[0]):
                    best = share, index, start, end
            begun = going_on
        if best is None:
            return None
        share, index, start, end = best
        return share, index, " ".join(self._words[index][start:end])


_CHOICES = re.compile(r"^\s*\(?A[).:]\s.*^\s*\(?B[).:]\s", re.MULTILINE | re.DOTALL)  # lettered, one a line


class Decontamination:
    """Drops problems that share `n` consecutive words with a benchmark problem, and reworded copies of short ones.

    The shared n-grams must be `min_share` of the benchmark problem's, so that a common phrase is no alarm; with 0, the strict
    rule of the papers, one n-gram is enough. A benchmark problem of fewer than `n` words matches only a problem with exactly
    its words. One of fewer than 3 `n` words also matches by a run of words (`Reworded`).
    """

    name = "decontamination"

    def __init__(self, benchmarks: Iterable[Task], *, n: int = 8, min_share: float = 0.5) -> None:
        self.n = n
        self.min_share = min_share
        self._names: list[str] = []
        self._num_grams: list[int] = []
        self._where: dict[str, list[int]] = {}  # n-gram -> benchmark problems
        self._whole: dict[str, int] = {}  # all words of a problem that has fewer than n
        questions = []
        for task in benchmarks:
            for text in _texts(task.question):
                questions.append((text, self._add(task, words(text)) < 3 * n))
        self._short = Reworded(questions)

    def _add(self, task: Task, said: list[str]) -> int:
        index = len(self._names)
        self._names.append(f"{task.id} of {task.source}")
        own = dict.fromkeys(grams(said, self.n))
        self._num_grams.append(len(own))
        if not own:
            self._whole.setdefault(" ".join(said), index)
        for gram in own:
            self._where.setdefault(gram, []).append(index)
        return len(said)

    def judge(self, task: Task) -> str | None:
        if reason := self._by_grams(words(task.question)):
            return reason
        if (run := self._short.find(task.question)) is None:
            return None
        share, index, text = run
        return f'shares {share:.0%} of the short {self._names[index]}, weighted by rarity: "{text}"'

    def _by_grams(self, said: list[str]) -> str | None:
        if len(said) < self.n:
            index = self._whole.get(" ".join(said))
            return None if index is None else f"the same words as {self._names[index]}"
        shared: Counter[int] = Counter()
        example: dict[int, str] = {}
        for gram in dict.fromkeys(grams(said, self.n)):
            for index in self._where.get(gram, ()):
                shared[index] += 1
                example.setdefault(index, gram)
        if not shared:
            return None
        index, count = max(shared.items(), key=lambda item: (item[1] / self._num_grams[item[0]], -item[0]))
        share = count / self._num_grams[index]
        if share < self.min_share:
            return None
        return f'shares {share:.0%} of the {self.n}-grams of {self._names[index]}, as in "{example[index]}"'


def _texts(question: str) -> list[str]:
    """Return `question`, and its part before the choices if it has some."""
    choices = _CHOICES.search(question)
    return [question, question[: choices.start()]] if choices and choices.start() else [question]


class DecontaminationRule(RuleScope):
    """Drops problems that share n-grams with a benchmark, and reworded copies of its short problems."""

    kind: Literal["decontamination"] = "decontamination"
    against: tuple[RowSource, ...] = Field(min_length=1, description="Benchmarks: their test rows, or all rows if none.")
    n: int = Field(default=8, ge=2, le=10**6, description="Words of an n-gram (rStar2-Agent section 4.2, open-r1).")
    min_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a benchmark problem's n-grams that makes a copy; 0: one n-gram, as in the papers.",
    )

    def opened(self) -> Decontamination:
        benchmarks = (task for source in self.against for task in read_benchmark(source))
        return Decontamination(benchmarks, n=self.n, min_share=self.min_share)


def read_benchmark(source: RowSource) -> Iterator[Task]:
    """Return the test rows of `source`, or all rows if it has no test rows."""
    return iterate_rows(source, split="test" if source.has_test_rows else "train")
