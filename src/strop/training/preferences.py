"""Preferences, read from files: pairs of responses of which one was chosen, or single responses that are good or bad.

A reward model reads them as rows (`as_rows`). DPO reads pairs as token batches (`pack_pairs`): it is a policy gradient whose
advantages are known before the backward pass. The loss of a pair depends on both of its responses, but its gradient is that of
their log-probs, each times a number that a forward pass tells (`response_advantages`). So both are rows of their own, which may
be in two micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from strop.algorithms.dpo import dpo_loss, implicit_rewards, ranked_rightly, response_advantages, sequence_logprobs
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column
from strop.errors import TaskError
from strop.rewards.base import final_summary
from strop.rewards.reward_model import ExchangeFormat
from strop.run_directory import shortened
from strop.tasks import readers
from strop.tasks.files import NoRow, RowFile, find_jsonl
from strop.training.batch import Row, TokenBatch, pack_rows

JudgedOn: TypeAlias = Literal["summary", "response"]
_log = logging.getLogger(__name__)
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_FORM = "A pair has prompt, chosen, rejected; a single row prompt, response, label."
_LABELS: dict[object, bool] = {True: True, False: False, "safe": True, "unsafe": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two responses to one prompt, of which the first was preferred."""

    prompt: str
    chosen: str
    rejected: str

    @property
    def responses(self) -> tuple[str, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A response that is good, or bad."""

    prompt: str
    response: str
    is_good: bool

    @property
    def responses(self) -> tuple[str, ...]:
        return (self.response,)


Preference: TypeAlias = Pair | Labelled


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRows:
    """A preference as a reward model reads it: the ids of chosen and rejected, or those of one response."""

    rows: tuple[tuple[int, ...], ...]  # each of question and response
    num_prompt_ids: int  # of the question, with which all rows begin
    is_good: bool = True  # of a single response

    @property
    def is_pair(self) -> bool:
        return len(self.rows) == 2

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each response; how long the question is says nothing of how long-winded an answer is."""
        return [len(row) - self.num_prompt_ids for row in self.rows]


def read_preferences(path: Path) -> RowFile[Preference]:
    """Open a .jsonl: `prompt`, `chosen`, `rejected`; or `prompt`, `response`, `label` (true, false, "safe", "unsafe").

    Rows without a prompt are dialogues of Anthropic's HH (arXiv 2204.05862); those of several turns are left out, as CS336
    assignment 5 does, and counted in a warning. All rows are read now, so that each mistake is found; they stay on disk.

    Raises:
        TaskError: the file is missing or empty, a row has neither form, or the file has rows of both.
    """
    num_left_out = 0

    def read() -> Iterator[Preference]:
        nonlocal num_left_out
        for place, row in find_jsonl(path):
            preference = _preference(row, place)
            num_left_out += preference is None
            if preference is not None:
                yield preference

    preferences = RowFile(read())
    if num_left_out:
        _log.warning("%s: %d dialogues that are not one question with two answers are left out.", path, num_left_out)
    kinds = {type(preference) for preference in preferences}
    if not kinds:
        raise TaskError(f"{path}: it has no rows. Give a .jsonl with prompt, chosen and rejected on each line.")
    if len(kinds) > 1:
        raise TaskError(f"{path}: it has pairs and single responses, which are learnt in different ways. Make two files.")
    return preferences


def as_rows(
    preferences: Iterable[Preference],
    exchanges: ExchangeFormat,
    *,
    judged_on: JudgedOn,
    think_tag: str,
    is_prefilled: bool = False,
    max_length: int,
) -> Iterator[PreferenceRows | None]:
    """Each as ids, made when it is asked for; None for one with a response of more than `max_length` tokens, or without the
    summary to be judged on.

    Args:
        is_prefilled: every prompt began a thought, so a response that never ends it has no summary.
    """
    for preference in preferences:
        judged: Sequence[str | None] = preference.responses
        if judged_on == "summary":
            judged = [final_summary(each, think_tag=think_tag, is_prefilled=is_prefilled) for each in preference.responses]
        prompt = exchanges.prompt_ids(preference.prompt)
        rows = tuple((*prompt, *exchanges.response_ids(each)) for each in judged if each is not None)
        if len(rows) < len(judged) or max(map(len, rows)) > max_length:
            yield None
        else:
            is_good = not isinstance(preference, Labelled) or preference.is_good
            yield PreferenceRows(rows=rows, num_prompt_ids=len(prompt), is_good=is_good)


def _preference(row: readers.Row | NoRow, place: str) -> Preference | None:
    """None of a dialogue that is not one question with two answers."""
    if isinstance(row, NoRow):
        raise TaskError(f"{place}: {row.problem}, with prompt, chosen and rejected.")
    if "prompt" not in row and str(row.get("chosen")).startswith(_HUMAN):
        return _of_dialogues(texts_of(row, ("chosen", "rejected"), place))
    if "chosen" in row or "rejected" in row:
        return Pair(**texts_of(row, ("prompt", "chosen", "rejected"), place))
    texts = texts_of(row, ("prompt", "response"), place)
    label = row.get("label")
    if not isinstance(label, bool | str) or label not in _LABELS:
        raise TaskError(f'{place}: label is {shortened(repr(label))}. Write true or false, or "safe" or "unsafe".')
    return Labelled(**texts, is_good=_LABELS[label])


def _of_dialogues(dialogues: Mapping[str, str]) -> Pair | None:
    said = {}
    for name, dialogue in dialogues.items():
        human, mark, response = dialogue.removeprefix(_HUMAN).partition(_ASSISTANT)
        if not mark or _HUMAN in response or _ASSISTANT in response:
            return None
        said[name] = (human.strip(), response.strip())
    (prompt, chosen), (other, rejected) = said["chosen"], said["rejected"]
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected) if prompt == other and chosen and rejected else None


