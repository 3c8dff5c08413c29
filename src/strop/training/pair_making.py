"""Makes preference pairs of candidate responses: several judgements each, only clear ones kept, lengths balanced.

DeepSeek-R1 (arXiv 2501.12948), section 3.1: four judgements in random order, a mean difference above 1, and lengths
balanced over the set. Its helpful pairs are judged only on the final summary, its safety on the whole response; the lengths
are those of what is judged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.errors import TaskError
from strop.rewards.base import final_summary
from strop.rewards.judge import JudgeConfig, ModelJudge
from strop.run_directory import write_text
from strop.tasks.files import read_rows
from strop.training.preferences import JudgedOn, Pair, texts_of

logger = logging.getLogger(__name__)

_AT_ONCE = 1024  # candidates that wait for their judgements: each takes 30 KB and four times its texts meanwhile
_LENGTH_STEP = 0.1  # pairs are matched within bands of so much of (longer - shorter) / longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Two responses to one prompt, not yet judged."""

    prompt: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePairs:
    """The pairs that are kept, and why the others are not; the numbers add up to those of the candidates."""

    pairs: tuple[Pair, ...]  # of whole responses
    num_without_summary: int  # that was to be judged; they were not shown to the judge
    num_unjudged: int  # a judgement without a verdict
    num_unclear: int  # a mean difference that is not above the threshold
    num_unbalanced: int  # left out so that neither side is longer over the set

    @property
    def summary(self) -> str:
        return (
            f"{len(self.pairs):,} pairs; left out: {self.num_without_summary:,} without a summary, {self.num_unjudged:,}"
            f" without a verdict, {self.num_unclear:,} not clear, {self.num_unbalanced:,} for equal lengths"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMaking:
    """How candidates are judged, and what is kept.

    Args:
        judged_on: what of a response the judge sees, and has its length balanced: what stands behind its last thought, or all.
        think_tag: of thoughts.
        is_prefilled: every prompt began a thought, so a response that never ends it has no summary.
        num_judgements: of each pair, each in a random order.
        threshold: that the mean difference of a kept pair exceeds.
        seed: of the selection that balances lengths.
    """

    judged_on: JudgedOn = "summary"
    think_tag: str = "think"
    is_prefilled: bool = False
    num_judgements: int = 4
    threshold: float = 1.0
    seed: int = 0

    async def write_file(self, source: Path, out: Path, config: JudgeConfig) -> MadePairs:
        """`make` of the candidates in `source`; `out` is what a stage of kind reward_model reads, there whole or not at all.

        Replies are kept in `<out>.replies`, unless the judge's service has a cache: the same call after a failure goes on.

        Raises:
            TaskError: the candidates cannot be read, or no pair is left of them.
            UserError: the judge failed.
        """
        candidates = read_candidates(source)
        service = config.service
        if service.temperature == 0 and self.num_judgements > 1:
            logger.warning(
                "service.temperature is 0: judgements of a pair in one order are one and the same. 1.0 would tell more."
            )
        if service.cache is None:
            service = service.model_copy(update={"cache": str(out.with_name(f"{out.name}.replies"))})
        judge = ModelJudge(config.model_copy(update={"service": service}))
        try:
            made = await self.make(judge, candidates)
        finally:
            await judge.close()
        if made.num_without_summary:
            logger.warning(
                "%d of %d candidates have a response without a summary: it says nothing behind its last </%s>, or a thought"
                " does not end. They are left out; --judged-on response has responses judged whole.",
                made.num_without_summary,
                len(candidates),
                self.think_tag,
            )
        if not made.pairs:
            raise TaskError(f"{source}: {made.summary}. {_remedy(made, len(candidates))}")
        write_text(out, "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in made.pairs))
        return made

    async def make(self, judge: ModelJudge, candidates: Sequence[Candidates]) -> MadePairs:
        """Judge all `candidates` and keep what is clear and balanced. With a cache of the judge, a killed run goes on.

        Raises:
            ServiceRefused: the judge failed.
        """
        shown = [
            (each, first, second)
            for each in candidates
            if (first := self._judged(each.first)) is not None and (second := self._judged(each.second)) is not None
        ]
        differences: list[float | None] = []
        for start in range(0, len(shown), _AT_ONCE):
            part = shown[start : start + _AT_ONCE]
            differences += await asyncio.gather(
                *(_difference(judge, each.prompt, first, second, self.num_judgements) for each, first, second in part)
            )
        with_verdict = [(each, found) for (each, _, _), found in zip(shown, differences, strict=True) if found is not None]
        clear = [_pair(each, found) for each, found in with_verdict if abs(found) > self.threshold]
        kept = balanced(clear, seed=self.seed, length=lambda response: len(self._judged(response) or ""))
        return MadePairs(
            pairs=tuple(kept),
            num_without_summary=len(candidates) - len(shown),
            num_unjudged=len(shown) - len(with_verdict),
            num_unclear=len(with_verdict) - len(clear),
            num_unbalanced=len(clear) - len(kept),
        )

    def _judged(self, response: str) -> str | None:
        """What of a response is judged; None where it has no such part."""
        if self.judged_on == "response":
            return response
        return final_summary(response, think_tag=self.think_tag, is_prefilled=self.is_prefilled)


def read_candidates(path: Path) -> list[Candidates]:
    """The rows of a .jsonl: `prompt`, `first`, `second`.

    Raises:
        TaskError: the file is missing or empty, or a row is not of that form.
    """
    names, form = ("prompt", "first", "second"), "A line has prompt, first and second."
    found = [Candidates(**texts_of(row, names, place, form)) for place, row in read_rows(path)]
    if not found:
        raise TaskError(f"{path}: it has no rows, so there is nothing to judge.")
    return found


def balanced(pairs: Sequence[Pair], *, seed: int, length: Callable[[str], int] = len) -> list[Pair]:
    """`pairs`, in their order, without as many as it takes that chosen and rejected are the longer one equally often.

    Pairs are matched by how much longer the longer response is, so long differences on one side are not set off by short ones
    on the other; which are left out is drawn.
    """
    bands: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, pair in enumerate(pairs):
        chosen, rejected = length(pair.chosen), length(pair.rejected)
        if chosen != rejected:
            band = int(abs(chosen - rejected) / max(chosen, rejected) / _LENGTH_STEP)
            bands[band][chosen < rejected].append(index)
    draw, dropped = random.Random(seed), set[int]()
    for band in sorted(bands):
        few, many = sorted(bands[band], key=len)
        dropped.update(draw.sample(many, len(many) - len(few)))
    return [pair for index, pair in enumerate(pairs) if index not in dropped]


async def _difference(judge: ModelJudge, prompt: str, first: str, second: str, num_judgements: int) -> float | None:
    """The mean over judgements of how much better `first` is; None where one of them holds no verdict."""
    asked = (judge.compare(prompt, first, second, judgement=number) for number in range(num_judgements))
    found = [value for value in await asyncio.gather(*asked) if value is not None]
    return sum(found) / num_judgements if len(found) == num_judgements else None


def _remedy(made: MadePairs, num_candidates: int) -> str:
    """What to do where no pair is left."""
    if made.num_without_summary == num_candidates:
        return "Name the tag of thoughts (--think-tag), or have responses judged whole (--judged-on response)."
    return "Lower the threshold, give more candidates, or take another judge."


def _pair(candidates: Candidates, difference: float) -> Pair:
    both = (candidates.first, candidates.second)
    chosen, rejected = both if difference > 0 else both[::-1]
    return Pair(prompt=candidates.prompt, chosen=chosen, rejected=rejected)
