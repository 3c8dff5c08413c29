"""Drops duplicates: equal texts, or nearly equal ones by MinHash (Broder, 1997).

Near-duplicates are pairs with equal answers whose sets of word triples overlap by a Jaccard index of at least 0.8. Candidates
come from bands of the signatures (locality-sensitive hashing); each is then checked by the whole signature.

Problems from one template share bands although few are similar enough. Each answer has bands of its own, so problems with
other answers are never compared; and a problem is compared with at most `max_compared` others, which bounds the work.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import partial
from typing import Any, Literal

from strop.curation.answers import RuleScope, bare, fingerprint, grams, words
from strop.errors import TaskError
from strop.types import Task

logger = logging.getLogger(__name__)

_NUM_HASHES = 120
_SHINGLE_WORDS = 3
_SEED = 1
_THRESHOLD = 0.8
_NUM_BANDS = 20  # of 6 hashes, the most at which a pair at the threshold shares a band with a probability of 0.99


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
        max_compared: candidates that a problem is compared with, the earliest first. A warning says that there were more.
    """

    name = "near_duplicates"

    def __init__(self, *, max_compared: int = 10_000) -> None:
        try:
            from rensa import RMinHash, RMinHashLSH
        except ImportError as error:
            raise TaskError(
                "the rule near_duplicates needs the `rensa` package, which is not installed. Install it with"
                " pip install 'strop[data]', or leave the rule out."
            ) from error
        self.max_compared = max_compared
        self.num_compared = 0
        """Pairs of signatures that were compared."""
        self._has_warned = False
        self._new_signature = partial(RMinHash, num_perm=_NUM_HASHES, seed=_SEED)
        self._kept: list[tuple[str, Any]] = []  # ids and signatures
        self._places = defaultdict[str, Any](lambda: RMinHashLSH(_THRESHOLD, _NUM_HASHES, _NUM_BANDS))  # in `_kept`, by answer

    def judge(self, task: Task) -> str | None:
        own = self.signature(task.question)
        places = self._places[bare(task.answer)]
        candidates = sorted(places.query(own))
        for place in candidates[: self.max_compared]:
            name, other = self._kept[place]
            self.num_compared += 1
            if (likeness := own.jaccard(other)) >= _THRESHOLD:
                return f"{likeness:.0%} alike with {name}"
        if len(candidates) > self.max_compared and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "near_duplicates: %s shares text with more than %d problems with the same answer. It was compared only with the"
                " first of these, so near duplicates may remain. This holds for further problems, without a warning.",
                task.id,
                self.max_compared,
            )
        places.insert(len(self._kept), own)
        self._kept.append((task.id, own))
        return None

    def signature(self, text: str) -> Any:
        """Return the MinHash signature of the word triples of `text`, the same in every process."""
        said = words(text)
        found = self._new_signature()
        found.update(grams(said, _SHINGLE_WORDS) or said)
        return found


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
