"""Which columns of a slot may be read in another one: always columns with the same content."""

import asyncio
import mmap
import random
import sys
from pathlib import Path

import pytest
import torch

from strop.engine.config import EngineConfig
from strop.engine.model_directory import Architecture
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.kv_cache import KvCache

from .support import make_model, make_request, publish

NUM_SLOTS, NUM_COLUMNS = 6, 256


def make_cache():
    architecture = Architecture.of(make_model("llama").config)
    return KvCache(architecture, dtype=torch.float32, device=torch.device("cpu"), num_slots=NUM_SLOTS, num_columns=NUM_COLUMNS)


def write(cache, slot, start, stop, draw):
    """As a step does it."""
    columns = torch.arange(start, stop)
    cache.note_write(slot, start)
    place = cache.place(torch.full_like(columns, slot), columns)
    for layer in range(len(cache.keys)):
        for each in (cache.keys, cache.values):
            each[layer][place] = draw.random()


def columns_of(cache, slot, count):
    """The first columns of the first layer."""
    return [torch.cat([block[slot] for block in each[0]], 1)[:, :count] for each in (cache.keys, cache.values)]


def assert_loans_are_right(cache):
    for slot in range(NUM_SLOTS):
        lender, count = cache.loan(slot)
        for own, lent in zip(columns_of(cache, slot, count), columns_of(cache, lender, count), strict=True):
            assert torch.equal(own, lent), (slot, lender, count)


def test_rollouts_of_a_prompt_borrow_its_columns_from_the_first():
    cache, draw = make_cache(), random.Random(0)
    write(cache, 0, 0, 150, draw)
    cache.copy_across(0, 1, 149)
    cache.copy_across(1, 2, 149)  # from a borrower: of the one that it borrows from
    assert [cache.loan(slot) for slot in range(3)] == [(0, 0), (0, 149), (0, 149)]
    for slot in range(3):
        write(cache, slot, 150, 200, draw)
    assert [cache.loan(slot) for slot in range(3)] == [(0, 0), (0, 149), (0, 149)]
    cache.copy_across(2, 3, 180)  # a branch of it shares more with it than with the first
    assert cache.loan(3) == (2, 180)
    assert_loans_are_right(cache)


def test_who_borrows_from_a_slot_that_is_given_away_reads_its_own_copy():
    cache, draw = make_cache(), random.Random(0)
    write(cache, 0, 0, 150, draw)
    cache.copy_across(0, 1, 149)
    cache.copy_across(0, 2, 100)
    write(cache, 0, 120, 130, draw)  # from here on another conversation
    assert [cache.loan(slot)[1] for slot in (1, 2)] == [120, 100]
    write(cache, 0, 0, 10, draw)
    assert [cache.loan(slot)[1] for slot in (1, 2)] == [0, 0]
    assert_loans_are_right(cache)


def test_loans_are_right_whatever_happens():
    cache, draw = make_cache(), random.Random(1)
    num_loans = 0
    for _ in range(400):
        slot, other = draw.sample(range(NUM_SLOTS), 2)
        match draw.randrange(5):
            case 0 | 1:
                cache.copy_across(slot, other, draw.randint(1, NUM_COLUMNS))
            case 2 | 3 | 4:
                start = draw.randrange(NUM_COLUMNS)
                write(cache, slot, start, draw.randint(start + 1, NUM_COLUMNS), draw)
        num_loans += sum(cache.loan(each)[1] > 0 for each in range(NUM_SLOTS))
        assert_loans_are_right(cache)
    assert num_loans > 200
    cache.clear()
    assert not any(cache.loan(each)[1] for each in range(NUM_SLOTS))


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="memory comes and goes by pages under Linux only")
def test_memory_comes_with_what_is_written_and_goes_when_no_conversation_holds_any():
    engine = TorchEngine(make_model("llama").config, EngineConfig(slots=64, max_length=16_384, dtype="float32", device="cpu"))
    cache = engine._decoder.cache
    size_mib = 2 * cache.keys.nbytes / 2**20
    assert size_mib > 200
    before = resident_mib()

    async def play():
        await publish(engine, make_model("llama"), version=1)
        await engine.complete(make_request("a", [1, 2], max_tokens=3))
        written = resident_mib()
        await engine.complete(make_request("b", [3, 4], max_tokens=3))
        cache.keys.fill_(1.0)
        cache.values.fill_(1.0)
        full = resident_mib()
        await engine.release("a")
        await asyncio.sleep(0.2)
        held = resident_mib()
        await engine.release("b")
        for _ in range(100):
            await asyncio.sleep(0.05)
            if resident_mib() < full - 0.9 * size_mib:
                break
        given_back = resident_mib()
        again = await engine.complete(make_request("a", [1, 2], max_tokens=3))
        await engine.close()
        return written, full, held, given_back, again

    written, full, held, given_back, again = asyncio.run(play())
    assert written - before < 0.5 * size_mib
    assert full - written > 0.7 * size_mib
    assert full - held < 0.1 * size_mib
    assert full - given_back > 0.9 * size_mib
    assert again.cached_tokens == 0
