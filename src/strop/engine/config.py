"""The `engine` table of a recipe: which engines sample, and how; and the measured speed that decides `dtype = "auto"`."""

from __future__ import annotations

import os
import timeit
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    SerializeAsAny,
    WithJsonSchema,
    computed_field,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from strop.config import Choice, Config
from strop.errors import ConfigError
from strop.registry import import_class, place_of

if TYPE_CHECKING:
    import torch

    from strop.engine.protocol import InferenceEngine

_Device: TypeAlias = Annotated[int, Field(ge=0, le=1023)]
_Address: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/\s]\S*$")]
_MAX_S = 86_400.0 * 365
_WIDEST = {"cpu": 1024, "cuda": 8192}  # width of the products that a device is measured by
_FASTER = 1.2  # times, so that the choice is the same in the next process
_NARROWEST, _SHORT_S, _NUM_TRIES = 128, 0.02, 8
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA adapters


@cache
def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of products on this device, measured once in a process: of the widest that take a short time."""
    widest, width = _WIDEST.get(device.type, _WIDEST["cpu"]), _NARROWEST
    while width < widest and _product_s(width, device, dtype, 3) < _SHORT_S:
        width *= 2
    return 2 * width**3 / _product_s(width, device, dtype, _NUM_TRIES)


def _product_s(width: int, device: torch.device, dtype: torch.dtype, tries: int) -> float:
    import torch

    from strop.engine.torch.cpu.products import is_faster, product

    left, right = (torch.ones(width, width, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        if is_faster(left, right):
            product(left, right)
        else:
            left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(multiply, number=1, repeat=tries))


def _chosen(value: Any) -> Any:
    """Return bfloat16 for "auto" where torch finds a CUDA device, else the format in which large products are faster."""
    if value != "auto":
        return value
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    rounded, full = (measured_flops_per_s(torch.device("cpu"), each) for each in (torch.bfloat16, torch.float32))
    return "bfloat16" if rounded > _FASTER * full else "float32"


Precision: TypeAlias = Annotated[
    Literal["float32", "bfloat16"],
    BeforeValidator(_chosen),
    WithJsonSchema({"enum": ["auto", "float32", "bfloat16"], "type": "string"}),
]
"""A number format. A recipe may say "auto", for the faster one on the machine that reads it."""


class AnyEngine(Config):
    """The keys that all kinds of engines have."""

    can_keep_requests: ClassVar[bool] = False
    """Whether requests can go on with weights that are published meanwhile."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Number of engines. Rollouts are spread over them.")
    slots: int = Field(
        default=64, ge=1, le=10**9, description="Conversations that one engine holds at once. All of them decode together."
    )
    max_length: int = Field(
        default=1024,
        ge=1,
        le=10_000_000,
        description="Tokens of one conversation, with prompt and tool output.",
    )
    dtype: Precision = Field(
        default="float32",
        description="Precision of weights and KV cache. auto: bfloat16 where torch finds a CUDA device, else the one in which"
        " the processor that reads the recipe computes large products faster.",
    )
    stall_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=_MAX_S,
        description="An engine that computes nothing for this long while requests wait is given up. A request that is only slow"
        " is not.",
    )
    devices: tuple[_Device, ...] = Field(
        default=(),
        max_length=1024,
        description="CUDA devices, divided evenly among the replicas in order. Empty: the devices that an engine finds.",
    )

    _adapter_slots: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _shares_devices_out(self) -> Self:
        if len(self.devices) % self.num_engines:
            raise ValueError(
                f"engine.devices names {len(self.devices)} devices, which cannot be divided evenly among {self.num_engines}"
                f" engines. Name a multiple of {self.num_engines}, or change engine.replicas."
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def num_engines(self) -> int:
        return self.replicas

    @property
    def is_started(self) -> bool:
        """Whether strop starts it in a process, which a cluster places on a node."""
        return False

    @property
    def is_apart(self) -> bool:
        """Whether it computes in another process than its caller."""
        return True

    @property
    def sleeps(self) -> bool:
        """Whether it leaves its devices to the trainer while that computes."""
        return False

    @property
    def adapter_slots(self) -> int:
        """LoRA adapters that it holds at once. 0: it takes merged weights."""
        return self._adapter_slots

    def with_adapters(self, *, rank: int, slots: int) -> Self:
        """Return the config of an engine that takes LoRA adapters of up to `rank` and holds `slots` of them, if it can."""
        return self

    def only(self, place: int) -> Self:
        """Return the config of the engine with index `place`."""
        width = len(self.devices) // self.num_engines
        return self.model_copy(update={"replicas": 1, "devices": self.devices[place * width : (place + 1) * width]})


class EngineConfig(AnyEngine):
    """The embedded engine: `transformers` weights and strop's own forward pass, in a thread or in a separate process."""

    can_keep_requests: ClassVar[bool] = True
    kind: Literal["torch"] = "torch"
    device: Literal["cpu", "cuda", "auto"] = Field(default="auto", description="auto: cuda if torch finds a device.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that compute. Unset: as many as torch chooses, and one for a tiny model.",
    )
    deterministic: bool = Field(
        default=True, description="Make the tokens and log-probs of a request independent of the rest of the batch."
    )
    decode: Literal["auto", "eager", "static"] = Field(
        default="auto",
        description="static: decode in a few fixed sizes, on a GPU as CUDA graphs. auto: static on CUDA, else eager.",
    )
    own_process: bool = Field(
        default=False,
        description="Run the engine in a separate process, whose failure does not end the run. Several replicas always do."
        " Ray starts the processes.",
    )

    @property
    def is_started(self) -> bool:
        return True

    @property
    def is_apart(self) -> bool:
        return self.own_process or self.replicas > 1 or bool(self.devices)

    def only(self, place: int) -> Self:
        one = super().only(place)
        if self.replicas == 1:
            return one
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.replicas)
        return one.model_copy(update={"own_process": True, "threads": threads})

    @property
    def torch_device(self) -> torch.device:
        """Return the device. Raises `ConfigError` if it is "cuda" and torch finds no CUDA device."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError('engine.device is "cuda", but torch sees no CUDA device here. Use "auto" or "cpu".')
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


class ServerConfig(AnyEngine):
    """The keys of server engines: a program in its own environment, which strop starts or which runs already."""

    python: Path | None = Field(
        default=None, description="Interpreter of the environment that has the server. strop starts the server with it."
    )
    addresses: tuple[_Address, ...] = Field(
        default=(),
        max_length=1024,
        description="http://host:port of running servers on this machine, instead of python (docs/engines.md).",
    )
    tensor_parallel: int = Field(default=1, ge=1, le=1024, description="Devices that share the weights of one replica.")
    arguments: tuple[str, ...] = Field(default=(), description="More arguments for the command line of the server.")
    environment: dict[str, str] = Field(default={}, description="More environment variables for the server.")
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=_MAX_S,
        description="Longest time until a server is up, for its first completion, and for it to read published weights.",
    )

    @model_validator(mode="after")
    def _is_started_or_given(self) -> Self:
        if self.python is None and not self.addresses:
            raise ValueError(
                "engine needs either python, the interpreter of the server's environment, or addresses of running servers."
            )
        if self.python is not None and self.addresses:
            raise ValueError(
                "engine.python and engine.addresses are both set. Keep python if strop starts the servers, or addresses if they"
                " run already."
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("engine.addresses names a server twice. Each address is one engine: name each server once.")
        if self.addresses and self.replicas not in (1, len(self.addresses)):
            raise ValueError(
                f"engine.replicas is {self.replicas}, but there are {len(self.addresses)} addresses. Remove replicas:"
                " each address is one engine."
            )
        if self.devices and len(self.devices) != self.num_engines * self.tensor_parallel:
            raise ValueError(
                f"engine.devices names {len(self.devices)} devices, but {self.num_engines} replicas of {self.tensor_parallel}"
                f" need {self.num_engines * self.tensor_parallel}."
            )
        return self

    @property
    def is_started(self) -> bool:
        return self.python is not None

    @property
    def num_engines(self) -> int:
        return len(self.addresses) or self.replicas

    def only(self, place: int) -> Self:
        return super().only(place).model_copy(update={"addresses": self.addresses[place : place + 1]})


class VllmConfig(ServerConfig):
    """vLLM, over HTTP with token ids in and out."""

    can_keep_requests: ClassVar[bool] = True
    kind: Literal["vllm"] = "vllm"
    kv_mib: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="KV memory of one replica in MiB. Unset: enough for `slots` conversations of `max_length` tokens.",
    )
    eager: bool = Field(default=False, description="Do not compile: starts in a third of the time, decodes more slowly.")
    sleep: bool = Field(
        default=False,
        description="Share the GPUs with the trainer: a server frees its weights and KV memory while the trainer computes.",
    )
    _adapter_rank: int = PrivateAttr(default=0)

    @property
    def sleeps(self) -> bool:
        return self.sleep

    @property
    def adapter_rank(self) -> int:
        """The largest rank that the server has room for; vLLM knows some ranks only."""
        return min(rank for rank in _VLLM_RANKS if rank >= self._adapter_rank)

    def with_adapters(self, *, rank: int, slots: int) -> Self:
        # A server that sleeps forgets the weights under its adapters; one that was given by address was started otherwise.
        if self.sleep or self.addresses or rank > _VLLM_RANKS[-1]:
            return self
        config = self.model_copy()
        config._adapter_rank, config._adapter_slots = rank, slots
        return config


class SglangConfig(ServerConfig):
    """SGLang, over its native token endpoints. Written to the published schema; never tested with SGLang itself."""

    kind: Literal["sglang"] = "sglang"


class OwnEngine(AnyEngine, ABC):
    """Base of an engine of your own: its keys, and how one is opened. A recipe names it as `kind = "my_module:MyEngine"`.

    It takes part like the others: `replicas` of them are opened, rollouts are spread over them, and one that fails is replaced.
    An engine that computes in another process overrides `is_apart`.
    """

    @abstractmethod
    async def open(self, model: Path, *, detokenize: Callable[[Sequence[int]], str]) -> InferenceEngine:
        """Open one engine, which samples from the weights in the directory `model` as version 0.

        Args:
            detokenize: ids -> text, for stop strings.
        """

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kind(self) -> str:
        """The word by which a recipe names this class."""
        return place_of(type(self))

    @property
    def is_apart(self) -> bool:
        return False

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        own = {"type": "string", "pattern": ":", "description": "An engine of your own: my_module:MyEngine."}
        return {"type": "object", "title": cls.__name__, "properties": {"kind": own}, "required": ["kind"]}


def _own_engine(kind: str) -> type[OwnEngine]:
    """Return the class that `kind` names. Raises `ValueError` if there is none, or it cannot be opened."""
    try:
        return import_class(kind, OwnEngine, key="kind", called="Engine")
    except ConfigError as error:
        raise ValueError(f"kind: {str(error).removeprefix('kind: ')}") from error


EngineChoice: TypeAlias = Annotated[
    EngineConfig | VllmConfig | SglangConfig | SerializeAsAny[OwnEngine], Choice(default="torch", own=_own_engine)
]
