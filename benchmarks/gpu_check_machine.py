"""One device under measurement: what it can do at best, how long something takes on it, and the most memory that is held."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

# Dense bfloat16 products with float32 sums, TFLOP/s, as the vendors publish them; the first name that fits.
PUBLISHED_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
_REPEATS = 12
T = TypeVar("T")


class Machine:
    """A CUDA device; or, to run the same code without one, the CPU."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.is_cuda = self.device.type == "cuda"
        self.name = torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"

    @property
    def published_flops(self) -> float | None:
        """Of the vendor's data sheet; None for a device that is not in the table."""
        return next((1e12 * tflops for name, tflops in PUBLISHED_TFLOPS.items() if name in self.name), None)

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        started_at = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started_at

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Give freed memory back, and count the peak from here."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Since `clear`: of tensors on the device; of a CPU, of the whole process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

    def matmul_flops(self, size: int) -> float:
        """Operations a second of a square bfloat16 product; the best of several."""
        left, right = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        product = torch.empty_like(left)
        return 2 * size**3 / min(self.seconds(lambda: torch.mm(left, right, out=product)) for _ in range(_REPEATS))

    def bandwidth(self, num_bytes: int) -> float:
        """Bytes a second that a big copy reads and writes; the best of several."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / min(self.seconds(lambda: target.copy_(source)) for _ in range(_REPEATS))


def or_out_of_memory(machine: Machine, measure: Callable[[], T]) -> T | None:
    """What `measure` finds; None where the machine has too little memory for it."""
    try:
        return measure()
    except Exception as error:
        if not _is_of_memory(error):
            raise
    finally:
        machine.clear()
    return None


def _is_of_memory(error: BaseException | None) -> bool:
    """Also where it arose from that: an engine whose thread died of it is lost."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def median(values: list[float]) -> float:
    return statistics.median(values)
