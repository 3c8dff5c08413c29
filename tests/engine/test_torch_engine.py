"""What the embedded engine adds to the protocol: sharing, sampling, publication, failure."""

import asyncio
import math
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from strop.engine.config import EngineConfig
from strop.engine.model_directory import Architecture, ModelFacts, config_of
from strop.engine.protocol import Probe
from strop.engine.torch.decoder import Decoder
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.weights import DecoderWeights
from strop.errors import EngineLost, ModelError, StropError, UserError, WeightsNotProven
from strop.types import FinishReason

from .support import VOCAB_SIZE, Tensors, load, make_model, make_request, publish


@pytest.fixture
def play():
    """Runs an async scenario with an engine that holds a tiny model; the keywords are those of `EngineConfig`."""

    def run(scenario, *, model=None, detokenize=None, **settings):
        model = model or make_model("llama")
        config = EngineConfig(**{"slots": 4, "max_length": 200, "device": "cpu", **settings})

        async def with_engine():
            engine = TorchEngine(model.config, config, detokenize=detokenize)
            try:
                await publish(engine, model)
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(with_engine())

    return run


def test_a_groups_prompt_is_computed_once(play):
    async def scenario(engine):
        prompt = range(40)
        completions = await asyncio.gather(*(engine.complete(make_request(f"{n}", prompt, seed=n)) for n in range(4)))
        # The last id is no prefill: it is fed when the first token is drawn.
        assert sorted(completion.cached_tokens for completion in completions) == [0, 39, 39, 39]
        assert len({completion.ids for completion in completions}) == 4

    play(scenario)


def test_a_prompt_that_older_weights_computed_is_forgotten(play):
    async def scenario(engine):
        await engine.complete(make_request("a", range(40)))
        await publish(engine, make_model("llama", seed=1), version=2)
        return await engine.complete(make_request("b", range(40)))

    after = play(scenario)
    assert after.cached_tokens == 0
    fresh = play(lambda engine: engine.complete(make_request("b", range(40))), model=make_model("llama", seed=1))
    assert (after.ids, after.logprobs) == (fresh.ids, fresh.logprobs)


