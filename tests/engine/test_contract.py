"""What every engine owes by its protocol."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from faulty_engine import FaultyEngine
from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest, Entropies, InferenceEngine, Truncation, weights_checksum
from strop.engine.torch.engine import TorchEngine
from strop.errors import EngineLost, RequestTooLong, StropError, UserError, WeightsNotProven
from strop.types import Completion, FinishReason

from .support import VOCAB_SIZE, Tensors, load, make_model, make_request, publish

MAX_LENGTH, SLOTS, BLOCK = 500, 3, 32
LONG = [number % VOCAB_SIZE for number in range(1, 71)]  # more than two blocks


def _count_up(request: CompletionRequest) -> list[int]:
    """The ids after the last one, as a script."""
    return [(request.ids[-1] + 1 + index) % VOCAB_SIZE for index in range(request.max_tokens)]


_CONFIG = EngineConfig(slots=SLOTS, max_length=MAX_LENGTH, device="cpu", threads=1)


async def _scripted(_: Callable) -> InferenceEngine:
    return FaultyEngine(_count_up, latency_s=0.01, max_request_tokens=MAX_LENGTH, max_running=SLOTS, policy_version=-1)


async def _torch(_: Callable) -> InferenceEngine:
    return TorchEngine(make_model("llama").config, _CONFIG)


async def _actor(fixture: Callable) -> InferenceEngine:
    return await fixture("home").lend("contract", _CONFIG)


async def _vllm(fixture: Callable) -> InferenceEngine:
    return fixture("tiny_vllm").engine()


_LOOPS = {_actor: "home", _vllm: "tiny_vllm"}  # of engines that live longer than a test


@pytest.fixture(
    params=[
        pytest.param(_scripted, id="scripted"),
        pytest.param(_torch, id="torch"),
        pytest.param(_actor, id="actor"),
        pytest.param(_vllm, id="vllm", marks=pytest.mark.vllm),
    ]
)
def run(request) -> Callable:
    """Plays an async scenario with a fresh engine that holds published weights, and closes it."""
    fixture = request.getfixturevalue
    run_in_loop = fixture(_LOOPS[request.param]).run if request.param in _LOOPS else asyncio.run

    def play(scenario: Callable) -> None:
        async def with_engine() -> None:
            engine = await request.param(fixture)
            assert engine.policy_version == -1
            await publish(engine, make_model("llama"), version=7)
            try:
                async with asyncio.timeout(60):
                    await scenario(engine)
            finally:
                if request.param is not _actor:  # else its process is the next test's
                    await engine.close()

        run_in_loop(with_engine())

    return play


async def _under_way(engine: InferenceEngine, *names: str, max_tokens: int = 90) -> list[asyncio.Task]:
    """Completions that have not ended. A process that sleeps for 5 ms may not wake before 90 tokens are there: then again."""
    for _ in range(50):
        tasks = [asyncio.create_task(engine.complete(make_request(name, [1], max_tokens=max_tokens))) for name in names]
        await asyncio.sleep(0.005)
        if not any(task.done() for task in tasks):
            return tasks
        await asyncio.gather(*tasks)
        for name in names:
            await engine.release(name)
    raise AssertionError(f"{max_tokens} tokens never took 5 ms")


def test_a_completion_has_one_figure_per_id_and_the_version_of_its_weights(run):
    async def scenario(engine):
        completion = await engine.complete(make_request("a", [1, 2, 3]))
        assert len(completion.ids) == len(completion.logprobs) == len(completion.is_forced) == 8
        assert len(completion.entropies) == (8 if engine.capabilities.entropies == "full" else 0)
        assert not any(completion.is_forced)
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert all(entropy >= 0 for entropy in completion.entropies)
        assert completion.policy_version == engine.policy_version == 7
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.cached_tokens == 0

    run(scenario)


def test_a_completion_that_is_asked_for_in_pieces_is_the_completion(run):
    async def scenario(engine):
        whole = await engine.complete(make_request("whole", [1, 2, 3], max_tokens=24, seed=5))
        pieces, ids = [], [1, 2, 3]
        for num_before in (0, 8, 16):
            extends = {"extends": f"piece {num_before - 8}", "at": len(ids)} if num_before else {}
            asked = make_request(f"piece {num_before}", ids, max_tokens=8, seed=5, num_before=num_before, **extends)
            pieces.append(await engine.complete(asked))
            ids = [*ids, *pieces[-1].ids]
        joined = Completion.joined(pieces)
        assert len(joined.ids) == len(joined.logprobs) == len(joined.is_forced) == 24
        assert (joined.spans, joined.finish_reason) == (((7, 24),), FinishReason.LENGTH)
        if engine.capabilities.is_deterministic:
            assert (joined.ids, joined.logprobs, joined.entropies) == (whole.ids, whole.logprobs, whole.entropies)
        else:
            again = await engine.complete(make_request("again", [1, 2, 3], max_tokens=24, seed=5))
            assert again.ids[:8] == joined.ids[:8]
            assert len({piece.ids for piece in pieces}) > 1  # each has its own random numbers

    run(scenario)


def test_entropies_that_a_request_needs_are_there_and_the_ten_likeliest_have_no_more_than_all(run):
    async def scenario(engine):
        needed = {kind: make_request(kind, [1, 2, 3], seed=4, entropies=kind) for kind in (Entropies.FULL, Entropies.TOP10)}
        of_all, of_ten = [await engine.complete(each) for each in needed.values()]
        assert of_all.ids == of_ten.ids
        assert len(of_all.entropies) == len(of_ten.entropies) == 8
        for whole, part in zip(of_all.entropies, of_ten.entropies, strict=True):
            assert 0 <= part <= whole + 1e-6

    run(scenario)


def test_a_request_may_be_limited_to_the_likeliest_token(run):
    async def scenario(engine):
        greedy = await engine.complete(make_request("g", [1, 2, 3], temperature=0.0))
        await engine.release("g")
        for name, limits in {"k": {"top_k": 1}, "p": {"top_p": 1e-6}, "m": {"min_p": 1.0}}.items():
            found = await engine.complete(make_request(name, [1, 2, 3], seed=9, truncation=Truncation(**limits)))
            await engine.release(name)
            assert found.ids == greedy.ids
            assert found.logprobs == pytest.approx((0.0,) * 8, abs=1e-5)

    run(scenario)


def test_the_seed_alone_decides_what_is_sampled(run):
    async def scenario(engine):
        first, again = [await engine.complete(make_request(name, [1, 2], seed=5)) for name in "ab"]
        assert first.ids == again.ids
        assert first.logprobs == again.logprobs  # alone in its batch, also where a batch may round otherwise

    run(scenario)


def test_a_stop_id_ends_a_completion_and_is_its_last_id(run):
    async def scenario(engine):
        free = await engine.complete(make_request("a", [1, 2]))
        stop = free.ids[3]
        stopped = await engine.complete(make_request("b", [1, 2], stop_ids=frozenset({stop})))
        assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
        assert stopped.finish_reason is FinishReason.STOP

    run(scenario)


def test_a_conversation_goes_on_from_what_is_cached(run):
    async def scenario(engine):
        first = await engine.complete(make_request("a", LONG))
        so_far = [*LONG, *first.ids]
        second = await engine.complete(make_request("b", [*so_far, 4, 5], extends="a", at=len(so_far)))
        whole_blocks = len(so_far) // BLOCK * BLOCK  # what a server with a prefix cache finds
        assert second.cached_tokens >= (len(so_far) - 1 if engine.capabilities.can_fork else whole_blocks)

    run(scenario)


def test_a_request_can_be_forked_at_any_length_by_several_while_it_is_held(run):
    async def scenario(engine):
        if not engine.capabilities.can_fork:
            pytest.skip("it has no forks, but prefixes in whole blocks")
        first = await engine.complete(make_request("a", [1, 2, 3]))
        forks = [make_request(f"fork {at}", [*[1, 2, 3, *first.ids][:at], 9], extends="a", at=at) for at in (2, 6)]
        for fork, completion in zip(forks, await asyncio.gather(*map(engine.complete, forks)), strict=True):
            assert completion.cached_tokens == fork.at

    run(scenario)


def test_a_prefix_that_is_not_the_earlier_one_is_refused(run):
    async def scenario(engine):
        first = await engine.complete(make_request("a", [1, 2, 3]))
        with pytest.raises(StropError, match="differ"):
            await engine.complete(make_request("b", [1, 9, 3, *first.ids], extends="a", at=5))

    run(scenario)


def test_a_request_that_can_never_fit_is_refused_at_once(run):
    async def scenario(engine):
        assert engine.capacity.max_request_tokens == MAX_LENGTH
        with pytest.raises(RequestTooLong, match="max_tokens"):
            await engine.complete(make_request("a", [1] * (MAX_LENGTH - 50), max_tokens=51))
        await engine.complete(make_request("b", [1] * (MAX_LENGTH - 50), max_tokens=50))

    run(scenario)


@pytest.mark.parametrize("temperature", [1e-39, 0.0099])  # the first divides by what float32 takes for zero
def test_a_temperature_that_is_too_low_to_divide_by_is_refused_and_harms_nobody(run, temperature):
    async def scenario(engine):
        with pytest.raises(UserError, match=r"request a .*Use 0, or at least 0\.01"):
            await engine.complete(make_request("a", [1, 2], temperature=temperature))
        for sound in (0.0, 0.01):
            await engine.complete(make_request(f"at {sound}", [1, 2], temperature=sound))

    run(scenario)


def test_requests_wait_in_order_of_arrival_while_memory_is_full(run):
    async def scenario(engine):
        assert engine.capacity.max_running == SLOTS
        for number in range(SLOTS):
            await engine.complete(make_request(f"held {number}", [1]))
        order: list[str] = []

        async def complete_and_release(name: str) -> None:
            await engine.complete(make_request(name, [2]))
            order.append(name)
            await engine.release(name)

        waiting = [asyncio.create_task(complete_and_release(name)) for name in ("first", "second", "third")]
        await asyncio.sleep(0.1)
        assert not order
        await engine.release("held 1")
        await asyncio.gather(*waiting)
        assert order == ["first", "second", "third"]

    run(scenario)


def test_a_conversation_that_holds_memory_goes_on_while_others_wait(run):
    async def scenario(engine):
        held = [await engine.complete(make_request(f"held {number}", [1])) for number in range(SLOTS)]
        waiting = asyncio.create_task(engine.complete(make_request("waiting", [2])))
        await asyncio.sleep(0.02)
        so_far = [1, *held[0].ids]
        await engine.complete(make_request("next turn", [*so_far, 3], extends="held 0", at=len(so_far)))
        assert not waiting.done()
        await engine.release("next turn")
        await waiting

    run(scenario)


def test_an_aborted_request_is_cancelled_and_its_memory_is_free_again(run):
    async def scenario(engine):
        tasks = await _under_way(engine, *"abc")
        for name in "abc":  # at once, before anybody else's turn
            await engine.abort(name)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [asyncio.CancelledError] * 3, ended
        await asyncio.gather(*(engine.complete(make_request(name, [1])) for name in "abc"))

    run(scenario)


def test_a_waiting_request_can_be_aborted(run):
    async def scenario(engine):
        for number in range(SLOTS):
            await engine.complete(make_request(f"held {number}", [1]))
        waiting = asyncio.create_task(engine.complete(make_request("waiting", [2])))
        await asyncio.sleep(0.02)
        await engine.abort("waiting")
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(scenario)


def test_a_caller_who_goes_away_leaves_nothing_behind(run):
    async def scenario(engine):
        tasks = await _under_way(engine, *"abc")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.complete(make_request(name, [1])) for name in "abc"))

    run(scenario)


def test_unknown_ids_are_ignored_by_release_and_abort(run):
    async def scenario(engine):
        await engine.release("nobody")
        await engine.abort("nobody")
        await engine.complete(make_request("a", [1]))

    run(scenario)


def test_an_id_that_is_in_use_is_refused(run):
    async def scenario(engine):
        await engine.complete(make_request("a", [1]))
        with pytest.raises(StropError, match="not released"):
            await engine.complete(make_request("a", [2]))
        await engine.release("a")
        await engine.complete(make_request("a", [2]))

    run(scenario)


def test_a_publication_with_another_checksum_stops_sampling_until_a_good_one(run):
    async def scenario(engine):
        tensors = [(name, parameter.detach()) for name, parameter in make_model("llama", seed=1).named_parameters()]
        damaged = [(name, tensor + 1e-3 * (name == "model.norm.weight")) for name, tensor in tensors]
        with pytest.raises(WeightsNotProven, match="checksum"):
            await load(engine, Tensors(damaged, weights_checksum(tensors)), version=8)
        with pytest.raises(WeightsNotProven):
            await engine.complete(make_request("a", [1]))
        await load(engine, Tensors(tensors), version=9)
        assert (await engine.complete(make_request("b", [1]))).policy_version == engine.policy_version == 9

    run(scenario)


def test_a_publication_drops_every_cache_of_the_older_weights(run):
    async def scenario(engine):
        first = await engine.complete(make_request("a", LONG))
        await publish(engine, make_model("llama", seed=1), version=8)
        so_far = [*LONG, *first.ids]
        second = await engine.complete(make_request("b", [*so_far, 4], extends="a", at=len(so_far)))
        assert second.cached_tokens == 0

    run(scenario)


def test_weights_cannot_be_published_under_a_running_completion(run):
    async def scenario(engine):
        model = make_model("llama", seed=1)
        [running] = await _under_way(engine, "a", max_tokens=450)
        with pytest.raises(StropError, match=r"running|run or wait"):
            await publish(engine, model, version=8)
        assert (await running).policy_version == engine.policy_version == 7

    run(scenario)


def test_requests_that_are_kept_go_on_with_the_new_weights_and_say_which_tokens_are_whose(run):
    async def scenario(engine):
        alone = await engine.complete(make_request("alone", [1], max_tokens=90))
        await engine.release("alone")
        for version in range(8, 108, 2):  # a server may have ended it before it pauses: then again
            [running] = await _under_way(engine, "a")
            before = await engine.progress()
            while await engine.progress() == before and not running.done():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.002)
            await publish(engine, make_model("llama", seed=1), version=version, keeps_requests=True)
            if len((spliced := await running).spans) == 2:
                break
            await engine.release("a")
            await publish(engine, make_model("llama"), version=version + 1)
        [(older, num_before), (newer, num_after)] = spliced.spans
        assert (older, newer, num_before + num_after) == (version - 1, version, 90)
        assert len(spliced.ids) == len(spliced.logprobs) == 90
        if engine.capabilities.is_deterministic:
            assert spliced.ids[:num_before] == alone.ids[:num_before]
            assert spliced.logprobs[:num_before] == alone.logprobs[:num_before]
        so_far = [1, *spliced.ids]
        turn = await engine.complete(make_request("a2", [*so_far, 4], extends="a", at=len(so_far)))
        assert turn.spans == ((version, 8),)
        assert turn.cached_tokens >= 64  # its context was computed again, once

    run(scenario)


def test_a_new_conversation_reads_no_cache_of_older_weights_though_requests_were_kept(run):
    async def scenario(engine):
        model = make_model("llama", seed=1)
        await engine.complete(make_request("a", LONG))
        await publish(engine, model, version=8, keeps_requests=True)
        kept = await engine.complete(make_request("b", LONG, seed=3))
        assert kept.cached_tokens == 0
        for name in "ab":
            await engine.release(name)
        await publish(engine, model, version=9)
        fresh = await engine.complete(make_request("c", LONG, seed=3))
        assert kept.ids == fresh.ids
        assert kept.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)

    run(scenario)


def test_weights_are_held_in_the_dtype_that_is_announced(run):
    async def scenario(engine):
        assert engine.capabilities.dtype is torch.float32

    run(scenario)


class Interrupted(Tensors):
    async def tensors(self):
        yield self.named[0]
        raise ConnectionError("the trainer has gone")

    async def write(self, directory):
        raise ConnectionError("the trainer has gone")


def test_a_publication_that_breaks_off_stops_sampling(run):
    async def scenario(engine):
        tensors = [(name, parameter.detach()) for name, parameter in make_model("llama").named_parameters()]
        with pytest.raises(ConnectionError):
            await load(engine, Interrupted(tensors), version=8)
        with pytest.raises(WeightsNotProven):
            await engine.complete(make_request("a", [1]))

    run(scenario)


def test_a_conversation_whose_next_request_was_refused_keeps_its_id(run):
    async def scenario(engine):
        for number in range(SLOTS):
            first = await engine.complete(make_request(f"held {number}", [1]))
        so_far = [1, *first.ids]
        too_long = make_request("refused", so_far, max_tokens=MAX_LENGTH, extends=f"held {SLOTS - 1}", at=len(so_far))
        with pytest.raises(RequestTooLong):
            await engine.complete(too_long)
        going_on = make_request("on", so_far, max_tokens=1, extends=f"held {SLOTS - 1}", at=len(so_far))
        await engine.complete(going_on)  # in its slot: no other is free
        await engine.release("on")
        await engine.complete(make_request("a", [1]))

    run(scenario)


def test_a_closed_engine_fails_what_runs_and_refuses_the_rest(run):
    async def scenario(engine):
        [running] = await _under_way(engine, "a")
        await engine.close()
        with pytest.raises(EngineLost, match="closed"):
            await running
        with pytest.raises(EngineLost, match="closed"):
            await engine.complete(make_request("b", [1]))
        await engine.release("a")
        await engine.close()

    run(scenario)
