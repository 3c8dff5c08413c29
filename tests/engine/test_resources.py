"""Freed memory, OpenMP threads and their spinning. Settings of the C library are tested in separate processes."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from strop.engine.config import EngineConfig
from strop.engine.torch.cpu.resources import _libgomp, end_team, use_threads
from strop.engine.torch.engine import TorchEngine

from .support import make_model

_needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")

# A hole of 800 MB below a block that stays: only trimming gives it back.
_HOLE = """
import sys
from pathlib import Path
import torch
from strop.engine.torch.cpu.resources import give_back_freed_memory, keep_freed_memory

def resident_mib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) // 1024

for is_kept in {"plain": [], "kept": [True], "kept once": [True, False]}[sys.argv[1]]:
    keep_freed_memory(is_kept)
torch.ones(2**22)  # 16 MiB, freed at once: from here on smaller blocks come from the heap
blocks = [torch.ones(2**20) for _ in range(200)]
del blocks[:-1]
before = resident_mib()
give_back_freed_memory()
print(before - resident_mib())
"""


def given_back_mib(how):
    answer = subprocess.run([sys.executable, "-c", _HOLE, how], capture_output=True, text=True, check=True)
    return int(answer.stdout)


@_needs_glibc
@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "kept once"])
def test_freed_memory_is_given_back(how):
    """Also where an earlier trainer kept it."""
    assert given_back_mib(how) > 500


@_needs_glibc
def test_a_process_that_trains_keeps_it():
    assert given_back_mib("kept") < 50


# What one thread has freed, another takes: 800 MB in blocks that come from a heap, under one that stays.
_TWO_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import strop
import torch

def resident_mib():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) // 1024

def ones():
    return [torch.ones(2**20) for _ in range(200)]

with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
    first.submit(lambda: torch.ones(2**22)).result()  # 16 MiB, freed at once: from here on smaller blocks come from the heap
    kept = first.submit(lambda: ones()[-1]).result()
    before = resident_mib()
    blocks = second.submit(ones).result()
    print(resident_mib() - before)
"""


@_needs_glibc
def test_threads_share_one_heap():
    program, environment = [sys.executable, "-c", _TWO_THREADS], dict(os.environ)
    environment.pop("MALLOC_ARENA_MAX", None)
    taken = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(taken) < 300  # of 800


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _num_threads():
    [line] = [
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("Threads:")
    ]
    return int(line.split()[1])


def test_a_thread_that_releases_its_team_leaves_no_thread_and_can_compute_again(two_threads):
    if _libgomp() is None:
        pytest.skip("torch does not use libgomp here")
    numbers = torch.ones(1 << 20)
    found = []

    def compute():
        before = _num_threads()
        total = numbers.exp().sum()
        with_team = _num_threads()
        end_team()
        found.extend([with_team - before, _num_threads() - before])
        assert torch.equal(numbers.exp().sum(), total)
        end_team()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [1, 0]


def test_a_thread_has_a_number_of_threads_of_its_own(two_threads):
    if _libgomp() is None:
        pytest.skip("torch does not use libgomp here")
    found = []

    def compute(count):
        if count is not None:
            use_threads(count)
        end_team()
        found.append(torch.get_num_threads())

    for count in (1, None, 5):
        thread = threading.Thread(target=compute, args=(count,))
        thread.start()
        thread.join()
    assert [*found, torch.get_num_threads()] == [1, 2, 5, 2]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "300"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_import_strop_limits_spinning_unless_the_user_says_how_threads_wait(environment, expected):
    """A thread that spins for long stops the run when another process keeps a core busy (benchmarks/busy.py)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    code = "import os, strop; print(os.environ.get('GOMP_SPINCOUNT'))"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == expected


_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_FASTER = """
import torch
from strop.engine.config import EngineConfig
from strop.engine.config import measured_flops_per_s
from strop.training import TrainerConfig

rates = {str(each)[6:]: measured_flops_per_s(torch.device("cpu"), each) for each in (torch.float32, torch.bfloat16)}
print(max(rates, key=rates.get), EngineConfig(dtype="auto").dtype, TrainerConfig(precision="auto").precision)
"""


@pytest.mark.parametrize("environment", [{}, _AVX2], ids=["this processor", "AVX2 only"])
def test_auto_is_the_number_format_of_the_faster_products(environment):
    environment = {**os.environ, **environment}
    answer = subprocess.run([sys.executable, "-c", _FASTER], env=environment, capture_output=True, text=True, check=True)
    faster, *chosen = answer.stdout.split()
    assert chosen == [faster, faster]
    assert faster == "float32" or "ONEDNN_MAX_CPU_ISA" not in environment  # 35 times faster there


@pytest.mark.parametrize(("inner", "threads", "expected"), [(64, None, [1]), (64, 3, [3]), (8192, None, []), (8192, 3, [3])])
def test_a_tiny_model_is_computed_by_one_thread_unless_the_recipe_says_more(inner, threads, expected, monkeypatch):
    used = []
    monkeypatch.setattr("strop.engine.torch.engine.use_threads", used.append)
    config = make_model("llama").config
    config.intermediate_size = inner
    engine = TorchEngine(config, EngineConfig(slots=2, max_length=64, device="cpu", threads=threads))
    asyncio.run(engine.close())
    assert used == expected