def test_a_fork_that_waited_takes_over_the_slot_of_its_released_parent(play):
    async def scenario(engine):
        parent = await engine.complete(make_request("parent", range(30)))
        await engine.complete(make_request("other", [1]))
        ids = [*range(30), *parent.ids[:4], 8]
        waiting = asyncio.create_task(engine.complete(make_request("fork", ids, extends="parent", at=34, seed=5)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await engine.release("parent")
        fork = await waiting
        await engine.release("other")
        whole = await engine.complete(make_request("whole", ids, seed=5))
        assert (fork.cached_tokens, fork.ids) == (34, whole.ids)
        later = await engine.complete(make_request("later", ids, extends="parent", at=34, seed=5))
        assert (later.cached_tokens, later.ids, later.logprobs) == (34, fork.ids, fork.logprobs)  # from the fork, which has it
        await engine.release("later")
        await engine.release("fork")
        await engine.complete(make_request("parent", range(5, 30)))  # another conversation of the same name
        again = await engine.complete(make_request("again", range(5, 31), extends="parent", at=25))
        assert again.cached_tokens == 25


def test_what_a_released_slot_held_is_lost_when_another_conversation_takes_it(play):
    async def scenario(engine):
        await engine.complete(make_request("parent", range(30)))
        await engine.release("parent")
        await engine.complete(make_request("other", [1]))
        await engine.release("other")
        return await engine.complete(make_request("fork", range(31), extends="parent", at=30))

    assert play(scenario, slots=1).cached_tokens == 0
    assert play(scenario, slots=2).cached_tokens == 30  # the other one had a slot that was never used


def test_the_first_entropies_are_told_while_the_rest_is_sampled(play):
    async def scenario(engine):
        told, request = asyncio.Event(), make_request("a", range(30), max_tokens=150)
        entropies = []

        def tell(said):
            entropies.extend(said)
            told.set()

        running = asyncio.create_task(engine.complete(replace(request, probe=Probe(num_tokens=3, tell=tell))))
        await told.wait()
        assert not running.done()
        branch = await engine.complete(make_request("branch", range(30), extends="a", at=30, seed=6))
        completion = await running
        assert tuple(entropies) == completion.entropies[:3]
        assert branch.cached_tokens == 29  # from a conversation that went on meanwhile
        short = await engine.complete(make_request("b", [1], max_tokens=2, probe=Probe(num_tokens=3, tell=tell)))
        assert len(short.ids) == 2
        assert len(entropies) == 3  # it was not told of fewer

    play(scenario, slots=4)


def test_nothing_is_told_of_a_completion_whose_caller_has_left(play):
    async def scenario(engine):
        late = []
        for number in range(60):
            left = []
            probe = Probe(num_tokens=2, tell=lambda entropies, left=left: late.append(entropies) if left else None)
            task = asyncio.create_task(engine.complete(make_request(f"{number}", [1], max_tokens=150, probe=probe)))
            await asyncio.sleep(0.0002 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            left.append(True)
        await engine.complete(make_request("last", [1]))
        assert late == []

    play(scenario)


def test_siblings_of_a_request_whose_slot_was_taken_over_still_find_its_prefix(play):
    async def scenario(engine):
        parent = await engine.complete(make_request("parent", range(30)))
        ids = [*range(30), *parent.ids]
        children = [make_request(f"child {n}", [*ids, 7], extends="parent", at=len(ids), seed=3) for n in range(3)]
        completions = [await engine.complete(child) for child in children]
        assert [completion.cached_tokens for completion in completions] == [len(ids) - 1] * 3
        assert len({(completion.ids, completion.logprobs) for completion in completions}) == 1  # one seed, one history

    play(scenario)


def test_sampled_frequencies_are_the_models_probabilities(play):
    model = make_model("llama")
    num_draws = 2000

    async def scenario(engine):
        requests = [make_request(f"{seed}", [1, 2, 3], max_tokens=1, seed=seed, temperature=0.7) for seed in range(num_draws)]

        async def first_id(request):
            completion = await engine.complete(request)
            await engine.release(request.id)
            return completion.ids[0]

        return await asyncio.gather(*map(first_id, requests))

    drawn = play(scenario, model=model, slots=64)
    with torch.no_grad():
        probabilities = (model(torch.tensor([[1, 2, 3]])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB_SIZE)
    likely = probabilities > 0.01
    deviations = (counts - num_draws * probabilities) / (num_draws * probabilities * (1 - probabilities)).sqrt()
    assert deviations[likely].abs().max() < 4  # standard deviations
    num_expected = num_draws * probabilities[~likely].sum().item()
    assert counts[~likely].sum().item() == pytest.approx(num_expected, abs=4 * math.sqrt(num_expected))


def test_temperature_0_takes_the_likeliest_and_reports_its_logprob_at_temperature_1(play):
    model = make_model("llama")

    async def scenario(engine):
        return await engine.complete(make_request("a", [1, 2, 3], temperature=0.0))

    completion = play(scenario, model=model)
    with torch.no_grad():
        logprobs = model(torch.tensor([[1, 2, 3, *completion.ids]])).logits[0, 2:-1].log_softmax(-1)
    assert completion.ids == tuple(logprobs.argmax(-1).tolist())
    assert completion.logprobs == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)


def test_stop_ids_are_banned_before_min_tokens_and_logprobs_are_under_the_ban(play):
    model = make_model("llama")
    stop_ids = frozenset(range(40))

    async def scenario(engine):
        settings = {"stop_ids": stop_ids, "max_tokens": 30}
        free = [make_request(f"free {seed}", [1, 2, 3], seed=seed, **settings) for seed in range(2)]
        bound = make_request("bound", [1, 2, 3], min_tokens=6, **settings)
        return (await asyncio.gather(*map(engine.complete, [*free, bound])))[-1]

    completion = play(scenario, model=model)
    assert len(completion.ids) >= 6
    assert not stop_ids & set(completion.ids[:5])
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *completion.ids]])).logits[0, 2:-1]
    logits[:6, :40] = -torch.inf
    expected = logits.log_softmax(-1)[torch.arange(len(completion.ids)), torch.tensor(completion.ids)]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(map(math.isfinite, completion.entropies))


