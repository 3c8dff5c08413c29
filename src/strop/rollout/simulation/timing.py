"""How long a simulated engine's steps take, fitted to those of a real one (`benchmarks/engine_trace.py` measures it)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from strop.config import Config, validate
from strop.errors import UserError
from strop.rollout.simulation.engines import EngineTiming
from strop.rollout.simulation.trace_file import Some
from strop.runs import read_json

TRACE_PATH = Path(__file__).parent / "engine_trace.json"


class DecodePoint(Config):
    rows: Annotated[float, Field(ge=1)]
    kv_tokens: NonNegativeFloat
    seconds: PositiveFloat  # of one step


class PrefillPoint(Config):
    tokens: Annotated[float, Field(ge=1)]
    seconds: PositiveFloat


class MeasuredTrace(Config):
    """What was measured of one engine, and where."""

    command: str
    model: str
    dtype: str
    machine: str
    decode: Some[DecodePoint]
    prefill: Some[PrefillPoint]

    def fit(self) -> EngineTiming:
        """Least squares of the relative error, with no coefficient below 0."""
        seconds = np.array([point.seconds for point in self.decode])
        columns = np.array([[1.0, point.rows, point.kv_tokens] for point in self.decode])
        step_s, row_s, kv_token_s = _nonnegative_fit(columns / seconds[:, None])
        return EngineTiming(step_s=step_s, row_s=row_s, kv_token_s=kv_token_s, prefill_token_s=self._prefill_token_s())

    def _prefill_token_s(self) -> float:
        """The median over all prompts; the fixed part of a prefill is counted in."""
        return float(np.median([point.seconds / point.tokens for point in self.prefill]))


def _nonnegative_fit(columns: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The x >= 0 that brings columns @ x closest to 1: the best over every choice of which coefficients are 0."""
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            found = np.linalg.lstsq(columns[:, chosen], np.ones(len(columns)), rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ found - 1.0) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])


def load_timing(path: Path = TRACE_PATH) -> EngineTiming:
    """The timing of the engine that `path` was measured of; the embedded one's by default.

    Raises:
        UserError: no such file.
        ConfigError: not a measured trace.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file. python benchmarks/engine_trace.py writes one.")
    return validate(MeasuredTrace, read_json(path), place=str(path)).fit()
