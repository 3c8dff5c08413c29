"""Proof that the weights which sample are the weights which were published (design law 6)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from strop.engine.protocol import NamedTensor
from strop.engine.weights import DecoderWeights
from strop.errors import ModelError, WeightsNotProven

_THOROUGH_EVERY_S = 60.0  # 0.7 s of hashing for SmolLM2 in float32: about a hundredth of the time at most
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class PublishedWeights:
    """The weights of an engine, and what was promised of them. Used by one thread; `version` may be read by any."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.version = -1
        self._weights = weights
        self._names: set[str] = set()  # that were sent since the last `retract`
        self._writable = ""  # checksum of what somebody could still write to
        self._num_writes = 0
        self._hashed_s = 0.0  # when what is held was last hashed
        self._doubt = "no weights were published to this engine yet"  # empty: the weights are proven

    def retract(self, doubt: str) -> None:
        """Weights are about to change: nothing may sample until `prove` succeeds."""
        self._doubt = doubt
        self._names = set()
        self._weights.unseal()

    def copy(self, name: str, tensor: Tensor) -> None:
        """Raises `WeightsNotProven` when the model has no such weight, or one of another shape."""
        self._weights.copy(name, tensor)
        self._names.add(name)

    def prove(self, version: int, checksum: str) -> None:
        """Accept what was copied as `version`.

        Raises:
            WeightsNotProven: weights are missing, or what is held now differs from `checksum`.
        """
        if missing := self._weights.missing(self._names):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self._doubt = f"the last publication (version {version}) lacked {shown}"
            raise WeightsNotProven(f"publication of version {version} lacks {len(missing)} weights: {shown}.")
        self._weights.seal()  # before the proof, which is of what the forward will read
        held = self._weights.checksum(self._names)
        if held != checksum:
            self._doubt = f"the last publication (version {version}) arrived damaged"
            raise WeightsNotProven(f"version {version} was published with checksum {checksum}, but the engine holds {held}.")
        writable = self._weights.writable_names()
        self._writable = held if writable == self._names else self._weights.checksum(writable)
        self.version, self._num_writes, self._doubt = version, self._weights.num_writes, ""
        self._hashed_s = time.monotonic()

    def read(self, directory: Path, version: int) -> None:
        """Accept the safetensors of a `transformers` model directory as `version`.

        Raises:
            ModelError: no safetensors there.
            WeightsNotProven: they are not those of this model.
        """
        self.retract(f"reading {directory} failed")
        for name, tensor in _tensors(directory):
            self.copy(name, tensor)
        self.prove(version, self._weights.checksum(self._names))

    def verify(self, *, is_idle: bool) -> None:
        """Check that nothing was written since the proof: by torch's write counters, and now and then by every byte.

        Bytes are hashed while nobody else waits for it, and at most once in `_THOROUGH_EVERY_S`: a lone rollout with tools
        is idle at each of its turns.

        Raises:
            WeightsNotProven: also on every later call, until weights are published again.
        """
        if not self._doubt and self._weights.num_writes != self._num_writes:
            self._doubt = f"somebody wrote to the weights of version {self.version} after they were published"
        if not self._doubt and is_idle and time.monotonic() - self._hashed_s >= _THOROUGH_EVERY_S:
            self._hash_again()
        if self._doubt:
            raise WeightsNotProven(f"{self._doubt}. Publish weights to the engine again before sampling from it.")

    def _hash_again(self) -> None:
        if self._weights.checksum(self._weights.writable_names()) != self._writable:
            self._doubt = f"the weights are no longer those that were published as version {self.version}"
        self._hashed_s = time.monotonic()


def _tensors(directory: Path) -> Iterator[NamedTensor]:
    index = directory / _INDEX
    if index.exists():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif (directory / _SINGLE).exists():
        shards = [_SINGLE]
    else:
        raise ModelError(f"{directory}: neither {_SINGLE} nor {_INDEX}. Save the model with transformers' save_pretrained.")
    for shard in shards:
        try:
            file = safe_open(directory / shard, framework="pt")
        except (SafetensorError, FileNotFoundError) as error:
            raise ModelError(f"{directory / shard}: missing or damaged: {error}. Save or download the model again.") from error
        with file:
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a mapping
                if not name.endswith("rotary_emb.inv_freq"):  # old files hold it; it is computed from the config
                    yield name, file.get_tensor(name)  # type: ignore[no-untyped-call]
