"""The assignment's optional supplement: packed instruction tuning, the loss of DPO, and answers of two benchmarks."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from strop.algorithms.dpo import dpo_loss, implicit_margins
from strop.cs336.training import encode_beginning, get_response_log_probs, load_prompt
from strop.errors import TaskError
from strop.rewards.base import written
from strop.run_directory import parse_json
from strop.types import Task, Trajectory

_MMLU_ANSWER = re.compile(r"(?i:answer)(?:\s+(?i:is)\b)?\s*:?\s*(?:(?i:option)\s+)?[(*\"'`$]*([A-Z])(?![\w'’])")
_MMLU_LETTER = re.compile(r"\s*[(*\"'`]*([A-Z])(?:[).:*\"'`]+(?:\s|$)|\s*$)")
_THOUSANDS = r"(?:,|\{,\}|\\,|,\\!|[\u00a0\u2009\u202f])"  # including LaTeX's forms and non-breaking spaces
_NUMBER = re.compile(
    r"\d+(?:\.\d+){2,}"  # a version, a section or a date is not a number
    r"|(?P<sign>(?<![\w)\]}\u2212-])[-\u2212])?\$?"
    r"(?P<number>(?:"
    rf"\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)(?:\.\d+)?"
    r"|\d{1,3}(?: \d{3})*? 0\d\d(?: \d{3})*(?!\d)(?:\.\d+)?"  # three digits that begin with 0 continue a number
    r"|\d+(?:\.\d+)?"
    r"|(?<![\w.])\.\d+"
    r")(?:[eE][+-]?\d+(?!\w))?)"
)


class PackedSFTDataset(Dataset[dict[str, Tensor]]):
    """Concatenated documents, cut into rows of one length; labels are the next token. An incomplete last row is dropped."""

    def __init__(self, ids: Tensor, seq_length: int) -> None:
        self._ids, self._seq_length = ids, seq_length

    def __len__(self) -> int:
        return max(0, len(self._ids) - 1) // self._seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 (seq_length,)."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = index * self._seq_length, (index + 1) * self._seq_length
        return {"input_ids": self._ids[start:end], "labels": self._ids[start + 1 : end + 1]}


def get_packed_sft_dataset(
    tokenizer: transformers.PreTrainedTokenizerBase, dataset_path: str | Path, seq_length: int, shuffle: bool
) -> PackedSFTDataset:
    """All pairs of a file in the Alpaca template, each between BOS and EOS (where the tokenizer has them), packed.

    Args:
        dataset_path: JSON lines with `prompt` and `response`; `.gz` is decompressed.
        seq_length: tokens per row.
        shuffle: shuffle the documents with torch's generator before packing.

    Raises:
        TaskError: a line is not such an object, or all of them together do not fill a row.
        ValueError: `seq_length` is below 1.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length is {seq_length}: a row needs at least one token.")
    path = Path(dataset_path)
    pairs = _read_pairs(path)
    order = torch.randperm(len(pairs)).tolist() if shuffle else range(len(pairs))
    ids: list[int] = []
    for index in order:
        text = _in_alpaca(pairs[index]["prompt"], pairs[index]["response"])
        document = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        ids += [one for one in document if one is not None]
    if len(ids) <= seq_length:
        raise TaskError(
            f"{path}: {len(pairs)} pairs make {len(ids)} tokens, and a row of seq_length = {seq_length} takes one more than"
            " that. Lower seq_length, or give more pairs."
        )
    return PackedSFTDataset(torch.tensor(ids, dtype=torch.int64), seq_length)


def _read_pairs(path: Path) -> list[dict[str, str]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    pairs = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            pair = parse_json(line)
        except ValueError as error:
            raise TaskError(f"{path}:{number}: {error}. Mend or remove the line.") from error
        if not isinstance(pair, dict) or not all(isinstance(pair.get(key), str) for key in ("prompt", "response")):
            raise TaskError(
                f"{path}:{number}: not an object with the texts 'prompt' and 'response'. Correct or remove the line."
            )
        pairs.append(pair)
    return pairs


def iterate_batches(dataset: Dataset[dict[str, Tensor]], batch_size: int, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
    """Batches of one epoch; the last may be smaller. Shuffled by torch's generator again for each iteration."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def compute_per_instance_dpo_loss(
    lm: transformers.PreTrainedModel,
    lm_ref: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """-log σ(β (log π/π_ref of the chosen - the same of the rejected)), a scalar. DPO (arXiv 2305.18290) Eq. 7.

    Each pair is in the Alpaca template and ends with EOS. Log-probs are summed over all tokens: those of the prompt are
    equal in both, and cancel.

    Args:
        lm: carries the gradient; the loss is on its device.
        lm_ref: no gradient flows to it; may be on another device.
        beta: strength of the penalty for moving away from the reference.
    """
    logprobs: list[Tensor] = []
    for response in (response_chosen, response_rejected):
        ids = encode_beginning(tokenizer, _in_alpaca(prompt, response))
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        logprob = _text_logprob(lm, ids)
        with torch.no_grad():
            reference = _text_logprob(lm_ref, ids)
        logprobs += [logprob, reference.to(logprob.device)]
    chosen, reference_chosen, rejected, reference_rejected = logprobs
    return dpo_loss(implicit_margins(chosen, rejected, reference_chosen, reference_rejected, beta=beta))


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The letter of the option that an answer names first ("The correct answer is B."), or that it consists of or begins with
    ("(B)", "B. Because ..."); None if there is none.

    Args:
        mmlu_example: its `options` say how many letters there are.
    """
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(mmlu_example["options"])]
    named = [*_MMLU_ANSWER.finditer(model_output), *filter(None, [_MMLU_LETTER.match(model_output)])]
    return next((match[1] for match in named if match[1] in letters), None)


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of an answer, without thousands separators and dollar signs; None if there is none.

    A minus is a sign only if it touches its number and nothing touches it from the left: not in "5 - 3", "5-3" and a list's
    "- 18". Powers of ten are kept ("5e3"); "1 000" is one number, "1.5.2" is none.
    """
    numbers = [match for match in _NUMBER.finditer(model_output) if match["number"]]
    return ("-" if numbers[-1]["sign"] else "") + re.sub(r"[^\d.eE+-]", "", numbers[-1]["number"]) if numbers else None


def mmlu_letter(task: Task, trajectory: Trajectory) -> float:
    """1 if a response names a choice of four; a function for a part of a reward (`kind = "function"`)."""
    return float(_letter(trajectory) is not None)


def mmlu_right(task: Task, trajectory: Trajectory) -> float:
    """1 if a response names the task's choice of four."""
    return float(_letter(trajectory) == task.answer)


def gsm8k_number(task: Task, trajectory: Trajectory) -> float:
    """1 if a response holds a number."""
    return float(parse_gsm8k_response(written(trajectory)) is not None)


def gsm8k_right(task: Task, trajectory: Trajectory) -> float:
    """1 if the last number of a response is the task's answer."""
    found = parse_gsm8k_response(written(trajectory))
    return float(found is not None and float(found) == float(task.answer.replace(",", "")))


def _letter(trajectory: Trajectory) -> str | None:
    return parse_mmlu_response({"options": "ABCD"}, written(trajectory))


def _in_alpaca(prompt: str, response: str) -> str:
    return load_prompt("alpaca_sft").removesuffix("\n").format(instruction=prompt, response=response)


def _text_logprob(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    row = torch.tensor([ids], device=next(model.parameters()).device)
    return get_response_log_probs(model, row[:, :-1], row[:, 1:])["log_probs"].sum()
