"""Writes the figures of a benchmark with the machine that they are of, and says whether its bars hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import strop
from strop.run_directory import write_json

_RESULTS = Path(__file__).parent / "results"
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "GOMP_SPINCOUNT")


def foreign_environment() -> dict[str, str]:
    """Return our environment for a process of another library, without what `import strop` sets for itself."""
    return {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}


def write_result(name: str, *, command: str, bars: Mapping[str, Mapping[str, Any]], **figures: Any) -> int:
    """Write results/`name`.json, and return the exit status: 0 if every bar holds."""
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in cpu if line.startswith("model name"))
    limits = {key: os.environ[key] for key in _LIMITS if key in os.environ}
    machine = {"processor": processor, "num_cores": os.cpu_count(), **limits, "strop": strop.__version__}
    path = _RESULTS / f"{name}.json"
    write_json(path, {"command": command, "machine": machine, **figures, "bars": bars})
    print(f"written: {path.relative_to(_RESULTS.parents[1])}")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1
