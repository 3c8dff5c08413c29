"""What an update costs: products that can be counted by hand, and figures that come with a report."""

import asyncio

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from strop.engine.config import measured_flops_per_s
from strop.training import Trainer, TrainerConfig
from strop.training.learner import ModelProducts, update_flops
from strop.training.sft import Demonstration, Segment, pack_demonstrations, sft_token_loss, sft_token_statistics

CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)


def demonstrations(*rows):
    return pack_demonstrations(
        [
            Demonstration(
                segments=(Segment(ids=tuple(prompt), is_demonstrator=False), Segment(ids=tuple(ids), is_demonstrator=True))
            )
            for prompt, ids in rows
        ]
    )


def test_products_are_those_of_the_matrices_of_the_head_and_of_tokens_that_see_each_other():
    products = ModelProducts.of(LlamaForCausalLM(CONFIG))
    assert products.layers == 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12)  # q, k, v, o and the MLP, twice
    assert products.head == 20 * 8
    assert products.attention == 2 * 2 * 8  # scores and their sums, in two layers, of two heads with 4 channels
    # Of rows of 5 with 3 in common 7 tokens are computed; they see 1+2+3+4+5 and 4+5 tokens; 4 are trained on.
    assert products.flops([5, 5], [0, 3], 4) == 2 * 3 * (960 * 7 + 160 * 4 + 32 * 24)


def test_products_agree_with_those_that_torch_counts():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    ids = torch.randint(20, (1, 17))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, :-1]).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(flops for operation, flops in counts.items() if "mm" in str(operation))
    products = ModelProducts.of(model)
    assert linear == 2 * 3 * 16 * (products.layers + products.head)


def test_a_prompt_that_rows_of_a_pack_share_is_counted_once_and_so_is_nothing_after_the_last_trained_token():
    prompt = list(range(1, 20)) * 2
    batch = demonstrations((prompt, [1, 2, 3]), (prompt, [4, 5, 6, 7]))
    products = ModelProducts.of(LlamaForCausalLM(CONFIG))
    packed, in_all, _ = update_flops(products, batch, TrainerConfig(max_tokens_per_microbatch=1000))
    padded, _, flops = update_flops(products, batch, TrainerConfig(max_tokens_per_microbatch=1000, packing=False))
    alone, _, of_alone = update_flops(products, batch, TrainerConfig(max_tokens_per_microbatch=10))
    assert packed == 38 + 2 + 3  # the last token of each is predicted alone
    assert padded == alone == in_all == 2 * 38 + 2 + 3
    assert flops == of_alone


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}])
def test_an_update_tells_its_cost_and_a_skipped_one_has_none(model_directory, settings):
    trainer = Trainer.from_directory(model_directory, TrainerConfig(**settings))
    batch = demonstrations(([1, 2, 3], [4, 5, 6]))
    report = asyncio.run(trainer.update(batch, sft_token_loss, sft_token_statistics))
    assert report.cost.tokens == 5
    assert report.cost.flops == ModelProducts.of(trainer.learner.model).flops([5], [0], 3)
    assert report.cost.time_s > 0
    assert report.cost.peak_memory_mib > 50
    assert report.cost.peak_flops_per_s == measured_flops_per_s(
        torch.device("cpu"), getattr(torch, settings.get("precision", "float32"))
    )
    nothing = asyncio.run(trainer.update(demonstrations(([1, 2, 3], [])), sft_token_loss, sft_token_statistics))
    assert nothing.is_skipped
    assert nothing.cost is None
