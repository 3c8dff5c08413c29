"""A random Llama of 30 thousand parameters, and batches of it made by hand."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.algorithms.losses import Aggregation
from strop.training.batch import Row, TokenBatch, pack_rows

VOCABULARY = 61


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,  # sharp enough that log-probs differ
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"by": "hand"}')
    return directory


@pytest.fixture
def make_batch() -> Callable[..., TokenBatch]:
    """Rows of random ids: a prompt of 3, two sampled, two observed, the rest sampled; two rows a group."""

    def make(
        lengths: tuple[int, ...] = (9, 14, 11, 7, 14, 8),
        *,
        seed: int = 0,
        temperature: float = 0.7,
        aggregation: Aggregation = Aggregation.GROUP_TOKEN_MEAN,
    ) -> TokenBatch:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for index, length in enumerate(lengths):
            ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
            advantage = float(torch.randn((), generator=generator))
            rows.append(
                Row(
                    ids=ids,
                    loss_mask=([False] * 3 + [True] * 2 + [False] * 2 + [True] * length)[:length],
                    advantages=torch.full((length,), advantage),
                    sampled_logprobs=[-4.0] * length,
                    group=index // 2,
                )
            )
        return pack_rows(rows, aggregation=aggregation, temperature=temperature)

    return make


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return asyncio.run
