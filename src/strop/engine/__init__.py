"""Token ids in, token ids and log-probs out: the embedded engine, and its scripted double."""

from strop.engine.config import EngineConfig
from strop.engine.protocol import (
    Capabilities,
    Capacity,
    CompletionRequest,
    InferenceEngine,
    NamedTensor,
    weights_checksum,
)
from strop.engine.scripted import Reply, ScriptedEngine
from strop.engine.torch_engine import TorchEngine

__all__ = [
    "Capabilities",
    "Capacity",
    "CompletionRequest",
    "EngineConfig",
    "InferenceEngine",
    "NamedTensor",
    "Reply",
    "ScriptedEngine",
    "TorchEngine",
    "weights_checksum",
]
