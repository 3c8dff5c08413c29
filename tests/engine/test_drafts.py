"""Drafts change how many steps a completion takes, and nothing else about it."""

import asyncio
import math

import pytest
import torch

from strop.engine.config import EngineConfig
from strop.engine.protocol import Probe
from strop.engine.torch.batch import DraftTimes
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.kv_cache import ConversationTable
from strop.types import FinishReason

from .support import VOCAB_SIZE, make_model, make_request, publish

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def sampled(monkeypatch):
    """Completions of requests one after the other, and the number of steps of those that are not together with others.

    There are `length` drafts at each step that has room.
    """

    def sample(requests, *, length, model=None, **settings):
        def choose(_, most):
            sample.rooms.append(most)
            return max(each for each in (0, 1, 2, 4, 8) if each <= min(length, most))

        monkeypatch.setattr(DraftTimes, "choose", choose)
        model = model or make_model("llama", scale=1.5)  # so sharp that attempts resemble each other
        config = EngineConfig(**{"slots": 8, "max_length": 200, "device": "cpu", **settings})

        async def scenario():
            engine = TorchEngine(model.config, config, detokenize=lambda ids: "".join(f"<{each}>" for each in ids))
            try:
                await publish(engine, model)
                completions, num_steps = [], 0
                for together in requests:
                    before = engine.num_steps
                    completions += await asyncio.gather(*map(engine.complete, together))
                    if len(together) == 1:  # others may arrive between two steps, which takes more of them
                        num_steps += engine.num_steps - before
                    for request in together:
                        await engine.release(request.id)
                return completions, num_steps
            finally:
                await engine.close()

        return asyncio.run(scenario())

    sample.rooms = []  # for drafts of each conversation, by step
    return sample


def attempts(num_tokens=40, **changes):
    """Twelve at one prompt: one, then four together, then one by one."""
    made = [make_request(f"{seed}", PROMPT, seed=seed, max_tokens=num_tokens, **changes) for seed in range(12)]
    return [made[:1], made[1:5], *([each] for each in made[5:])]


def bits(completions):
    return [(each.ids, each.logprobs, each.entropies, each.finish_reason) for each in completions]


@pytest.mark.parametrize(
    ("name", "dtype", "deterministic"),
    [("llama", "float32", True), ("qwen3", "bfloat16", True), ("llama", "float32", False)],
)
@pytest.mark.parametrize("length", [1, 4])
def test_completions_are_the_same_and_take_fewer_steps(sampled, name, dtype, deterministic, length):
    settings = {"model": make_model(name, scale=1.5), "dtype": dtype, "deterministic": deterministic}
    plain, num_plain = sampled(attempts(), length=0, **settings)
    drafted, num_drafted = sampled(attempts(), length=length, **settings)
    if deterministic:
        assert bits(drafted) == bits(plain)
    for with_drafts, without in zip(drafted, plain, strict=True):
        assert with_drafts.ids == without.ids
        assert with_drafts.logprobs == pytest.approx(without.logprobs, abs=1e-4)
    assert num_drafted < num_plain
    assert sum(each.drafted_tokens for each in plain) == 0
    assert sum(each.drafted_tokens for each in drafted) >= num_plain - num_drafted


@pytest.mark.parametrize(("slots", "alone", "four"), [(8, 7, 1), (64, 23, 5)])
def test_drafts_fill_a_step_up_to_24_rows(sampled, slots, alone, four):
    first, together, *_ = attempts()
    sampled([first], length=0, slots=slots)
    assert set(sampled.rooms) == {alone}
    sampled([together], length=0, slots=slots)
    assert min(sampled.rooms) == four


@pytest.mark.parametrize("seed", range(4))
def test_a_completion_ends_inside_of_a_draft_where_it_would_end_without(sampled, seed):
    free, _ = sampled([[make_request("free", PROMPT, seed=seed, max_tokens=30)]], length=0)
    ids = free[0].ids
    first = make_request("first", PROMPT, seed=seed, max_tokens=30)  # its repetitions are drafted in full
    changes = [
        {"max_tokens": 9},
        {"stop_ids": frozenset(ids[11:12])},
        {"stop_strings": (f"<{ids[13]}><{ids[14]}>",)},
        {"stop_ids": frozenset(ids[:20]), "min_tokens": 12},
        {"temperature": 0.0},
    ]
    again = [[make_request(f"{n}", PROMPT, **{"seed": seed, "max_tokens": 30, **each})] for n, each in enumerate(changes)]
    plain, _ = sampled([[first], *again], length=0)
    drafted, _ = sampled([[first], *again], length=8)
    assert bits(drafted) == bits(plain)
    assert [each.finish_reason for each in drafted[1:4]] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
    assert any(each.drafted_tokens for each in drafted[1:4])


