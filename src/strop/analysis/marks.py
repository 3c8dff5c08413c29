"""Which tokens stand out: those of highest entropy in their rollout, and the words of second thoughts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strop.analysis.parts import Span

TOP_SHARE = 0.2
"""rStar2-Agent (arXiv 2508.20722), section 5.4 and Figures 10 and 11: the top 20 % of each trajectory."""

_STEMS = (  # section 5.4 of the same paper and its two traces, and their kin; inflected forms of each count, too
    r"(?:double|cross)?-?check(?:s|ed|ing)?",
    r"(?:re-?|cross-?)?verif(?:y|ies|ied|ying)",
    r"(?:re-?)?validat(?:e|es|ed|ing)",
    r"confirm(?:s|ed|ing)?",
    r"re-?(?:run|runs|running|execute|executes|executing)",
    r"re-?(?:evaluate|evaluates|evaluating|consider|examine|calculate|compute|think)",
    r"(?:try|tries|trying) again",
    r"debug(?:s|ged|ging)?",
    r"fix(?:es|ed|ing)?",
    r"correct(?:ed|ing|ly)?",
    r"errors?",
    r"mistakes?",
    r"wrong",
    r"inconsisten(?:t|cy|cies)",
    r"but",
    r"however",
    r"wait",
    r"actually",
    r"alternatively",
    r"instead",
    r"perhaps",
    r"maybe",
)
REFLECTION = re.compile(rf"(?<![\w-])(?:{'|'.join(_STEMS)})(?![\w-])", re.IGNORECASE)
"""Words of second thoughts, in English. The paper gives examples and no list: this one is ours."""


def top_entropy(entropies: Sequence[float], *, share: float = TOP_SHARE) -> list[bool]:
    """True on the floor(share * n) highest of `entropies`, those of all sampled tokens of one rollout; of equal ones the first.

    The same rule as `strop.algorithms.high_entropy`, which learns from these tokens alone.
    """
    num_marked = int(len(entropies) * share + 1e-9)  # a share of 0.3 of ten tokens is 2.9999... in binary
    order = sorted(range(len(entropies)), key=lambda place: -entropies[place])
    marked = [False] * len(entropies)
    for place in order[:num_marked]:
        marked[place] = True
    return marked


def reflection_spans(text: str) -> list[Span]:
    """Where words of second thoughts stand in `text`."""
    return [match.span() for match in REFLECTION.finditer(text)]
