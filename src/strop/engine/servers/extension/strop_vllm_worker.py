"""What strop adds to a vLLM worker: weights read from a directory, and a checksum of the very bytes that were loaded.

It runs in the server's environment, which has no strop: this file stands alone. vLLM mixes the class into its worker
(`--worker-extension-cls strop_vllm_worker.StropWorker`), and `/collective_rpc` calls its methods in every worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class StropWorker:
    """Methods that vLLM's worker gets besides its own."""

    model_runner: Any  # vLLM's
    reload_weights: Callable[..., None]

    def strop_load_weights(self, directory: str) -> dict[str, object]:
        """Replace every weight by what the safetensors files of `directory` hold, in place.

        Returns:
            checksum: of what was read, by strop's `weights_checksum`.
            missing: vLLM's names of weights that the directory did not have.
        """
        model = self.model_runner.get_model()
        held = {name for name, _ in model.named_parameters()}
        digests: list[bytes] = []
        loaded: set[str] = set()
        load_weights = model.load_weights

        def load_and_note(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str] | None:
            names: set[str] | None = load_weights(weights)
            loaded.update(held if names is None else names)
            return names

        model.load_weights = load_and_note  # `reload_weights` only logs what it missed
        try:
            self.reload_weights(weights_iterator=read_weights(Path(directory), digests))
        finally:
            del model.load_weights
        return {"checksum": checksum_of(digests), "missing": sorted(held - loaded)}


def checksum_of(digests: list[bytes]) -> str:
    """strop's `weights_checksum`, from the digests that `read_weights` made."""
    total = hashlib.blake2b(digest_size=16)
    for digest in sorted(digests):
        total.update(digest)
    return total.hexdigest()


def read_weights(directory: Path, digests: list[bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a directory; `digests` gets one digest for each."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("rotary_emb.inv_freq"):  # old files hold it; it is computed from the config
                    continue
                tensor = file.get_tensor(name)
                digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                digests.append(digest.digest())
                yield name, tensor
