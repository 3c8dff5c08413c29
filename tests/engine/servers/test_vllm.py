"""vLLM for real: what the engines' contract does not ask of every engine. Run by `make test-vllm`."""

import asyncio
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from strop.engine.opening import open_engines
from strop.engine.protocol import Entropies, Probe
from strop.errors import EngineLost, ModelError, UserError, WeightsNotProven
from strop.training import Trainer, TrainerConfig
from strop.training.config import LoraConfig

from ..support import Tensors, load, make_model, make_request, publish
from . import vllm_servers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
LONG = [number % 67 for number in range(1, 71)]


def _logprobs(model, ids, start, temperature=1.0):
    """Of the ids from `start` on, by the model library's own full forward."""
    with torch.no_grad():
        logprobs = (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
    return [logprobs[place - 1, ids[place]].item() for place in range(start, len(ids))]


async def _play(engine, name, seed, temperature, *, vocab, num_turns=3, max_tokens=20, stop_ids=frozenset({3})):
    """One conversation; (ids, {place: log-prob})."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (5 + 10 * (seed % 3),), generator=generator).tolist()
    figures, last, at = {}, "", 0
    for turn in range(num_turns):
        changes = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop_ids": stop_ids}
        request = make_request(f"{name}/{turn}", ids, extends=last, at=at, **changes)
        completion = await engine.complete(request)
        figures |= {len(ids) + index: logprob for index, logprob in enumerate(completion.logprobs)}
        ids = [*ids, *completion.ids]
        last, at = request.id, len(ids)
        ids += torch.randint(vocab, (3,), generator=generator).tolist()
    await engine.release(last)
    return ids, figures


def _gaps(model, plays, temperature):
    """Signed: the engine's log-probs less the library's."""
    return torch.tensor(
        [
            logprob - theirs
            for ids, figures in plays
            for place, logprob in figures.items()
            for theirs in [_logprobs(model, ids[: place + 1], place, temperature)[0]]
        ]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_model_librarys_full_forward_in_float32(tiny_vllm, temperature):
    async def scenario():
        engine = tiny_vllm.engine()
        model = make_model("llama")
        await publish(engine, model)
        plays = await asyncio.gather(*(_play(engine, f"{seed}", seed, temperature, vocab=67) for seed in range(6)))
        assert _gaps(model, plays, temperature).abs().max() < 1e-4

    tiny_vllm.run(scenario())


def test_greedy_decoding_reports_logprobs_at_temperature_1(tiny_vllm):
    async def scenario():
        engine = tiny_vllm.engine()
        model = make_model("llama")
        await publish(engine, model)
        completion = await engine.complete(make_request("a", [1, 2, 3], temperature=0.0))
        theirs = _logprobs(model, [1, 2, 3, *completion.ids], 3)
        assert completion.logprobs == pytest.approx(theirs, abs=1e-4)

    tiny_vllm.run(scenario())


def test_a_probe_has_its_entropies_while_the_rest_is_sampled(tiny_vllm):
    async def scenario():
        engine = tiny_vllm.engine()
        await publish(engine, make_model("llama"))
        request = make_request("a", [1, 2, 3], max_tokens=90, temperature=0.0, entropies=Entropies.TOP10)
        told = asyncio.Future()
        running = asyncio.create_task(engine.complete(replace(request, probe=Probe(num_tokens=5, tell=told.set_result))))
        entropies = await told
        assert not running.done()
        whole = await engine.complete(replace(request, id="b"))
        completion = await running
        assert (completion.ids, len(completion.ids)) == (whole.ids, 90)
        assert (completion.logprobs, completion.entropies) == (
            pytest.approx(whole.logprobs, abs=1e-4),
            pytest.approx(whole.entropies, abs=1e-4),
        )
        assert completion.entropies[:5] == entropies

    tiny_vllm.run(scenario())


def test_a_prefix_that_was_cached_before_an_update_is_continued_as_by_an_engine_that_never_saw_the_older_weights(tiny_vllm):
    async def scenario():
        engine, newer = tiny_vllm.engine(), make_model("llama", seed=1)
        await publish(engine, make_model("llama"), version=1)
        first = await engine.complete(make_request("a", LONG))
        so_far = [*LONG, *first.ids]
        cached = await engine.complete(make_request("b", [*so_far, 4], extends="a", at=len(so_far)))
        assert cached.cached_tokens > 0
        await publish(engine, newer, version=2)
        after = await engine.complete(make_request("c", [*so_far, 4]))
        fresh = tiny_vllm.engine()
        await publish(fresh, newer, version=2)
        never = await fresh.complete(make_request("d", [*so_far, 4]))
        assert after.cached_tokens == never.cached_tokens == 0
        assert after.ids == never.ids
        assert after.logprobs == pytest.approx(never.logprobs, abs=1e-5)
        theirs = _logprobs(newer, [*so_far, 4, *after.ids], len(so_far) + 1)
        assert after.logprobs == pytest.approx(theirs, abs=1e-4)

    tiny_vllm.run(scenario())


def test_tokens_that_are_sampled_after_an_update_in_flight_have_the_logprobs_of_the_new_weights(tiny_vllm):
    """Over the whole context: nothing of the KV cache is of the older weights. Three conversations share a prompt."""
    older, newer = make_model("llama"), make_model("llama", seed=1)

    async def spliced(engine, number):
        running = [
            asyncio.create_task(engine.complete(make_request(f"{number} {seed}", LONG, max_tokens=400, seed=seed)))
            for seed in range(3)
        ]
        begun = await engine.progress()
        while await engine.progress() < begun + 380 and not running[0].done():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)
        publication = asyncio.create_task(publish(engine, newer, version=2 * number + 2, keeps_requests=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.complete(make_request(f"{number} late", LONG)))  # it waits for a place
        leaving = asyncio.create_task(engine.complete(make_request(f"{number} leaving", LONG)))
        await asyncio.sleep(0.01)
        await engine.abort(f"{number} leaving")
        await publication
        completions = await asyncio.gather(*running)
        for seed in range(3):
            await engine.release(f"{number} {seed}")
        assert (await late).spans == ((2 * number + 2, 8),)
        await engine.release(f"{number} late")
        assert leaving.cancelled()
        return completions

    async def scenario():
        engine = tiny_vllm.engine()
        for number in range(20):
            await publish(engine, older, version=2 * number + 1)
            completions = await spliced(engine, number)
            if all(len(each.spans) == 2 and min(num for _, num in each.spans) > 40 for each in completions):
                break  # else the update came too early or too late, on a machine with other work: then again
        for completion in completions:
            [(first, num_older), (second, num_newer)] = completion.spans
            assert (second - first, num_older + num_newer) == (1, 400)
            ids, start = [*LONG, *completion.ids], len(LONG)
            expected = [*_logprobs(older, ids[: start + num_older], start), *_logprobs(newer, ids, start + num_older)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            assert min(num_older, num_newer) > 40

    tiny_vllm.run(scenario())


def test_an_adapter_is_served_next_to_the_one_before_it_and_its_logprobs_are_those_of_the_merged_model(tmp_path):
    """One byte of an adapter that changes on the way is refused, and the matrix named."""
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    config = vllm_servers.make_config(max_length=500).with_adapters(rank=4, slots=2)
    merged = []

    async def publish_next(engine, trainer, *, spoils=False):
        version = len(merged) + 1
        generator = torch.Generator().manual_seed(version)
        matrices = {name: each.shape for name, each in trainer.learner.weights.named().items()}
        trainer.learner.weights.assign((name, torch.randn(shape, generator=generator) / 4) for name, shape in matrices.items())
        async with await trainer.publication(engine.capabilities, version=version) as publication:
            publication.keeps_requests = True
            if spoils:
                path = await publication.files() / "adapter_model.safetensors"
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
            await engine.load_weights(publication)
        model = make_model("llama")
        model.load_state_dict({name: trainer.learner.tensor(name) for name in trainer.learner.names()}, strict=False)
        merged.append(model)

    def check(completion, prompt, model):
        theirs = _logprobs(model, [*prompt, *completion.ids], len(prompt))
        assert completion.logprobs == pytest.approx(theirs, abs=1e-4)

    async def scenario():
        trainer = Trainer.from_directory(folder, TrainerConfig(lora=LoraConfig(rank=4, alpha=8)))
        [engine] = await open_engines(folder, config, detokenize=None, logs=tmp_path)
        try:
            base = await engine.complete(make_request("base", LONG))
            check(base, LONG, make_model("llama"))
            await engine.release("base")
            for attempt in range(
                20
            ):  # the server may have ended the long one before it loads the next adapter; slots are used again
                await publish_next(engine, trainer)
                long = asyncio.create_task(engine.complete(make_request("long", LONG, max_tokens=400)))
                begun = await engine.progress()
                while await engine.progress() == begun:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.002)
                await publish_next(engine, trainer)
                is_under_way = not long.done()
                newer, older = await engine.complete(make_request("newer", LONG)), await long
                assert (newer.spans, newer.cached_tokens) == (((2 * attempt + 2, 8),), 0)
                check(newer, LONG, merged[-1])
                assert older.spans == ((2 * attempt + 1, 400),)
                check(older, LONG, merged[-2])
                for name in ("long", "newer"):
                    await engine.release(name)
                if is_under_way and attempt:
                    break
            with pytest.raises(WeightsNotProven, match=r"published with checksum .* damaged after they were written: .*lora_"):
                await publish_next(engine, trainer, spoils=True)
        finally:
            await engine.close()
            await trainer.close()

    asyncio.run(scenario())


def test_min_tokens_ban_the_stop_id_and_its_probability_is_shared_out(tiny_vllm):
    async def scenario():
        engine, model = tiny_vllm.engine(), make_model("llama")
        await publish(engine, model)
        free = await engine.complete(make_request("free", [1, 2]))
        stop = free.ids[0]
        banned = await engine.complete(make_request("a", [1, 2], stop_ids=frozenset({stop}), min_tokens=3, max_tokens=3))
        assert stop not in banned.ids[:2]
        with torch.no_grad():
            logits = model(torch.tensor([[1, 2]])).logits[0, -1]
        logits[stop] = -torch.inf
        assert banned.logprobs[0] == pytest.approx(logits.log_softmax(-1)[banned.ids[0]].item(), abs=1e-4)

    tiny_vllm.run(scenario())


async def _counted(home, name):
    """A figure of the server's own."""
    text = await home.server._client.get_text("/metrics", timeout_s=60)
    [line] = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_request_that_is_aborted_or_cancelled_leaves_the_servers_batch(tiny_vllm, is_aborted):
    """It is not decoded to its end. Where it was before this process woke up, nothing is shown, and it is tried again."""

    async def num_decoded(engine):
        before = await _counted(tiny_vllm, "generation_tokens_total")
        task = asyncio.create_task(engine.complete(make_request("a", [1], max_tokens=99)))
        while not await _counted(tiny_vllm, "num_requests_running") and not task.done():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.002)
        if not task.done():
            if is_aborted:
                await engine.abort("a")
            else:
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while await _counted(tiny_vllm, "num_requests_running"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        await engine.release("a")
        return await _counted(tiny_vllm, "generation_tokens_total") - before

    async def scenario():
        engine = tiny_vllm.engine()
        await publish(engine, make_model("llama"))
        decoded = []
        while not any(0 < number < 99 for number in decoded):
            decoded.append(await num_decoded(engine))
            assert len(decoded) < 50, decoded

    tiny_vllm.run(scenario())


def test_the_prefix_of_a_conversation_outlasts_all_that_comes_and_goes_while_its_tool_runs(tmp_path):
    """Never more than two of four places are taken, but everything that passes through needs more than the memory has."""
    make_model("llama").save_pretrained(tmp_path / "model")
    numbers = random.Random(0)

    def prompt(length):
        return [numbers.randrange(67) for _ in range(length)]

    async def scenario():
        [engine] = await open_engines(tmp_path / "model", vllm_servers.make_config(slots=4), detokenize=None, logs=tmp_path)
        try:
            assert (engine.capacity.total_tokens, engine.capacity.block_tokens) == (20 * 32, 32)
            for others in (4, 8, 20):
                ids = prompt(64)
                first = await engine.complete(make_request("first", ids, max_tokens=4))
                for other in range(others):
                    await engine.complete(make_request(f"other {other}", prompt(70), max_tokens=30))
                    await engine.release(f"other {other}")
                ids += first.ids
                request = make_request("second", [*ids, 1, 2], max_tokens=4, extends="first", at=len(ids))
                assert (await engine.complete(request)).cached_tokens == 64
                await engine.release("second")
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_what_another_trainer_published_is_noticed_by_the_next_answer(tiny_vllm):
    async def scenario():
        ours, other = tiny_vllm.engine(), tiny_vllm.engine()
        await publish(ours, make_model("llama"), version=1)
        await publish(other, make_model("llama", seed=1), version=1)
        with pytest.raises(WeightsNotProven, match="somebody else publishes"):
            await ours.complete(make_request("a", [1]))
        await publish(ours, make_model("llama"), version=2)
        await ours.complete(make_request("b", [1]))

    tiny_vllm.run(scenario())


def test_weights_that_are_missing_or_of_another_shape_are_named(tiny_vllm):
    async def scenario():
        engine = tiny_vllm.engine()
        tensors = [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()]
        some = [named for named in tensors if named[0] != "model.norm.weight"]
        with pytest.raises(WeightsNotProven, match=r"lacks 1 weights: model\.norm\.weight"):
            await load(engine, Tensors(some), version=1)
        wrong = [("lm_head.weight", torch.zeros(3))]
        with pytest.raises(WeightsNotProven, match=r"'lm_head.weight' was sent with shape \(3,\)"):
            await load(engine, Tensors(wrong), version=1)

    tiny_vllm.run(scenario())


def test_requests_that_would_hurt_the_server_never_reach_it(tiny_vllm):
    async def scenario():
        engine = tiny_vllm.engine()
        await publish(engine, make_model("llama"))
        for changes, error in (
            ({"ids": [67]}, ModelError),  # out of the vocabulary: it would kill the server
            ({"ids": [1], "temperature": 0.001}, UserError),
            ({"ids": [1], "stop_strings": ("x",)}, UserError),  # there is no tokenizer
        ):
            with pytest.raises(error):
                await engine.complete(make_request("a", **changes))
        await engine.complete(make_request("a", [1]))

    tiny_vllm.run(scenario())


def test_a_server_that_is_stopped_or_killed_is_named_with_its_log(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")

    async def scenario():
        config = vllm_servers.make_config(max_length=500)
        [engine] = await open_engines(tmp_path / "model", config, detokenize=None, logs=tmp_path)
        assert engine.policy_version == 0  # the directory's weights, proven
        pid = engine._server._process.pid
        shared = _shared_memory(pid)
        assert shared
        try:
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.progress(), 2.0)
            os.kill(pid, signal.SIGCONT)
            before = await engine.progress()
            await engine.complete(make_request("a", [1], max_tokens=7))
            assert await engine.progress() >= before + 7
            os.kill(pid, signal.SIGSTOP)  # so that the request is not done when the server is killed
            running = asyncio.create_task(engine.complete(make_request("b", [1], max_tokens=499)))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match=r"vllm 0"):
                await running
            await engine._server._process.wait()  # its reaper tells
            with pytest.raises(EngineLost, match=r"(?s)vllm 0: .*killed by SIGKILL.*The end of its log"):
                await engine.complete(make_request("c", [1]))
        finally:
            await engine.close()
        assert not [path for path in shared if os.path.exists(path)]  # what a killed server cannot remove

    asyncio.run(scenario())


def _shared_memory(pid):
    """The files in /dev/shm that a server and the processes below it have mapped."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in family)
    return set(re.findall(r"/dev/shm/\S+(?=\n)", maps))


def test_several_servers_are_opened_or_none(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "model")
    config = vllm_servers.make_config(arguments=("--no-such-option",), replicas=2)
    with pytest.raises(EngineLost, match="no-such-option"):
        asyncio.run(open_engines(tmp_path / "model", config, detokenize=None, logs=tmp_path))
    assert not [line for line in _processes() if str(tmp_path) in line]


def _processes():
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    yield file.read().decode().replace("\0", " ")
            except OSError:
                continue
