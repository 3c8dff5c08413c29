"""The families that the trainer is for: one update of each has the gradient of the model library's own full forward."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column
from strop.training import OptimizerConfig, Trainer, TrainerConfig
from strop.training.models import load_model

METHOD = GRPO(clamp_log_ratios=False, kl_coefficient=0.1, aggregation=Aggregation.SEQUENCE_MEAN)
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # sharp enough that log-probs differ
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),  # biases of queries, keys and values
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),  # norms of queries and keys, heads of their own width
}


def random_directory(name, directory, seed):
    """A model whose biases and norms are random too, so that what leaves one out is seen."""
    torch.manual_seed(seed)
    model = FAMILIES[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def plain_loss(model, reference, batch):
    """GRPO Eq. 1 with its KL in loops: row by row without padding, mean over the tokens of a row, then over rows."""
    old = batch.columns[Column.OLD_LOGPROBS]
    of_rows = []
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.ids[row, :length]
        policy, other = (
            torch.log_softmax(each(input_ids=ids[None]).logits[0] / batch.temperature, -1) for each in (model, reference)
        )
        terms = []
        for place in range(1, length):
            if batch.loss_mask[row, place]:
                logprob, advantage = policy[place - 1, ids[place]], batch.advantages[row, place]
                ratio = (logprob - old[row, place]).exp()
                rho = other[place - 1, ids[place]].detach() - logprob
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                terms.append(gain - 0.1 * (rho.exp() - rho - 1))
        of_rows.append(torch.stack(terms).mean())
    return -torch.stack(of_rows).mean()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", [True, False])
def test_an_update_has_the_gradient_of_the_plain_formula(family, packing, tmp_path, make_batch):
    policy, reference = (random_directory(family, tmp_path / str(seed), seed) for seed in (0, 1))
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2, grad_clip=0.0), packing=packing, max_tokens_per_microbatch=60)
    trainer = Trainer.from_directory(policy, config, reference=reference)
    batch = make_batch((30, 34, 11, 7, 14, 8), aggregation=METHOD.aggregation)
    ids = batch.ids.clone()
    ids[1, :20] = ids[0, :20]  # a beginning that packed rows share
    batch = replace(batch, ids=ids)
    noise = 0.4 * torch.randn(ids.shape, generator=torch.Generator().manual_seed(5))
    captured = {}
    trainer.learner.optimization.optimizer.step = lambda: captured.update(
        {name: parameter.grad.clone() for name, parameter in trainer.learner.weights.named().items()}
    )

    async def update():
        scored = await trainer.score(await trainer.score(batch, Column.OLD_LOGPROBS), Column.REFERENCE_LOGPROBS)
        old = scored.columns[Column.OLD_LOGPROBS] + noise * batch.loss_mask
        scored = replace(scored, columns={**scored.columns, Column.OLD_LOGPROBS: old})
        report = await trainer.update(scored, METHOD.token_loss, METHOD.token_statistics)
        await trainer.close()
        return scored, report

    scored, report = asyncio.run(update())
    model, other = (load_model(each).eval() for each in (policy, reference))
    loss = plain_loss(model, other, scored)
    loss.backward()
    assert report.statistics["clip_fraction_high"] > 0  # the formula must have seen clipping
    assert report.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for name, parameter in model.named_parameters():
        assert (captured[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