def test_a_probe_gets_its_entropies_and_a_fork_inherits_the_drafts(sampled):
    told = []
    probe = Probe(num_tokens=3, tell=told.append)
    first, again = (make_request(name, PROMPT, max_tokens=12, probe=probe) for name in ("first", "again"))
    drafted, _ = sampled([[first], [again]], length=8)
    assert told == [each.entropies[:3] for each in drafted]
    ids = [*PROMPT, *drafted[0].ids]
    fork = make_request("fork", ids[:12], extends="first", at=12, seed=0, max_tokens=40)
    (_, plain), (_, forked) = (sampled([[first], [fork]], length=length)[0] for length in (0, 8))
    assert bits([forked]) == bits([plain])
    assert forked.drafted_tokens > 0


def test_frequencies_after_drafts_are_the_models_probabilities(sampled):
    model, num_draws = make_model("llama"), 800
    settings = {"max_tokens": 2, "temperature": 0.7}
    requests = [[make_request(f"{seed}", PROMPT, seed=seed, **settings)] for seed in range(num_draws)]
    completions, num_steps = sampled(requests, length=4, model=model)
    assert num_steps < 3 * num_draws  # a prompt and two tokens
    assert sum(each.drafted_tokens for each in completions) > 0.1 * num_draws
    with torch.no_grad():
        first = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.7).softmax(-1)
        contexts = torch.tensor([[*PROMPT, each] for each in range(VOCAB_SIZE)])
        second = (model(contexts).logits[:, -1] / 0.7).softmax(-1)
    pairs = first.unsqueeze(1) * second  # (first, second)
    counts = torch.zeros_like(pairs)
    for completion in completions:
        counts[completion.ids] += 1
    likely = pairs > 0.004
    deviations = (counts - num_draws * pairs) / (num_draws * pairs * (1 - pairs)).sqrt()
    assert deviations[likely].abs().max() < 4.5  # standard deviations
    num_expected = num_draws * pairs[~likely].sum().item()
    assert counts[~likely].sum().item() == pytest.approx(num_expected, abs=4 * math.sqrt(num_expected))


def test_a_draft_is_what_followed_the_longest_known_context_most_often():
    table = ConversationTable(8)
    first = table.open(make_request("first", [1, 2]), {}, opening=(1, 2))
    first.ids += [3, 4, 5, 9, 4, 6, 9, 4, 6]
    other = table.open(make_request("other", [1, 2]), {}, opening=(1, 2))
    assert other.attempts.draft(other, 3) == [3, 4, 5]
    other.ids += [7, 4]
    assert other.attempts.draft(other, 2) == [6, 9]  # 4 was followed by 5 once and by 6 twice
    other.ids += [8]
    assert other.attempts.draft(other, 2) == []  # 8 was never followed
    stranger = table.open(make_request("stranger", [2, 1]), {}, opening=(2, 1))
    assert stranger.attempts.draft(stranger, 3) == []


def test_the_fastest_length_is_used_and_the_others_are_measured_now_and_then():
    seconds = {0: 1.0, 1: 1.1, 2: 1.3, 4: 4.0}
    kept = {0: 1.0, 1: 1.5, 2: 1.6, 4: 1.7}

    def choices(times, most, num_steps):
        chosen = []
        for _ in range(num_steps):
            chosen.append(times.choose(most))
            times.note(chosen[-1], seconds[chosen[-1]], kept[chosen[-1]])
        return chosen

    times = DraftTimes()
    chosen = choices(times, 5, 340)
    assert set(chosen[:16]) == {0, 1, 2, 4}
    assert 300 < chosen.count(1) < 330
    seconds[1] = 3.0  # slower than none
    assert choices(times, 1, 64).count(0) > 50
    assert choices(times, 0, 4) == [0] * 4
