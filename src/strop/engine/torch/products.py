"""Measures how fast a device computes large products, and so which number format suits it."""

from __future__ import annotations

import timeit
from functools import cache
from typing import Literal

import torch

_WIDEST = {"cpu": 1024, "cuda": 8192}  # width of the products that the machine is measured by
_FASTER = 1.2  # times, so that the choice is the same in the next process
_NARROWEST, _SHORT_S, _NUM_TRIES = 128, 0.02, 8


@cache
def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of products on this device, measured once in a process: of the widest that take a short time."""
    widest, width = _WIDEST.get(device.type, _WIDEST["cpu"]), _NARROWEST
    while width < widest and _product_s(width, device, dtype, 3) < _SHORT_S:
        width *= 2
    return 2 * width**3 / _product_s(width, device, dtype, _NUM_TRIES)


def faster_precision() -> Literal["float32", "bfloat16"]:
    """Return bfloat16 where torch finds a CUDA device, else the format in which large products are faster."""
    if torch.cuda.is_available():
        return "bfloat16"
    rounded, full = (measured_flops_per_s(torch.device("cpu"), each) for each in (torch.bfloat16, torch.float32))
    return "bfloat16" if rounded > _FASTER * full else "float32"


def _product_s(width: int, device: torch.device, dtype: torch.dtype, tries: int) -> float:
    left, right = (torch.ones(width, width, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(multiply, number=1, repeat=tries))
