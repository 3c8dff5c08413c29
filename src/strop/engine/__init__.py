"""Token ids in, token ids and log-probs out: the embedded engine, here or in a process of its own, and its scripted double."""

from strop.engine.config import EngineConfig
from strop.engine.process_engine import ProcessEngine
from strop.engine.protocol import (
    Capabilities,
    Capacity,
    CompletionRequest,
    InferenceEngine,
    NamedTensor,
    weights_checksum,
)
from strop.engine.scripted import Fault, Reply, ScriptedEngine
from strop.engine.torch_engine import TorchEngine

__all__ = [
    "Capabilities",
    "Capacity",
    "CompletionRequest",
    "EngineConfig",
    "Fault",
    "InferenceEngine",
    "NamedTensor",
    "ProcessEngine",
    "Reply",
    "ScriptedEngine",
    "TorchEngine",
    "weights_checksum",
]
