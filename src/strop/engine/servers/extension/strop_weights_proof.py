"""Reads weights from a directory, and proves that a vLLM worker computes with them. Imports nothing of strop or vLLM."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_log = logging.getLogger(__name__)
NUM_THREADS = min(4, os.cpu_count() or 1)  # of hashing
_BASE = ".base_layer"  # in names of what is wrapped for adapters
_ROUNDING = 0.01  # of a product in bfloat16, relative; another matrix is off by more than 1


def prove(model: Any, loaded: set[str] | None, directory: Path, digests: list[Future[bytes]], checksum: str) -> None:
    """Raise `ValueError` unless a model of vLLM computes with all weights of `directory`.

    Args:
        loaded: vLLM's names of weights that got a value; None where the model does not say.
        digests: of what was read, by `read_weights`.
        checksum: strop's `weights_checksum` of what was published.
    """
    if (held := checksum_of(digests)) != checksum:
        raise ValueError(f"they were published with checksum {checksum}, but it holds {held}")
    names = {name.replace(_BASE, "") for name, _ in model.named_parameters()}
    if missing := sorted(names - (names if loaded is None else {name.replace(_BASE, "") for name in loaded})):
        raise ValueError(f"it found no values for {len(missing)} of them: {', '.join(missing[:5])}")
    _pack_again(model)
    stale, num_unproven = _hold_against(model, directory)
    if stale:
        raise ValueError(f"it still computes with older values of {len(stale)}: {', '.join(stale[:5])}")
    if num_unproven:
        _log.warning("%d weights were loaded, but what computes with them could not be asked.", num_unproven)


def prove_adapter(model: Any, directory: Path, checksum: str) -> None:
    """Raise `ValueError` unless the newest LoRA adapter of a model of vLLM has the matrices in `directory`.

    They lie in buffers with one slot for each adapter; parts of a fused matrix have buffers of their own.
    """
    digests: list[Future[bytes]] = []
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        matrices = dict(read_weights(directory, digests, threads))
    if (held := checksum_of(digests)) != checksum:
        raise ValueError(f"the adapter was published with checksum {checksum}, but its files hold {held}")
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return  # each worker holds a part of every matrix
    manager = model.lora_manager
    slot = manager.lora_index_to_id.index(max(manager.list_adapters()))
    fused_of = _fused_of(manager)
    for name, matrix in matrices.items():
        path, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        parent, _, leaf = path.rpartition(".")
        fused, parts = fused_of.get(leaf, (leaf, [leaf]))
        module = manager.modules.get(f"{parent}.{fused}")
        if module is None:
            raise ValueError(f"it has no layer {parent}.{fused} for the adapter's matrix {name}")
        stacked = (module.lora_a_stacked if part == "A" else module.lora_b_stacked)[parts.index(leaf)]
        held_matrix = stacked[slot, 0, : matrix.shape[0], : matrix.shape[1]].cpu()
        if not torch.equal(held_matrix, matrix.to(held_matrix.dtype)):
            raise ValueError(f"it computes with other values of the adapter's matrix {name}")


def _fused_of(holder: Any) -> dict[str, tuple[str, list[str]]]:
    """Part of a fused matrix -> (the fused matrix, all its parts)."""
    mapping = getattr(holder, "packed_modules_mapping", {})
    return {part: (fused, parts) for fused, parts in mapping.items() for part in parts}


def checksum_of(digests: list[Future[bytes]]) -> str:
    """strop's `weights_checksum`, from the digests that `read_weights` began."""
    total = hashlib.blake2b(digest_size=16)
    for digest in sorted(each.result() for each in digests):
        total.update(digest)
    return total.hexdigest()


def read_weights(
    directory: Path, digests: list[Future[bytes]], threads: ThreadPoolExecutor | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a directory; with `threads`, `digests` gets one digest for each, computed there."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("rotary_emb.inv_freq"):  # old files hold it; it is computed from the config
                    continue
                tensor = file.get_tensor(name)
                if threads is not None:
                    if len(digests) >= NUM_THREADS:
                        digests[-NUM_THREADS].result()  # so that few tensors are held at once
                    digests.append(threads.submit(_digest, name, tensor))
                yield name, tensor


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _pack_again(model: Any) -> None:
    """What a CPU keeps in a second, packed form: vLLM's reload forgets that of a head that is tied to the embedding."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def _hold_against(model: Any, directory: Path) -> tuple[list[str], int]:
    """Modules that do not compute with what `directory` holds, and how many of its weights could not be asked about.

    A matrix is asked by multiplying: it may be kept in a form that only the multiplication knows.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return [], len([name for name, _ in read_weights(directory, [])])  # each worker holds a part of every matrix
    fused_of = _fused_of(model)
    # One that takes adapters is wrapped.
    modules = {name: getattr(module, "base_layer", module) for name, module in model.named_modules()}
    stale: list[str] = []
    num_unproven = 0
    waiting: dict[str, dict[str, torch.Tensor]] = {}  # parts of fused matrices
    for name, tensor in read_weights(directory, []):
        path, _, kind = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        if leaf in fused_of and path not in modules:
            fused, parts = fused_of[leaf]
            path = f"{parent}.{fused}"
            found = waiting.setdefault(f"{path}.{kind}", {})
            found[leaf] = tensor
            if len(found) < len(parts):
                continue
            tensor = torch.cat([found[part] for part in parts])
            del waiting[f"{path}.{kind}"]
        module = modules.get(path)
        if module is None or getattr(module, kind, None) is None:
            num_unproven += 1
        elif not _holds(module, kind, tensor):
            stale.append(f"{path}.{kind}")
        if name == "model.embed_tokens.weight" and getattr(model.config, "tie_word_embeddings", False):
            stale += [] if _multiplies_by(model.lm_head, tensor) else ["lm_head.weight"]
    return stale, num_unproven + sum(len(found) for found in waiting.values())


def _holds(module: Any, kind: str, tensor: torch.Tensor) -> bool:
    is_matrix = kind == "weight" and tensor.ndim == 2
    if is_matrix and hasattr(module, "quant_method") and type(module).__name__ != "VocabParallelEmbedding":
        return _multiplies_by(module, tensor)
    held = getattr(module, kind).detach()[: len(tensor)].cpu()
    return bool(torch.equal(held, tensor.to(held.dtype)))


def _multiplies_by(module: Any, matrix: torch.Tensor) -> bool:
    """Whether `module` gives the products of `matrix` (rows, columns), up to rounding, with a few random vectors."""
    device, dtype = next(module.parameters()).device, module.weight.dtype
    vectors = torch.randn(4, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        given = module.quant_method.apply(module, vectors.to(device), None)[:, : len(matrix)].float().cpu()
    expected = vectors.float() @ matrix.to(dtype).float().T
    return bool((given - expected).norm() <= _ROUNDING * expected.norm())