def test_a_stop_string_ends_a_completion_where_it_is_complete(play):
    async def scenario(engine):
        free = await engine.complete(make_request("a", [1], max_tokens=30))
        stop = f"<{free.ids[4]}><{free.ids[5]}>"
        stopped = await engine.complete(make_request("b", [1], max_tokens=30, stop_strings=(stop,)))
        assert stopped.ids == free.ids[:6]
        assert stopped.finish_reason is FinishReason.STOP

    play(scenario, detokenize=lambda ids: "".join(f"<{token}>" for token in ids))


def test_a_stop_string_without_a_detokenizer_is_refused(play):
    async def scenario(engine):
        with pytest.raises(UserError, match="detokenize"):
            await engine.complete(make_request("a", [1], stop_strings=("x",)))

    play(scenario)


def test_ids_outside_the_vocabulary_are_refused_and_harm_nobody(play):
    async def scenario(engine):
        with pytest.raises(ModelError, match="vocabulary has 67"):
            await engine.complete(make_request("a", [1, VOCAB_SIZE]))
        await engine.complete(make_request("b", [1]))

    play(scenario)


def _write(parameter):
    with torch.no_grad():
        parameter += 1e-3


def _write_unseen(parameter):
    """What neither autograd nor torch's write counters notice."""
    parameter.data += 1e-3


@pytest.mark.parametrize(("write", "thorough_every_s"), [(_write, 1e6), (_write_unseen, 0.0)])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_was_perturbed_by_a_thousandth_is_noticed_at_the_next_request(
    play, monkeypatch, name, write, thorough_every_s
):
    monkeypatch.setattr("strop.engine.torch.weights._THOROUGH_EVERY_S", thorough_every_s)
    monkeypatch.setattr("strop.engine.torch.weights.pack", lambda weight: None)  # of packed ones there are copies only

    async def scenario(engine):
        await engine.complete(make_request("a", [1]))
        write(dict(engine.named_parameters())[name])
        with pytest.raises(WeightsNotProven, match="version 1"):
            await engine.complete(make_request("b", [1]))
        with pytest.raises(WeightsNotProven):
            await engine.complete(make_request("c", [1]))
        await publish(engine, make_model("llama"), version=2)
        await engine.complete(make_request("d", [1]))

    play(scenario)


def test_a_lone_rollout_does_not_have_all_weights_hashed_at_each_of_its_turns(play, monkeypatch):
    hashed = []
    checksum = DecoderWeights.checksum
    monkeypatch.setattr(DecoderWeights, "checksum", lambda self, names: hashed.append(names) or checksum(self, names))

    async def scenario(engine):
        hashed.clear()  # the publication's
        for turn in range(10):
            await engine.complete(make_request(f"{turn}", [1]))
            await engine.release(f"{turn}")
        assert not hashed
        monkeypatch.setattr("strop.engine.torch.weights._THOROUGH_EVERY_S", 0.0)
        await engine.complete(make_request("after a while", [1]))
        assert len(hashed) == 1

    play(scenario)


def test_a_write_is_noticed_even_while_others_sample(play):
    async def scenario(engine):
        running = asyncio.create_task(engine.complete(make_request("a", [1], max_tokens=190)))
        await asyncio.sleep(0.01)
        with torch.no_grad():
            dict(engine.named_parameters())["model.norm.weight"].mul_(1.001)
        with pytest.raises(WeightsNotProven, match="somebody wrote"):
            await engine.complete(make_request("b", [1]))
        assert not running.done()
        await running

    play(scenario)


def test_weights_that_are_missing_unknown_or_misshaped_are_named(play):
    async def scenario(engine):
        whole = dict(make_model("llama").named_parameters())
        short = {name: tensor for name, tensor in whole.items() if name != "model.layers.0.mlp.up_proj.weight"}
        for tensors, message in [
            (short, r"lacks 1 weights: model\.layers\.0\.mlp\.up_proj\.weight"),
            (whole | {"model.layers.0.q_norm.weight": torch.zeros(8)}, r"model\.layers\.0\.q_norm\.weight"),
            (whole | {"model.norm.weight": torch.zeros(31)}, r"model\.norm\.weight.*\(31,\).*\(32,\)"),
        ]:
            with pytest.raises(WeightsNotProven, match=message):
                await load(engine, Tensors(tensors.items()), version=2)
            with pytest.raises(WeightsNotProven):
                await engine.complete(make_request("a", [1]))

    play(scenario)


