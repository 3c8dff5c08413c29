"""A reward model that was trained here, behind vLLM's pooling runner. Run by `make test-vllm`."""

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.errors import UserError
from strop.rewards.reward_model import ExchangeFormat
from strop.rewards.scorers import EmbeddedScorerConfig, Exchange, VllmScorerConfig, open_scorer
from strop.stages.model import make_tokenizer
from strop.training.config import OptimizerConfig, TrainerConfig
from strop.training.preferences import Pair, as_rows
from strop.training.reward_model import RewardTrainer

from .vllm_service import start_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
MAX_LENGTH, BATCHED = 512, 128  # of a row, and of what the server computes at once: longer rows are prefilled in parts
SERVED = "politeness"
WORDS = "please kindly thank you would now give me that at once"
PAIRS = [Pair(prompt=f"Ask for {n}.", chosen=f"please, {n}, kindly", rejected=f"give me {n} now") for n in range(8)]
# A response that spells out the end of its turn, an empty one, and lengths on both sides of the parts.
EXCHANGES = [
    *(Exchange(prompt="Ask for 3.", response=text) for text in ("please, 3, kindly", "give me 3 now", "", "<|im_end|>")),
    *(Exchange(prompt="Ask at length.", response=" ".join(WORDS.split()[n % 11] for n in range(size))) for size in (9, 40, 99)),
]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """Trained until it has an opinion: a head at zero would agree with anything."""
    base, directory = tmp_path_factory.mktemp("language_model"), tmp_path_factory.mktemp("reward_model")
    tokenizer = make_tokenizer(["Ask for", WORDS], vocab_size=300)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=MAX_LENGTH, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(base)

    async def train():
        trainer = RewardTrainer(base, TrainerConfig(optimizer=OptimizerConfig(lr=0.01)), total_updates=None)
        rows = list(as_rows(PAIRS, trainer.exchanges, judged_on="response", think_tag="think", max_length=MAX_LENGTH))
        try:
            for _ in range(12):
                await trainer.update(rows)
            await trainer.save_model(directory)
        finally:
            await trainer.close()

    asyncio.run(train())
    return directory


def served(directory, folder, scenario):
    """What `scenario` returns, given the address of a server of `directory`."""
    options = {
        "--served-model-name": SERVED,
        "--runner": "pooling",
        "--dtype": "float32",
        "--max-model-len": MAX_LENGTH,
        "--max-num-batched-tokens": BATCHED,
        "--max-num-seqs": 8,
        "--kv-cache-memory-bytes": 16 << 20,
    }

    async def run():
        server = await start_vllm(directory, folder, options)
        try:
            return await scenario(server.address)
        finally:
            await server.close()

    return asyncio.run(run())


async def ask(config, exchanges):
    scorer = open_scorer(config)
    try:
        return await asyncio.gather(*map(scorer.score, exchanges))
    finally:
        await scorer.close()


def test_a_trained_reward_model_says_the_same_behind_vllm_as_in_this_process(reward_model, tmp_path):
    lengths = [len(ExchangeFormat(reward_model).ids(each)) for each in EXCHANGES]
    assert min(lengths) < 40
    assert BATCHED < max(lengths) < MAX_LENGTH
    too_long = Exchange(prompt="Ask at length.", response=WORDS * 99)
    at_home = asyncio.run(ask(EmbeddedScorerConfig(kind="embedded", path=str(reward_model)), EXCHANGES))

    async def scenario(address):
        config = VllmScorerConfig(kind="vllm", url=address, model=SERVED, path=str(reward_model), retries=0)
        there = await ask(config, EXCHANGES)
        with_one_too_long = await ask(config, [*EXCHANGES[:3], too_long, *EXCHANGES[3:]])
        with pytest.raises(UserError, match="serve a model called 'another'"):
            await ask(config.model_copy(update={"model": "another"}), EXCHANGES[:1])
        return there, with_one_too_long

    there, with_one_too_long = served(reward_model, tmp_path, scenario)
    spread = max(at_home) - min(at_home)
    assert max(map(abs, at_home)) > 1  # which no activation of a probability would give
    assert spread > 1
    # Both compute in float32, in another order: 1e-4 of what lies between a polite and a rude one.
    assert there == pytest.approx(at_home, abs=1e-4 * spread)
    assert with_one_too_long[3] is None
    assert [*with_one_too_long[:3], *with_one_too_long[4:]] == pytest.approx(at_home, abs=1e-4 * spread)
