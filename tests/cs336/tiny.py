"""Tokenizers of a few words and a model that is a table, so that every figure can be worked out by hand."""

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCABULARY = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "?", "a", "b", "c", "d"])}
PAD, BOS, EOS, UNKNOWN, A, B, C, D = range(8)


def word_tokenizer(*, adds_bos=True, adds_eos=False, pad_token="<pad>", eos_token="</s>"):
    """One id a word. Where it adds BOS, it does so as Llama's tokenizer: before every text, unless told not to."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    names = {"pad_token": pad_token, "eos_token": eos_token, "bos_token": "<s>" if adds_bos else None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def merging_tokenizer():
    """Letters, of which `a` and `b` merge into one id (2) when they stand together."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Table(torch.nn.Module):
    """The distribution of the next token is a row of a table of logits, chosen by the last token."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.as_tensor(logits))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits[input_ids])


def log_table(probabilities):
    """A table whose rows are given as probabilities, up to a constant that softmax must not see."""
    return Table(torch.tensor(probabilities, dtype=torch.float64).log() + 7.0)
