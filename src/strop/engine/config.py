"""What a recipe may say about the engine that samples."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from strop.config import Config
from strop.errors import ConfigError


class EngineConfig(Config):
    """The embedded engine: `transformers` weights, our own forward, in a thread of this process."""

    kind: Literal["torch"] = "torch"
    slots: PositiveInt = 64  # conversations that hold KV memory at once; all of them decode together
    max_length: PositiveInt = 1024  # tokens of one conversation, completions included
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda", "auto"] = "auto"  # auto: cuda where there is one
    threads: PositiveInt | None = None  # torch's own choice when unset; torch keeps one number for the whole process
    deterministic: bool = True  # a request's tokens and log-probs do not depend on what else is in the batch
    cached_prompts: NonNegativeInt = 16  # opening prompts whose KV is kept, so that a group's prompt is computed once
    deadline_s: PositiveFloat = 600.0  # of one completion, waiting for a slot included

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def torch_device(self) -> torch.device:
        """Raises `ConfigError` for "cuda" where torch sees no such device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError('engine.device is "cuda", but torch sees no CUDA device here. Use "auto" or "cpu".')
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)
