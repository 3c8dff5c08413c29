"""Makes a model from nothing: a small Llama with random weights and a tokenizer trained on the texts it will see."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from strop.pipelines.recipe import TinyModel

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<reason>",
    "</reason>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Sequence[str], *, vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: digits and operators single, chat and tool tags special, phrases of `texts` as one token.

    Words are not split at spaces before merging, so that what every text repeats costs few tokens. A formula, on the other
    hand, is the same tokens wherever it stands, so that copying one is copying tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9()+*/-]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_between_tags(texts), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _between_tags(texts: Sequence[str]) -> Iterator[str]:
    tag = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for text in texts:
        yield from (piece for piece in tag.split(text) if piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySize:
    """What a new model came to."""

    num_parameters: int
    vocab_size: int


def make_tiny_model(config: TinyModel, texts: Sequence[str], directory: Path, *, seed: int) -> TinySize:
    """Write model and tokenizer into `directory`, as any `transformers` model.

    The vocabulary is smaller than asked for where `texts` have no more pairs to merge.
    """
    tokenizer = make_tokenizer(texts, vocab_size=config.vocab_size)
    llama = tiny_llama_config(config, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(llama)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return TinySize(num_parameters=sum(parameter.numel() for parameter in model.parameters()), vocab_size=len(tokenizer))


def tiny_llama_config(config: TinyModel, *, vocab_size: int, eos_token_id: int) -> transformers.LlamaConfig:
    """The sizes of `config` in transformers' words; the embedding is tied to the head."""
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_length,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
