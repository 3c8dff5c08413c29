"""vLLM with a real model, in bfloat16: the figures that decide whether what it samples can be trained on."""

import asyncio
import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.engine.model_directory import ModelFacts, directory_checksum
from strop.engine.protocol import Entropies
from strop.engine.publication import Publication
from strop.types import FinishReason

from ..support import make_request, publish
from . import vllm_servers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
MODEL = Path(__file__).resolve().parents[3] / "models" / "smollm2-135m"
QUESTIONS = [f"Question {number}: what is {number} times {number + 3}?\nAnswer: let us think. " for number in range(8)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    config = vllm_servers.make_config(slots=8, max_length=256, dtype="bfloat16")
    with asyncio.Runner() as runner:
        home = vllm_servers.start(runner, MODEL, folder, config)
        yield home
        runner.run(home.server.close())


@pytest.fixture(scope="module")
def library():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)


async def _converse(engine, tokenizer, name, question, temperature):
    """Two turns with an observation between them: ids, {place: log-prob}, cached and given tokens of the second turn."""
    ids = tokenizer.encode(question)
    first = await engine.complete(make_request(f"{name}/0", ids, max_tokens=64, temperature=temperature, seed=len(ids)))
    so_far = [*ids, *first.ids]
    figures = {len(ids) + index: logprob for index, logprob in enumerate(first.logprobs)}
    ids = [*so_far, *tokenizer.encode("\nTool: 42\n")]
    request = make_request(
        f"{name}/1", ids, max_tokens=64, temperature=temperature, seed=len(ids), extends=f"{name}/0", at=len(so_far)
    )
    second = await engine.complete(request)
    figures |= {len(ids) + index: logprob for index, logprob in enumerate(second.logprobs)}
    await engine.release(request.id)
    return [*ids, *second.ids], figures, second.cached_tokens, len(so_far)


def _library(model, ids, temperature):
    """(T, V) log-probs of the full forward."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)


def _gap(ids, figures, exact, said):
    """Of the sampled tokens: what the server said, or else what `said` says, less what is exact."""
    return torch.tensor(
        [
            (logprob if said is None else said[place - 1, ids[place]].item()) - exact[place - 1, ids[place]].item()
            for place, logprob in figures.items()
        ]
    )


@pytest.mark.parametrize(("temperature", "bound"), [(1.0, 0.03), (0.7, 0.02)])
def test_bfloat16_logprobs_are_close_to_the_model_librarys_in_float32_from_the_same_weights(home, library, temperature, bound):
    model, tokenizer = library

    async def scenario():
        engine = home.engine()
        await publish(engine, model, version=3)
        return await asyncio.gather(*(_converse(engine, tokenizer, q, q, temperature) for q in QUESTIONS))

    plays = home.run(scenario())
    half = copy.deepcopy(model).to(torch.bfloat16)
    held = copy.deepcopy(half).float()  # the weights that were published, exactly
    ours, rounding, theirs = [], [], []
    for number, (ids, figures, *_) in enumerate(plays):
        exact = _library(held, ids, temperature)
        ours.append(_gap(ids, figures, exact, None))
        rounding.append(_gap(ids, figures, _library(model, ids, temperature), exact))
        if number < 3:  # bfloat16 is slow here, and one conversation already tells
            theirs.append(_gap(ids, figures, exact, _library(half, ids, temperature)))
    ours, rounding, theirs = torch.cat(ours), torch.cat(rounding), torch.cat(theirs)
    mean, p99, ratio = ours.abs().mean().item(), ours.abs().quantile(0.99).item(), (-ours).exp().mean().item()
    figures = (
        f"temperature {temperature}, {len(ours)} tokens: mean {mean:.4f}, p99 {p99:.4f}, mean importance ratio {ratio:.4f};"
        f" the library in bfloat16: mean {theirs.abs().mean().item():.4f}, p99 {theirs.abs().quantile(0.99).item():.4f}; to the"
        " weights before they were rounded: mean"
        f" {(ours + rounding).abs().mean().item():.4f}, of which rounding {rounding.abs().mean().item():.4f}"
    )
    logging.getLogger(__name__).info("%s", figures)
    assert mean <= min(bound, 0.8 * theirs.abs().mean().item()), figures  # see docs/decisions.md
    assert rounding.abs().mean() <= 0.015, figures
    assert p99 <= 0.15 / temperature, figures  # logits are divided by it, and so are their errors
    assert abs(ratio - 1) <= 0.01, figures
    assert all(cached >= known // 32 * 32 for _, _, cached, known in plays)  # every whole block


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(home, library):
    _, tokenizer = library

    async def scenario():
        engine = home.engine()
        await engine.load_weights(Publication.in_files(home.model.directory, version=0, checksum=directory_checksum(MODEL)))
        ids = tokenizer.encode(QUESTIONS[0])
        return await engine.complete(make_request("a", ids, max_tokens=200, stop_strings=(".\n", " the"), seed=3))

    completion = home.run(scenario())
    text = tokenizer.decode(completion.ids)
    assert completion.finish_reason is FinishReason.STOP
    assert " the" in text or ".\n" in text
    before = tokenizer.decode(completion.ids[:-1])
    assert " the" not in before
    assert ".\n" not in before


def test_the_directory_says_what_the_server_needs(home):
    assert home.model == ModelFacts.of(MODEL)
    assert home.model.has_tokenizer
    assert home.server.capacity.total_tokens >= 8 * 256


def test_estimated_entropies_are_a_little_too_large_and_rank_tokens_as_the_full_ones_do(home, library):
    model, tokenizer = library
    prompts = [tokenizer.encode(each) for each in QUESTIONS]

    async def scenario():
        engine = home.engine()
        await publish(engine, model, version=5)
        keys = {"max_tokens": 64, "entropies": Entropies.FULL}
        asked = [make_request(f"e{at}", ids, seed=at, **keys) for at, ids in enumerate(prompts)]
        return await asyncio.gather(*map(engine.complete, asked))

    estimated, full = [], []
    for ids, completion in zip(prompts, home.run(scenario()), strict=True):
        estimated += completion.entropies
        said = _library(model, [*ids, *completion.ids], 1.0)[len(ids) - 1 : -1]
        full += torch.distributions.Categorical(logits=said).entropy().tolist()
    both = torch.tensor([estimated, full])
    figures = f"{len(full)} tokens: {both.mean(1).tolist()} nats, correlation {torch.corrcoef(both)[0, 1]:.4f}"
    logging.getLogger(__name__).info("%s", figures)
    assert 0 < (both[0] - both[1]).mean() < 1, figures  # see docs/engines.md
    assert torch.corrcoef(both)[0, 1] > 0.98, figures
