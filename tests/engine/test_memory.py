"""What the C library does with freed memory, in processes of their own: it is a setting for good."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")

# A hole of 800 MB below a block that stays: only trimming gives it back.
_HOLE = """
import sys
from pathlib import Path
import torch
from strop.engine.memory import give_back_freed_memory, keep_freed_memory

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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "kept once"])
def test_freed_memory_is_given_back(how):
    """Also where an earlier trainer kept it."""
    assert given_back_mib(how) > 500


def test_a_process_that_trains_keeps_it():
    assert given_back_mib("kept") < 50