def texts_of(row: readers.Row, names: Sequence[str], place: str, form: str = _FORM) -> dict[str, str]:
    """Return the texts `names` of a row. Raises `TaskError`, which says what a row of that `form` has, if one is missing."""
    for name in names:
        if not isinstance(row.get(name), str):
            found = f"is {str(row[name])[:60]!r}" if name in row else f"is missing; the row has {', '.join(sorted(row))}"
            raise TaskError(f"{place}: {name} {found}. {form}")
    return {name: row[name] for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIds:
    """A pair as a policy reads it: the prompt, and two responses to it, each as it would have been sampled."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def length(self) -> int:
        """Of the longer of its rows."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRewards:
    """The implicit rewards of some pairs, in nats; float64 (n,)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen - self.rejected

    def figures(self) -> dict[str, float]:
        """Means over the pairs."""
        of_pair = {
            "loss": dpo_loss(self.margins),
            "accuracy": ranked_rightly(self.margins),
            "margin": self.margins,
            "chosen_reward": self.chosen,
            "rejected_reward": self.rejected,
        }
        return {name: values.mean().item() for name, values in of_pair.items()}


def pack_pairs(pairs: Sequence[PairIds]) -> TokenBatch:
    """The pairs of one update: two rows each, the chosen response before the rejected one, each token weighing 1/(pairs).

    Trained on are the tokens of responses. They deserve nothing yet: `with_advantages` says what. The temperature is 1.
    """
    rows = [
        Row(
            ids=(*pair.prompt, *response),
            loss_mask=[False] * len(pair.prompt) + [True] * len(response),
            advantages=torch.zeros(len(pair.prompt) + len(response)),
            group=index,
        )
        for index, pair in enumerate(pairs)
        for response in (pair.chosen, pair.rejected)
    ]
    batch = pack_rows(rows, aggregation=Aggregation.CONSTANT, temperature=1.0, constant=1)
    return replace(batch, loss_weights=2 * batch.loss_weights)  # that mean is over rows, of which a pair has two


def rewards_of(batch: TokenBatch, *, beta: float) -> PairRewards:
    """What the columns of a batch of `pack_pairs` say: log-probs of policy and reference."""
    policy, reference = (
        sequence_logprobs(batch.columns[column].double(), batch.loss_mask)  # sums of thousands, whose difference counts
        for column in (Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS)
    )
    rewards = implicit_rewards(policy, reference, beta=beta)
    return PairRewards(chosen=rewards[::2], rejected=rewards[1::2])


def with_advantages(batch: TokenBatch, margins: Tensor, *, beta: float) -> TokenBatch:
    """`batch` of `pack_pairs` with what each of its tokens deserves.

    Args:
        margins: of its pairs, (n,), under the policy as it is before the update.
    """
    of_chosen = response_advantages(margins, beta=beta)
    of_row = torch.stack([of_chosen, -of_chosen], dim=1).flatten().to(batch.advantages.dtype)
    return replace(batch, advantages=torch.where(batch.loss_mask, of_row[:, None], 0.0))