def test_a_tied_head_may_be_published_or_left_out(play):
    model = make_model("qwen2")

    async def scenario(engine):
        names = dict(model.named_parameters())
        assert "lm_head.weight" not in names
        listed = [(name, tensor.detach()) for name, tensor in model.state_dict().items()]
        assert "lm_head.weight" in dict(listed)
        await load(engine, Tensors(listed), version=2)
        await engine.complete(make_request("a", [1]))

    play(scenario, model=model)


def test_a_request_before_any_publication_is_refused():
    async def scenario():
        engine = TorchEngine(make_model("llama").config, EngineConfig(slots=2, max_length=64, device="cpu"))
        try:
            with pytest.raises(WeightsNotProven, match="no weights were published"):
                await engine.complete(make_request("a", [1]))
        finally:
            await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_model_directory_is_an_engine(play, tmp_path, name):
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    request = make_request("a", [1, 2, 3])

    async def from_directory():
        engine = TorchEngine.from_directory(tmp_path, EngineConfig(slots=4, max_length=200, device="cpu"), version=3)
        try:
            assert engine.policy_version == 3
            return await engine.complete(request)
        finally:
            await engine.close()

    loaded = asyncio.run(from_directory())
    published = play(lambda engine: engine.complete(request), model=model)
    assert (loaded.ids, loaded.logprobs) == (published.ids, published.logprobs)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        TorchEngine.from_directory(tmp_path, EngineConfig())
    make_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="save_pretrained"):
        TorchEngine.from_directory(tmp_path, EngineConfig(slots=2, max_length=64))


def test_a_path_that_is_no_directory_is_named_at_once_and_no_hub_is_asked(tmp_path, monkeypatch):
    def ask(*_, **__):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", ask)
    for path in (Path("nowhere"), Path("someone/some-model"), tmp_path / "nowhere"):
        with pytest.raises(ModelError, match=f"^{path}: no such model directory"):
            TorchEngine.from_directory(path, EngineConfig())
        with pytest.raises(ModelError, match=f"^{path}: no such model directory"):
            ModelFacts.of(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "'gpt2'.*llama, qwen2, qwen3"),
        (LlamaConfig(hidden_act="gelu"), "gelu"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=0), "sliding-window"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type 'dynamic'"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
    ],
)
def test_what_the_forward_does_not_implement_is_refused_by_name(config, message):
    with pytest.raises(ModelError, match=message):
        TorchEngine(config, EngineConfig())


def test_a_refused_feature_comes_with_its_model_and_the_remedy(tmp_path):
    LlamaConfig(mlp_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"mlp_bias, which .*{tmp_path}.* uses\. .*engine\.kind = \"vllm\""):
        Architecture.of(config_of(tmp_path))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_turn_by_the_angles_of_transformers_to_the_bit(rope, dtype):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope}
    )
    forward = Decoder(config, dtype=dtype, device=torch.device("cpu"), num_slots=1, max_length=100)
    num = forward.num_columns
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros((), dtype=dtype), torch.arange(num)[None])
    sin[..., :16] *= -1
    assert all(map(torch.equal, forward._tables, (cos[0], sin[0])))


def test_progress_grows_while_it_computes_and_only_then(play):
    async def scenario(engine):
        before = await engine.progress()
        await engine.complete(make_request("a", [1], max_tokens=7))
        after = await engine.progress()
        assert after - before == 7  # the first token comes out of the step that reads the prompt
        await asyncio.sleep(0.05)
        assert await engine.progress() == after

    play(scenario)


def test_an_error_in_the_worker_fails_everybody_and_every_later_request(play):
    def detokenize(ids):
        raise ZeroDivisionError("broken tokenizer")

    async def scenario(engine):
        requests = [make_request("a", [1], max_tokens=100), make_request("b", [1], stop_strings=("x",))]
        for error in await asyncio.gather(*map(engine.complete, requests), return_exceptions=True):
            assert isinstance(error, EngineLost)
            assert isinstance(error.__cause__, ZeroDivisionError)
        with pytest.raises(EngineLost, match="broken tokenizer"):
            await engine.complete(make_request("c", [1]))

    play(scenario, detokenize=detokenize)


