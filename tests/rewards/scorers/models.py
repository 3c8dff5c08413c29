"""A tiny reward model on disk, with a tokenizer that has a chat template."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.rewards.reward_model import ExchangeFormat, begin_reward_model, head_of
from strop.stages.model import make_tokenizer


def make_language_model(directory):
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["what is it", "it is good", "it is bad"], vocab_size=300)
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_reward_model(language_model, directory):
    """With a head that was drawn, so that scores differ."""
    exchanges = ExchangeFormat(language_model)
    model = begin_reward_model(language_model, pad_id=exchanges.pad_id)
    torch.manual_seed(1)
    torch.nn.init.normal_(head_of(model), std=0.3)
    model.save_pretrained(directory)
    exchanges.tokenizer.save_pretrained(directory)
    return directory
