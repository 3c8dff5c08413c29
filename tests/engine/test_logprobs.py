"""The engine's log-probs against the model library's own full forward, without cache."""

import asyncio
import copy

import pytest
import torch

from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine

from .support import MODEL_NAMES, VOCAB_SIZE, make_model, make_request, publish


async def _play(engine, name, *, temperature, seed, num_turns=3):
    """One conversation; returns its ids and, for each sampled position, (logprob, entropy)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE, (5 + 20 * (seed % 3),), generator=generator).tolist()
    figures, last, at = {}, "", 0
    for turn in range(num_turns):
        request = make_request(
            f"{name}/{turn}", ids, max_tokens=20, temperature=temperature, seed=seed, extends=last, at=at, stop_ids={3}
        )
        completion = await engine.complete(request)
        figures |= {
            len(ids) + index: pair for index, pair in enumerate(zip(completion.logprobs, completion.entropies, strict=True))
        }
        ids = [*ids, *completion.ids]
        last, at = request.id, len(ids)
        ids += torch.randint(VOCAB_SIZE, (1 + 10 * turn,), generator=generator).tolist()
    await engine.release(last)
    return ids, figures


def _gaps(model, ids, figures, temperature):
    """|ours - the library's| of every sampled token: log-probs, entropies."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    places = torch.tensor(sorted(figures))
    ours = torch.tensor([figures[place] for place in places.tolist()])
    theirs = torch.stack((logprobs[places - 1, torch.tensor(ids)[places]], entropies[places - 1]), 1)
    return (ours - theirs).abs()


def _play_many(model, config, temperature):
    async def scenario():
        engine = TorchEngine(model.config, config)
        await publish(engine, model)
        try:
            plays = (_play(engine, f"{seed}", temperature=temperature, seed=seed) for seed in range(6))
            return await asyncio.gather(*plays)
        finally:
            await engine.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logprobs_and_entropies_are_those_of_the_model_librarys_full_forward(name, temperature):
    model = make_model(name)
    config = EngineConfig(slots=4, max_length=200, device="cpu")  # fewer slots than conversations
    for ids, figures in _play_many(model, config, temperature):
        assert _gaps(model, ids, figures, temperature).max() < 1e-4


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_bfloat16_is_as_close_to_float32_as_the_library_in_bfloat16(name):
    model = make_model(name, scale=1 / 3)
    config = EngineConfig(slots=4, max_length=200, device="cpu", dtype="bfloat16")
    plays = _play_many(model, config, 1.0)
    ours = torch.cat([_gaps(model, ids, figures, 1.0)[:, 0] for ids, figures in plays]).mean()
    half = copy.deepcopy(model).to(torch.bfloat16)
    theirs = torch.cat([_library_gaps(model, half, ids, figures) for ids, figures in plays]).mean()
    assert ours < 0.02
    assert ours < 1.25 * theirs


def _library_gaps(model, half, ids, figures):
    """|bfloat16 - float32| of the library's log-probs of the same tokens."""
    places = torch.tensor(sorted(figures))
    with torch.no_grad():
        exact, rounded = (each(torch.tensor([ids])).logits[0].float().log_softmax(-1) for each in (model, half))
    return (exact - rounded).abs()[places - 1, torch.tensor(ids)[places]]
