"""What the engine in a process of its own adds to the protocol: it dies, hangs and lies, and only its requests are lost."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from strop.engine import actor
from strop.engine.actor import ActorEngine
from strop.engine.config import EngineConfig
from strop.engine.protocol import Probe
from strop.engine.publication import Publication
from strop.engine.torch.engine import TorchEngine
from strop.errors import ActorsLost, EngineLost, ModelError, UserError, WeightsNotProven
from strop.types import FinishReason

from .support import VOCAB_SIZE, Tensors, load, make_model, make_request, named, publish

_CONFIG = EngineConfig(slots=4, max_length=16_000, device="cpu", threads=1)
_ENDLESS = {"max_tokens": 190}


@pytest.fixture
def play(home, tmp_path):
    """Runs an async scenario with engine e0, which holds the tiny llama as version 0, in a process that tests share."""

    def run(scenario, *, model=None, is_own=False):
        is_own = is_own or model is not None

        async def with_engine():
            if is_own:
                log = tmp_path / "e0.log"
                opened = await ActorEngine.start(model or home.model, _CONFIG, name="e0", log=log)
            else:
                opened = await home.lend("e0", _CONFIG)
                await publish(opened, make_model("llama"), version=0)
            try:
                async with asyncio.timeout(30):
                    return await scenario(opened)
            finally:
                if is_own:
                    await opened.close()

        return home.run(with_engine())

    return run


def _is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _in_flight(engine, *names):
    return [asyncio.create_task(engine.complete(make_request(name, [1], **_ENDLESS))) for name in names]


def test_it_samples_the_same_bits_as_the_embedded_engine(play, home):
    requests = [make_request(f"{n}", range(1, 4 + n), seed=n, temperature=0.7, max_tokens=20) for n in range(3)]

    async def scenario(engine):
        return engine.policy_version, await asyncio.gather(*map(engine.complete, requests))

    async def embedded():
        engine = TorchEngine.from_directory(home.model, _CONFIG)
        completions = await asyncio.gather(*map(engine.complete, requests))
        await engine.close()
        return completions

    version, completions = play(scenario)
    assert version == 0
    assert completions == asyncio.run(embedded())


def test_the_first_entropies_come_while_the_rest_is_sampled(play):
    async def scenario(engine):
        told = asyncio.get_running_loop().create_future()
        probe = Probe(num_tokens=3, tell=told.set_result)
        running = asyncio.create_task(engine.complete(make_request("a", [1], max_tokens=150, probe=probe)))
        entropies = await told
        assert not running.done()
        assert entropies == (await running).entropies[:3]

    play(scenario)


def test_a_turn_may_begin_while_the_files_of_a_publication_that_keeps_requests_are_copied(play):
    async def scenario(engine):
        is_copied = asyncio.Event()

        class Slow(Publication):
            async def files(self, node=None):
                await is_copied.wait()
                return await super().files(node)

        source = Tensors(named(make_model("llama", seed=1)))
        async with Slow(source, version=1, keeps_requests=True) as publication:
            loading = asyncio.create_task(engine.load_weights(publication))
            await asyncio.sleep(0)
            assert (await engine.complete(make_request("a", [1]))).spans == ((0, 8),)
            is_copied.set()
            await loading
        assert (await engine.complete(make_request("b", [1]))).spans == ((1, 8),)

    play(scenario)


def test_a_probed_completion_may_be_cancelled_at_any_time(play):
    async def scenario(engine):
        for number in range(60):
            probe = Probe(num_tokens=2, tell=lambda entropies: None)
            task = asyncio.create_task(engine.complete(make_request(f"{number}", [1], max_tokens=150, probe=probe)))
            await asyncio.sleep(0.0002 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await engine.complete(make_request("last", [1]))  # after all that the process still had to say
        assert engine._actor.is_alive

    play(scenario)


def test_progress_is_that_of_the_engine(play):
    async def scenario(engine):
        before = await engine.progress()
        await engine.complete(make_request("a", [1], max_tokens=7))
        assert await engine.progress() == before + 7

    play(scenario)


class LyingEngine(actor._HostedEngine):
    """Says that it holds another version."""

    async def load_weights(self, *arguments):
        version, capabilities = await super().load_weights(*arguments)
        return version + 1, capabilities


@pytest.mark.slow
def test_an_engine_that_holds_another_version_than_was_published_is_lost(play, monkeypatch):
    monkeypatch.setattr(actor, "_HostedEngine", LyingEngine)

    async def scenario(engine):
        with pytest.raises(EngineLost, match="holds version 6 after 5 was published"):
            await publish(engine, make_model("llama"), version=5)
        assert not engine._actor.is_alive

    play(scenario, is_own=True)


def test_weights_that_are_damaged_on_their_way_are_not_sampled_from(play):
    class Damaged(Tensors):
        async def write(self, directories):
            checksum = await super().write(directories)
            [path] = directories[0].glob("*.safetensors")
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)
            return checksum

    async def scenario(engine):
        said = r"engine .* \(process \d+\): version 1 was published with checksum .*written: model\.norm\.weight\."
        with pytest.raises(WeightsNotProven, match=said):
            await load(engine, Damaged(named(make_model("llama"))), version=1)
        with pytest.raises(WeightsNotProven, match="damaged"):
            await engine.complete(make_request("a", [1]))
        await publish(engine, make_model("llama"), version=2)
        assert (await engine.complete(make_request("a", [1]))).policy_version == 2

    play(scenario)


def test_weights_that_are_cut_short_on_their_way_are_not_sampled_from(play):
    class Cut(Tensors):
        async def write(self, directories):
            checksum = await super().write(directories)
            [path] = directories[0].glob("*.safetensors")
            os.truncate(path, 1000)
            return checksum

    async def scenario(engine):
        with pytest.raises(WeightsNotProven, match="the files of version 1 cannot be read"):
            await load(engine, Cut(named(make_model("llama"))), version=1)
        with pytest.raises(WeightsNotProven):
            await engine.complete(make_request("a", [1]))

    play(scenario)


@pytest.mark.slow  # three processes
def test_engines_that_load_the_same_weights_share_one_copy(home, tmp_path):
    written = []

    class Counted(Tensors):
        async def write(self, directories):
            written.append(directories[0])
            return await super().write(directories)

    async def scenario():
        opened = (ActorEngine.start(home.model, _CONFIG, name=f"e{n}", log=tmp_path / f"{n}.log") for n in range(3))
        engines = await asyncio.gather(*opened)
        async with Publication(Counted(named(make_model("llama", seed=3))), version=4) as publication:
            await asyncio.gather(*(engine.load_weights(publication) for engine in engines))
        completions = [await engine.complete(make_request("a", [1])) for engine in engines]
        assert completions[0] == completions[1] == completions[2]
        await asyncio.gather(*(engine.close() for engine in engines))

    home.run(scenario())
    [directory] = written
    assert not directory.exists()


def test_a_caller_who_leaves_a_publication_leaves_the_engine_usable(play):
    async def scenario(engine):
        for num_turns in range(40):  # from before the files are written to after the load
            leaving = asyncio.create_task(load(engine, Tensors(named(make_model("llama"))), version=num_turns + 1))
            for _ in range(num_turns):
                await asyncio.sleep(0.0003)
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        await publish(engine, make_model("llama"), version=99)
        assert (await engine.complete(make_request("a", [1]))).policy_version == 99

    play(scenario)


def test_an_engine_that_does_not_fit_in_memory_says_so(home, tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "keep_little_freed_memory", lambda: None)  # what runs in a process of its own runs in this one
    config = EngineConfig(**_CONFIG.model_dump() | {"slots": 10**9, "max_length": 500})
    with pytest.raises(EngineLost, match=r"out of memory\)\. Lower engine\.slots"):
        home.run(actor._HostedEngine.open(home.model, config, "e0", tmp_path))


# The process that tests share ends in each of these, so they are the last that use it.


@pytest.mark.timeout(60)  # without an answer the call would wait for ever
def test_a_call_that_cannot_begin_is_an_error(play):
    async def scenario(engine):
        running = asyncio.create_task(engine.complete(make_request("a", [1])))
        failed = asyncio.create_task(engine._actor.call("no_such_method"))  # in one message with the completion
        with pytest.raises(ActorsLost, match="broke during no_such_method: AttributeError"):
            await failed
        with pytest.raises(EngineLost):
            await running

    play(scenario)


def test_weights_that_break_the_model_end_the_engine(play):
    model = make_model("llama")
    model.model.norm.weight.data.fill_(float("inf"))

    async def scenario(engine):
        await publish(engine, model, version=1)
        with pytest.raises(EngineLost, match=r"e0 .*logits are not finite"):
            await engine.complete(make_request("a", [1]))
        assert not engine._actor.is_alive

    play(scenario)


def test_a_process_that_is_stopped_is_told_from_a_slow_request_and_killed(play):
    async def scenario(engine):
        [task] = _in_flight(engine, "a")
        await asyncio.sleep(0.02)
        os.kill(engine._actor.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match=r"e0 \(process \d+\) hangs: it answered none of 4 pings.*stopped by a signal"):
            await task
        await engine.close()
        assert not _is_there(engine._actor.pid)

    play(scenario)


def test_what_is_outstanding_fails_at_once_when_the_process_is_killed(play):
    async def scenario(engine):
        requests = [make_request(name, [1], max_tokens=15_000) for name in "abcdef"]  # none ends before the kill
        tasks = [asyncio.create_task(engine.complete(request)) for request in requests]
        await asyncio.sleep(0.02)
        began = time.monotonic()
        os.kill(engine._actor.pid, signal.SIGKILL)
        for lost in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(lost, EngineLost)
            assert re.search(
                rf"engine e0 \(process {engine._actor.pid}\) ended during (its calls|a ping): The actor died", str(lost)
            )
        assert time.monotonic() - began < 1
        assert not engine._actor.is_alive
        with pytest.raises(EngineLost, match=r"ended during (its calls|a ping)"):
            await engine.complete(make_request("g", [1]))
        with pytest.raises(EngineLost, match=r"ended during (its calls|a ping)"):
            await publish(engine, make_model("llama"), version=1)
        await engine.release("a")
        await engine.abort("b")

    play(scenario)


@pytest.mark.slow
def test_a_process_that_the_kernel_killed_for_memory_says_so(play, monkeypatch):
    async def scenario(engine):
        monkeypatch.setattr(actor, "num_oom_kills", lambda: 10**9)  # more than when it started
        os.kill(engine._actor.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"ended during its calls: .*[\s\S]*The machine ran out of memory"):
            await engine.complete(make_request("a", [1]))

    play(scenario)


def test_a_directory_that_is_no_model_is_the_users_to_mend(play, tmp_path):
    with pytest.raises(ModelError, match="not a model directory"):
        play(None, model=tmp_path)


@pytest.mark.slow  # two processes
def test_stop_strings_need_a_tokenizer_in_the_models_directory(play, tmp_path):
    make_model("llama").save_pretrained(tmp_path)

    async def refused(engine):
        with pytest.raises(UserError, match="has stop strings"):
            await engine.complete(make_request("a", [1], stop_strings=("word",)))
        return (await engine.complete(make_request("a", [1]))).ids

    async def stopped(engine):
        return await engine.complete(make_request("a", [1], stop_strings=(f"w{ids[2]} ",), max_tokens=8))

    ids = play(refused, model=tmp_path)
    words = Tokenizer(WordLevel({f"w{number} ": number for number in range(VOCAB_SIZE)}, unk_token="w0 "))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    completion = play(stopped, model=tmp_path)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.ids == ids[: ids.index(ids[2]) + 1]


_STARTER = """
import asyncio, os, sys
from pathlib import Path
from typing import Any
from strop.engine.actor import ActorEngine
from strop.engine.config import EngineConfig

async def start(model, folder):
    engine = await ActorEngine.start(model, EngineConfig(slots=2, max_length=50, device="cpu"), name="e0", log=folder / "log")
    (folder / "new").write_text(str(engine._actor.pid))
    (folder / "new").rename(folder / "pid")
    await asyncio.sleep(600)

asyncio.run(start(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_an_engine_ends_with_a_starter_that_is_killed(home, tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", _STARTER, str(home.model), str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            assert starter.poll() is None
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        starter.kill()
        deadline = time.monotonic() + 10
        while _is_there(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            starter.kill()
        starter.wait()
