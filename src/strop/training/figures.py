"""What an update says of its tokens, gathered over its micro-batches: means, and of some figures how far they spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.protocol import SPREAD_FIGURES

_QUANTILES = {"p01": 0.01, "p99": 0.99}


class TokenFigures:
    """Of one update. Masked tokens are in none of them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, list[Tensor]] = {name: [] for name in SPREAD_FIGURES}

    def add(self, loss_mask: Tensor, values: Mapping[str, Tensor]) -> None:
        """Those of a micro-batch; each of the shape of `loss_mask`."""
        for name, of_tokens in values.items():
            unmasked = of_tokens[loss_mask]
            total = unmasked.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            if name in self._values:
                self._values[name].append(unmasked.cpu())

    def on_cpu(self) -> Self:
        """Itself, fit to be sent to another process."""
        self._sums = {name: total.cpu() for name, total in self._sums.items()}
        return self

    def merge(self, other: TokenFigures) -> None:
        """Take in those of other micro-batches."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for name, parts in other._values.items():
            self._values[name] += parts

    def summary(self, num_tokens: int) -> dict[str, float]:
        """The mean of each over `num_tokens`; NAME_p01, NAME_p99 and NAME_max of those that spread."""
        figures = {name: total.item() / num_tokens for name, total in self._sums.items()}
        for name, parts in self._values.items():
            if parts:
                values = torch.cat(parts).double().numpy()
                figures |= {f"{name}_{label}": float(np.quantile(values, at)) for label, at in _QUANTILES.items()}
                figures[f"{name}_max"] = float(values.max())
        return figures
