"""Reward models: one linear head on the decoder's state at the last token of a conversation.

The model is transformers' sequence classifier with one label, so other programs can load and serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from strop.errors import ModelError
from strop.rewards.scorers import Exchange
from strop.rollout.chat_template import ChatFormat, Message, Span

if TYPE_CHECKING:
    import transformers


class ExchangeFormat:
    """Turns an exchange into the ids that a reward model reads; neither side can forge a special token.

    Raises:
        ModelError: the tokenizer cannot be loaded, has no chat template, or no id to pad with.
    """

    def __init__(self, directory: Path) -> None:
        import transformers

        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{directory}: no tokenizer that transformers can load: {error}") from error
        self._chat = ChatFormat(self.tokenizer)
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.unk_token_id, *self.tokenizer.all_special_ids)
        # Readers find the last token by skipping padding, so the end of a conversation must not be the padding token.
        free = [each for each in candidates if each is not None and each != self._chat.end_of_turn_id]
        if not free:
            raise ModelError(f"{directory}: its only special token ends a turn, so there is none to pad with.")
        self.pad_id: int = free[0]

    def ids(self, exchange: Exchange) -> tuple[int, ...]:
        """The question as a user's turn, and the response as a whole turn of the assistant."""
        return (*self.prompt_ids(exchange.prompt), *self.response_ids(exchange.response))

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """The ids before the response: the user's turn, and the beginning of the assistant's."""
        return self._chat.prompt_ids([Message(role="user", spans=(Span(text=prompt, is_ours=False),))])

    def response_ids(self, response: str) -> tuple[int, ...]:
        """The response, and the end of its turn."""
        num_begun = len(self.tokenizer.encode(""))
        return (*self._chat.raw_ids([Span(text=response, is_ours=False)])[num_begun:], self._chat.end_of_turn_id)


def load_reward_model(directory: Path) -> transformers.PreTrainedModel:
    """The reward model in `directory`, in float32. Raises `ModelError` if there is none."""
    check_reward_model(directory)
    model = _load(directory)
    if model.config.num_labels != 1:
        raise ModelError(f"{directory}: a classifier of {model.config.num_labels} labels; a reward model has one.")
    return model


def check_reward_model(directory: Path) -> None:
    """Check that there is one, without loading weights. Raises `ModelError` if there is nothing, or a language model."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: there is no model here: config.json is missing. Name a directory that transformers can load."
        )
    if not has_reward_head(directory):
        raise ModelError(
            f"{directory}: a language model, not a reward model: it has no head of one number. A stage of kind 'reward_model'"
            " makes one."
        )


def has_reward_head(directory: Path) -> bool:
    """Whether the model there has a head of numbers; False if it is a language model or there is none."""
    config = directory / "config.json"
    return config.is_file() and "ForSequenceClassification" in config.read_text(encoding="utf-8")


def begin_reward_model(directory: Path, *, pad_id: int) -> transformers.PreTrainedModel:
    """A reward model on the decoder of the language model in `directory`; its head starts at zero, without random draws."""
    model = _load(directory)
    model.config.pad_token_id = pad_id
    torch.nn.init.zeros_(head_of(model))
    return model


def head_of(model: transformers.PreTrainedModel) -> torch.nn.Parameter:
    """(1, H), float32 in a model that is trained. Raises `ModelError` if the head has another form."""
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ModelError(
            f"{type(model).__name__}: its head is not a single matrix called 'score', so it cannot be used as a reward model."
        )
    return head.get_parameter("weight")


def last_token_scores(model: transformers.PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """The reward of each row at its last token, float32 (n,), with gradient.

    Rows are padded on the right without a mask: attention is causal, so no token sees its padding. The head is computed in
    float32.
    """
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(rows), device=model.device), lengths - 1]
    return F.linear(last.float(), head_of(model).float()).squeeze(-1)


def cut_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of up to `max_tokens` with padding, longest first; a longer row is a batch of its own."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.no_grad()
def score_rows(model: transformers.PreTrainedModel, rows: Sequence[Sequence[int]], *, max_tokens: int) -> list[float]:
    """The reward of each row, in order, in batches of up to `max_tokens` with their padding."""
    scores = [0.0] * len(rows)
    for batch in cut_by_tokens([len(row) for row in rows], max_tokens):
        for index, score in zip(batch, last_token_scores(model, [rows[each] for each in batch]).tolist(), strict=True):
            scores[index] = score
    return scores


def _load(directory: Path) -> transformers.PreTrainedModel:
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # no warnings about the language model's head, which is not loaded
    try:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory, num_labels=1, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: transformers cannot load this as a sequence classifier: {error}") from error
    finally:
        transformers.utils.logging.set_verbosity(before)
    assert isinstance(model, transformers.PreTrainedModel)
    return model.eval()
