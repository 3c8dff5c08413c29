"""Token ids in, token ids and log-probs out: the embedded engine, in this process or in an actor, and a scripted double.

Nothing is imported before it is used, because `strop.engine.config` must load without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.engine.actor import ActorEngine
    from strop.engine.config import EngineConfig
    from strop.engine.protocol import (
        Capabilities,
        Capacity,
        CompletionRequest,
        InferenceEngine,
        NamedTensor,
        weights_checksum,
    )
    from strop.engine.publication import Publication
    from strop.engine.scripted import Fault, Reply, ScriptedEngine
    from strop.engine.torch.engine import TorchEngine

_MODULES = {"EngineConfig": "config", "ActorEngine": "actor", "TorchEngine": "torch.engine"} | {
    **dict.fromkeys(("Fault", "Reply", "ScriptedEngine"), "scripted"),
    **dict.fromkeys(
        ("Capabilities", "Capacity", "CompletionRequest", "InferenceEngine", "NamedTensor", "weights_checksum"), "protocol"
    ),
    "Publication": "publication",
}

__all__ = [
    "ActorEngine",
    "Capabilities",
    "Capacity",
    "CompletionRequest",
    "EngineConfig",
    "Fault",
    "InferenceEngine",
    "NamedTensor",
    "Publication",
    "Reply",
    "ScriptedEngine",
    "TorchEngine",
    "weights_checksum",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'strop.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"strop.engine.{_MODULES[name]}"), name)
