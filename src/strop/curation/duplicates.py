"""Drops duplicates: equal texts, or nearly equal ones by MinHash (Broder, 1997).

Near-duplicates are pairs with equal answers whose sets of word triples overlap by a Jaccard index of at least 0.8. Candidates
come from bands of the signatures (locality-sensitive hashing); each is then checked by the whole signature.

Problems from one template share bands although few are similar enough. The answer is part of the key, so problems with other
answers are never compared; and a bucket holds at most `max_in_bucket` problems, which bounds the work.
"""

from __future__ import annotations

import logging
from array import array
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strop.curation.answers import RuleScope, bare, fingerprint, grams, words
from strop.errors import TaskError
from strop.types import Task

logger = logging.getLogger(__name__)

_NUM_HASHES = 120
_SHINGLE_WORDS = 3
_SEED = 1
_THRESHOLD = 0.8
_BAND_ROWS = 6  # the most at which a pair at the threshold shares one of the bands with a probability of 0.99


class ExactDuplicates:
    """Keeps the first of problems whose questions differ only in layout."""

    name = "exact_duplicates"

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[str, str]] = {}

    def judge(self, task: Task) -> str | None:
        key, answer = fingerprint(task.question), bare(task.answer)
        if key not in self._first:
            self._first[key] = (task.id, answer)
            return None
        first, first_answer = self._first[key]
        other = "" if first_answer == answer else f", whose answer is {first_answer!r} where this one's is {answer!r}"
        return f"the same question as {first}{other}"


class NearDuplicates:
    """Keeps the first of problems with nearly equal questions.

    The answers must be equal too: the same sentence with other numbers is another problem.

    Args:
        max_in_bucket: problems in a bucket; later ones are found only by their other bands. Problems that were not compared
            with all candidates are counted, with a warning.
    """

    name = "near_duplicates"

    def __init__(self, *, max_in_bucket: int = 1024) -> None:
        self.max_in_bucket = max_in_bucket
        self.num_compared = 0
        """Pairs of signatures that were compared."""
        self.num_cut_short = 0
        """Problems that are kept although one of their buckets was full."""
        self._buckets: list[dict[bytes, array[int]]] = [{} for _ in range(_NUM_HASHES // _BAND_ROWS)]
        self._answers: dict[str, int] = {}
        self._kept: list[str] = []  # ids
        self._signatures = np.empty((1024, _NUM_HASHES), dtype=np.uint32)

    def judge(self, task: Task) -> str | None:
        prepared = signature(task.question)
        own = np.frombuffer(prepared, dtype="<u4")
        bands = self._bands(prepared, bare(task.answer))
        met = [bucket[band] for bucket, band in zip(self._buckets, bands, strict=True) if band in bucket]
        if met:
            candidates = np.unique(np.concatenate([np.frombuffer(each, dtype=np.uint32) for each in met]))
            likeness = np.count_nonzero(self._signatures[candidates] == own, axis=1) / _NUM_HASHES
            self.num_compared += len(candidates)
            alike = np.flatnonzero(likeness >= _THRESHOLD)
            if len(alike):
                first = alike[0]
                return f"{likeness[first]:.0%} alike with {self._kept[candidates[first]]}"
        if any(len(each) >= self.max_in_bucket for each in met):
            self._warn_of_full_buckets()
        self._remember(task.id, own, bands)
        return None

    def _bands(self, prepared: bytes, answer: str) -> list[bytes]:
        """Return the key in each bucket: the answer and a band."""
        key = self._answers.setdefault(answer, len(self._answers)).to_bytes(4, "little")
        width = 4 * _BAND_ROWS
        return [key + prepared[start : start + width] for start in range(0, width * len(self._buckets), width)]

    def _remember(self, name: str, own: NDArray[np.uint32], bands: list[bytes]) -> None:
        index = len(self._kept)
        if index == len(self._signatures):
            self._signatures = np.resize(self._signatures, (2 * index, _NUM_HASHES))
        self._signatures[index] = own
        self._kept.append(name)
        for bucket, band in zip(self._buckets, bands, strict=True):
            found = bucket.setdefault(band, array("I"))
            if len(found) < self.max_in_bucket:
                found.append(index)

    def _warn_of_full_buckets(self) -> None:
        self.num_cut_short += 1
        if self.num_cut_short.bit_count() == 1:  # 1, 2, 4, ...
            logger.warning(
                "near_duplicates: %d kept problems share text with more than %d problems with the same answer. They were"
                " compared only with the first of these, so near duplicates may remain.",
                self.num_cut_short,
                self.max_in_bucket,
            )


def signature(text: str) -> bytes:
    """Return the MinHash signature of the word triples of `text`: 120 numbers of 32 bits, the same in every process."""
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise TaskError(
            "the rule near_duplicates needs the `rensa` package, which is not installed. Install it with"
            " pip install 'strop[data]', or leave the rule out."
        ) from error
    said = words(text)
    sketch = RMinHash(num_perm=_NUM_HASHES, seed=_SEED)
    sketch.update(grams(said, _SHINGLE_WORDS) or said)
    return np.asarray(sketch.digest(), dtype="<u4").tobytes()


class ExactDuplicatesRule(RuleScope):
    """Keeps the first of equal questions."""

    compares = True
    kind: Literal["exact_duplicates"] = "exact_duplicates"

    def opened(self) -> ExactDuplicates:
        return ExactDuplicates()


class NearDuplicatesRule(RuleScope):
    """Keeps the first of nearly equal questions; needs the extra `data`."""

    compares = True
    kind: Literal["near_duplicates"] = "near_duplicates"

    def opened(self) -> NearDuplicates:
        return NearDuplicates()
