"""LoRA (arXiv 2106.09685): low-rank matrices next to frozen weights, and the merged weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strop.errors import ModelError, RunError
from strop.run_directory import writing_to
from strop.training.config import LoraConfig

if TYPE_CHECKING:
    import transformers

_ADAPTER = "default"  # as the library calls the only one
_BASE = ".base_layer"
_FILE = "adapter_model.safetensors"


class Adapter:
    """Adds matrices A and B to all linear layers but the head: W x becomes W x + (alpha / rank) B A x.

    All other weights are frozen. B starts as zero, so that the model is unchanged at first.

    Raises:
        ModelError: the library is missing, or cannot adapt a layer of the model.
    """

    def __init__(self, model: transformers.PreTrainedModel, config: LoraConfig) -> None:
        try:
            import peft
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise ModelError("trainer.lora needs the extra 'lora': pip install 'strop[lora]'.") from error
        self._library_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        self._library_config.base_model_name_or_path = model.config._name_or_path
        model.requires_grad_(False)
        try:
            with torch.random.fork_rng(devices=[]), _none_moves_to_meta():
                torch.manual_seed(0)  # A is random; every process and every run draws the same one
                peft.inject_adapter_in_model(self._library_config, model, _ADAPTER)
        except ValueError as error:
            raise ModelError(f"trainer.lora: {str(error).rstrip('.')}. Train this model without trainer.lora.") from error
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
        for name, module in named:
            if not isinstance(base := module.get_base_layer(), nn.Linear):
                raise ModelError(
                    f"trainer.lora adapts only nn.Linear, but the layer {name} is a {type(base).__name__}."
                    " Train this model without trainer.lora."
                )
        self._layers: list[Any] = [module for _, module in named]
        self._scaling: dict[str, float] = {f"{name}.weight": module.scaling[_ADAPTER] for name, module in named}

    def published_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of the weights in the model without an adapter."""
        return [published_name(name) for name in names if not _is_of_adapter(name)]

    def merged(self, name: str, whole: Callable[[str], Tensor]) -> Tensor:
        """Return W + (alpha / rank) B A in float32 for a name of `published_names`. `whole` returns each part."""
        if name not in self._scaling:
            layer, _, kind = name.rpartition(".")
            is_bias_beside = kind == "bias" and f"{layer}.weight" in self._scaling
            return whole(f"{layer}{_BASE}.bias" if is_bias_beside else name)
        layer = name.removesuffix(".weight")
        a, b = (whole(f"{layer}.lora_{part}.{_ADAPTER}.weight") for part in "AB")
        return torch.addmm(whole(f"{layer}{_BASE}.weight"), b, a, alpha=self._scaling[name])

    def for_engines(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the adapter in the library's names, and its description. alpha / rank is multiplied into B, in float32."""
        rank = self._library_config.r
        scale = self._library_config.lora_alpha / rank
        scaled = {_library_name(name): tensor * scale if ".lora_B." in name else tensor for name, tensor in tensors.items()}
        targets = sorted({name.split(".")[-2] for name in self._scaling})
        description = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
        return {name: tensor.to(dtype) for name, tensor in scaled.items()}, description

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute without the adapter inside this context."""
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def write(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter in the format of `peft`. `tensors` are its matrices by the model's names."""
        with writing_to(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._library_config.save_pretrained(str(directory))
            named = {_library_name(name): tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, directory / _FILE, metadata={"format": "pt"})

    def read(self, directory: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Return what `write` wrote.

        Raises:
            RunError: the file is missing.
            ModelError: the adapter has other names or shapes: another model, rank or choice of layers.
        """
        if not (directory / _FILE).is_file():
            raise RunError(f"{directory / _FILE}: missing. The checkpoint is not complete; use the one before it.")
        tensors = load_file(directory / _FILE)
        names = {_library_name(name): name for name in shapes}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {
            _library_name(name): tuple(shape) for name, shape in shapes.items()
        }:
            raise ModelError(f"{directory}: not the adapter that is being trained: its matrices have other names or shapes.")
        return {names[name]: tensor for name, tensor in tensors.items()}


def _none_moves_to_meta() -> AbstractContextManager[Any]:
    """Let modules stay where the library would move them to the meta device, to the layers that they adapt."""
    move = nn.Module.to

    def stay_or_move(module: nn.Module, *place: Any, **options: Any) -> nn.Module:
        return module if torch.device("meta") in (*place, *options.values()) else move(module, *place, **options)

    return patch.object(nn.Module, "to", stay_or_move)


def published_name(name: str) -> str:
    """Return the name of a weight in the model without an adapter."""
    return name.replace(_BASE, "")


def _is_of_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _library_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")
