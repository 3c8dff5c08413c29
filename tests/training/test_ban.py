"""Stop ids that could not be drawn at the first tokens of a completion have no probability there, on both sides."""

import asyncio
from dataclasses import replace

import pytest
import torch
from scored_tokens import token_logprobs
from test_batch import selection, turn
from transformers import AutoModelForCausalLM

from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column
from strop.engine.config import EngineConfig
from strop.engine.opening import open_engines
from strop.engine.protocol import CompletionRequest
from strop.training import pack
from strop.training.batch import Ban, microbatches
from strop.training.config import TrainerConfig
from strop.training.models import load_model
from strop.training.trainer import Trainer

STOPS = frozenset(range(30))  # half of the vocabulary: a ban that is forgotten shows
MIN_TOKENS, TEMPERATURE = 3, 0.7


def packed(turns, ban):
    chosen = selection(0, [((7, 8, 9), turns)])
    return pack(
        [chosen],
        [[torch.ones(len(scored.trajectory.ids)) for scored in chosen.kept]],
        aggregation=Aggregation.TOKEN_MEAN,
        temperature=TEMPERATURE,
        ban=ban,
    )


def test_the_ban_lies_on_the_first_tokens_of_every_completion_that_were_sampled():
    turns = (turn((40, 41, 42, 5), (0.0,) * 4, observation_ids=(50, 51)), turn((43, 44), (0.0,) * 2, is_forced=(True, False)))
    batch = packed(turns, Ban(ids=STOPS, num_tokens=MIN_TOKENS))
    #                                prompt      completion  seen   forced, sampled
    assert batch.is_banned[0].int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert batch.banned_ids == tuple(range(30))
    assert not packed(turns, Ban(ids=STOPS, num_tokens=0)).is_banned.any()


def test_the_ban_goes_with_its_rows_into_microbatches(make_batch):
    batch = make_batch()
    flags = torch.arange(batch.ids.numel()).view(batch.ids.shape) % 3 == 0
    batch = replace(batch, is_banned=flags & batch.loss_mask, banned_ids=(3, 4))
    for part in microbatches(batch, 20):
        assert torch.equal(part.batch.is_banned, batch.is_banned[part.rows, : part.batch.ids.shape[1]])
        assert part.batch.banned_ids == (3, 4)


@pytest.mark.parametrize("in_cache", [61 * 3, 2**26])
@pytest.mark.parametrize("max_logits", [61 * 4, 2**26])
def test_logprobs_entropies_and_gradients_are_those_of_the_vocabulary_without_the_banned_ids(
    model_directory, make_batch, monkeypatch, max_logits, in_cache
):
    monkeypatch.setattr("strop.training.logprobs._LOGITS_IN_CACHE", in_cache)
    model, batch = load_model(model_directory).eval(), make_batch()
    is_banned = batch.loss_mask & (batch.ids >= len(STOPS))  # a banned id cannot have been drawn
    assert is_banned.any()
    assert (batch.loss_mask & ~is_banned).any()
    factors = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(1))
    logprobs, entropies = token_logprobs(
        model,
        batch.ids,
        batch.loss_mask,
        temperature=TEMPERATURE,
        max_logits=max_logits,
        is_banned=is_banned,
        banned_ids=tuple(STOPS),
    )
    (logprobs * factors + entropies * factors.flip(1)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1] / TEMPERATURE
    allowed = logits[..., len(STOPS) :].log_softmax(-1)
    whole = logits.log_softmax(-1)
    targets, where, under = batch.ids[:, 1:, None], batch.loss_mask[:, 1:], is_banned[:, 1:]
    of_allowed = allowed.gather(-1, (targets - len(STOPS)).clamp(min=0)).squeeze(-1)
    expected = torch.where(under, of_allowed, whole.gather(-1, targets).squeeze(-1)) * where
    spread = torch.where(under, -(allowed.exp() * allowed).sum(-1), -(whole.exp() * whole).sum(-1)) * where
    (expected * factors[:, 1:] + spread * factors.flip(1)[:, 1:]).sum().backward()
    torch.testing.assert_close(logprobs[:, 1:], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies[:, 1:], spread, rtol=0, atol=3e-6)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 2e-6 * parameter.grad.norm()


def test_the_trainer_scores_what_the_engine_sampled_under_min_tokens(model_directory, tmp_path):
    config = EngineConfig(device="cpu", slots=24, max_length=64)
    requests = [
        CompletionRequest(
            id=f"r{seed}",
            ids=(7, 8, 9),
            max_tokens=8,
            stop_ids=STOPS,
            temperature=TEMPERATURE,
            seed=seed,
            min_tokens=MIN_TOKENS,
        )
        for seed in range(24)
    ]

    async def compare():
        [engine] = await open_engines(model_directory, config, detokenize=lambda ids: "", logs=tmp_path)
        trainer = Trainer.from_directory(model_directory, TrainerConfig(device="cpu"))
        try:
            await trainer.publish(engine, version=0)
            done = await asyncio.gather(*(engine.complete(request) for request in requests))
            chosen = selection(0, [((7, 8, 9), (turn(each.ids, each.logprobs),)) for each in done])
            gaps = []
            for num_tokens in (MIN_TOKENS, 0):
                batch = pack(
                    [chosen],
                    [[torch.ones(len(scored.trajectory.ids)) for scored in chosen.kept]],
                    aggregation=Aggregation.TOKEN_MEAN,
                    temperature=TEMPERATURE,
                    ban=Ban(ids=STOPS, num_tokens=num_tokens),
                )
                scored = await trainer.score(batch, Column.OLD_LOGPROBS)
                gap = (scored.columns[Column.OLD_LOGPROBS] - batch.sampled_logprobs)[batch.loss_mask].abs()
                gaps.append(gap.max().item())
            return done, gaps
        finally:
            await engine.close()
            await trainer.close()

    done, (with_ban, without) = asyncio.run(compare())
    assert all(not STOPS & set(each.ids[:MIN_TOKENS]) for each in done)
    assert any(STOPS & set(each.ids) for each in done)  # the ban ends: stop ids are drawn behind it
    assert with_ban < 1e-4
    assert without > 0.05  # what the trainer would see if it knew of no ban


def test_a_model_that_transformers_loads_says_the_same(model_directory):
    """The ban is on ids, whatever the head: the first of them is the id 0, which padding has, too."""
    model = AutoModelForCausalLM.from_pretrained(model_directory).eval()
    ids = torch.tensor([[7, 8, 40]])
    where = torch.tensor([[False, False, True]])
    logprobs, _ = token_logprobs(model, ids, where, temperature=1.0, is_banned=where, banned_ids=(0,))
    logits = model(input_ids=ids).logits[0, 1]
    logits[0] = -torch.inf
    assert logprobs[0, 2].item() == pytest.approx(logits.log_softmax(-1)[40].item(), abs=1e-6)