def test_weights_that_make_no_sense_lose_the_engine_instead_of_being_sampled(play):
    async def scenario(engine):
        broken = [(name, tensor.detach() * math.nan) for name, tensor in make_model("llama").named_parameters()]
        await load(engine, Tensors(broken), version=2)
        with pytest.raises(EngineLost, match="not finite"):
            await engine.complete(make_request("a", [1]))

    play(scenario)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # the latter's head is tied
def test_an_engine_that_sleeps_holds_no_weights_until_the_next_publication(play, architecture, dtype):
    model = make_model(architecture)

    async def scenario(engine):
        before = await engine.complete(make_request("a", range(30)))
        weights = engine._decoder.weights
        matrices = [each.gate for each in weights.layers]
        held = [weakref.ref(each._packed if each.is_sealed else each.dense()) for each in matrices]
        await engine.sleep()
        assert weights.embedding.nbytes == 0
        assert [matrix() for matrix in held] == [None] * len(held)
        with pytest.raises(WeightsNotProven, match="sleeps until the next publication"):
            await engine.complete(make_request("b", [1]))
        await publish(engine, model, version=2)
        again = await engine.complete(make_request("c", range(30)))
        assert (again.ids, again.logprobs, again.cached_tokens) == (before.ids, before.logprobs, 0)
        running = asyncio.create_task(engine.complete(make_request("d", [1], max_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(StropError, match="the engine cannot sleep while 1 completions are running"):
            await engine.sleep()
        assert len((await running).ids) == 100

    play(scenario, model=model, dtype=dtype)


def test_requests_that_arrive_during_a_publication_wait_for_its_end(play):
    async def scenario(engine):
        tensors = [(name, tensor.detach()) for name, tensor in make_model("llama", seed=1).named_parameters()]
        go_on = asyncio.Event()

        class Slow(Tensors):
            async def tensors(self):
                yield self.named[0]
                await go_on.wait()
                for named in self.named[1:]:
                    yield named

        loading = asyncio.create_task(load(engine, Slow(tensors), version=2))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(engine.complete(make_request("a", [1])))
        with pytest.raises(StropError, match="one at a time"):
            await publish(engine, make_model("llama"), version=3)
        assert not waiting.done()
        go_on.set()
        await loading
        assert (await waiting).policy_version == 2

    play(scenario)


def test_the_tokens_after_an_update_in_flight_are_those_of_the_new_weights_throughout(play):
    """Each span has the log-probs of `transformers` with its weights, over the whole context: no cache is of the others."""
    older, newer = make_model("llama"), make_model("llama", seed=1)

    async def scenario(engine):
        for number in range(50):
            names = [f"{number} {place}" for place in range(3)]  # of one prompt, which two of them copy
            running = [
                asyncio.create_task(engine.complete(make_request(name, [1, 2, 3], max_tokens=90, seed=seed)))
                for seed, name in enumerate(names)
            ]
            await asyncio.sleep(0.005)
            await publish(engine, newer, version=2 * number + 2, keeps_requests=True)
            completions = await asyncio.gather(*running)
            for name in names:
                await engine.release(name)
            if all(len(completion.spans) == 2 for completion in completions):
                break
            await publish(engine, older, version=2 * number + 3)
        for completion in completions:
            [(_, num_older), (_, num_newer)] = completion.spans
            assert num_older + num_newer == 90
            ids = torch.tensor([[1, 2, 3, *completion.ids]])
            with torch.no_grad():
                of_older, of_newer = (
                    model(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[2:, 0] for model in (older, newer)
                )
            expected = torch.cat([of_older[:num_older], of_newer[num_older:]])
            assert tuple(completion.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)

    play(scenario, model=older, slots=3)


def test_an_update_in_flight_computes_a_prompt_again_once_for_all_that_begin_with_it(play, monkeypatch):
    num_computed = 0

    def step(decoder, rows, chunks, *arguments, **options):
        nonlocal num_computed
        num_computed += sum(len(chunk.ids) for chunk in chunks)
        return compute(decoder, rows, chunks, *arguments, **options)

    compute = Decoder.step
    monkeypatch.setattr(Decoder, "step", step)

    async def scenario(engine):
        nonlocal num_computed
        prompt = [index % VOCAB_SIZE for index in range(600)]
        has_begun = asyncio.Event()
        probe = Probe(num_tokens=5, tell=lambda _: has_begun.set())
        requests = [make_request(str(seed), prompt, max_tokens=300, seed=seed, probe=probe) for seed in range(4)]
        running = [asyncio.create_task(engine.complete(request)) for request in requests]
        await has_begun.wait()
        num_computed = 0
        await publish(engine, make_model("llama", seed=1), version=2, keeps_requests=True)
        completions = await asyncio.gather(*running)
        assert [[version for version, _ in each.spans] for each in completions] == [[1, 2]] * 4
        assert 599 <= num_computed <= 599 + sum(each.spans[0][1] for each in completions)

    play(scenario, slots=4, max_length=1000)


def test_what_arrives_in_an_update_in_flight_waits_for_it_and_what_runs_fails_with_it(play):
    tensors = [(name, tensor.detach()) for name, tensor in make_model("llama", seed=1).named_parameters()]

    async def scenario(engine):
        go_on = asyncio.Event()

        class Slow(Tensors):
            async def tensors(self):
                yield self.named[0]
                await go_on.wait()
                for named in self.named[1:]:
                    yield named

        held = await engine.complete(make_request("held", [5], max_tokens=3))
        so_far, tail = [5, *held.ids], "held"
        for checksum, version in (("", 2), ("wrong", 3)):
            go_on.clear()
            running = asyncio.create_task(engine.complete(make_request("running", [1], max_tokens=900)))
            await asyncio.sleep(0.02)
            loading = asyncio.create_task(load(engine, Slow(tensors, checksum), version=version, keeps_requests=True))
            await asyncio.sleep(0.02)
            num_steps = engine.num_steps
            goes_on = make_request(f"turn {version}", [*so_far, 6], extends=tail, at=len(so_far), max_tokens=2)
            waiting = [asyncio.create_task(engine.complete(each)) for each in (goes_on, make_request("new", [1]))]
            leaving = asyncio.create_task(engine.complete(make_request("leaving", [1])))
            await asyncio.sleep(0.02)
            leaving.cancel()
            await asyncio.sleep(0.02)
            assert engine.num_steps == num_steps, "it computes while weights change"
            assert not any(task.done() for task in waiting)
            go_on.set()
            if checksum:
                with pytest.raises(WeightsNotProven, match="checksum"):
                    await loading
                for task in (running, *waiting):
                    with pytest.raises(WeightsNotProven, match="arrived damaged"):
                        await task
                continue
            await loading
            assert [version for version, _ in (await running).spans] == [1, 2]
            turn, new = await asyncio.gather(*waiting)
            assert (turn.spans, turn.cached_tokens, new.spans) == (((2, 2),), 0, ((2, 8),))
            so_far, tail = [*so_far, 6, *turn.ids], goes_on.id
            for name in ("running", "new"):
                await engine.release(name)

    play(scenario, slots=4, max_length=1000)


def test_no_thread_outlives_the_engine(play):
    async def scenario(engine):
        assert "strop-engine" in {thread.name for thread in threading.enumerate()}

    play(scenario)
    assert "strop-engine" not in {thread.name for thread in threading.enumerate()}


def test_eight_forks_of_a_long_conversation_compute_little_more_than_it(play):
    async def scenario(engine):
        prompt = [index % VOCAB_SIZE for index in range(1000)]
        first = await engine.complete(make_request("parent", prompt, max_tokens=1))
        forks = [make_request(f"fork {n}", [*prompt, n, 9], seed=n, extends="parent", at=1000) for n in range(8)]
        completions = await asyncio.gather(*map(engine.complete, forks))
        num_computed = 1000 - first.cached_tokens + sum(1002 - completion.cached_tokens for completion in completions)
        assert num_computed <= 1050

    play(scenario, slots=9, max_length=1100)


def test_a_publication_whose_caller_left_while_it_waited_to_begin_holds_nobody_up(play):
    model = make_model("llama")

    async def scenario(engine):
        holding = threading.Event()
        engine._worker._inbox.put(holding.wait)
        loading = asyncio.create_task(publish(engine, model, version=8))
        await asyncio.sleep(0.01)
        loading.cancel()
        holding.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await publish(engine, model, version=9)
        assert (await engine.complete(make_request("a", [1]))).policy_version == 9

    play(scenario, model=model)
