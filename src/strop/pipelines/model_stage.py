"""The stage that says which weights a run starts from."""

from __future__ import annotations

from pathlib import Path

from strop.errors import ModelError
from strop.pipelines.demonstrations import play_demonstrations
from strop.pipelines.recipe import ModelStage
from strop.pipelines.stage import StageContext
from strop.pipelines.tiny_model import TinySize, make_tiny_model, make_tokenizer
from strop.rollout.chat import ChatFormat
from strop.runs import write_directory


async def run_model_stage(context: StageContext, stage: ModelStage) -> tuple[Path, str]:
    """The model directory and one sentence about it. Raises `ModelError` when there is no such model."""
    if stage.path is not None:
        path = find_model(stage.path)
        return path, f"{stage.path}"
    assert stage.tiny is not None  # the config's validator saw to it
    assert stage.demonstrator is not None
    sizes = stage.tiny
    # The tokenizer learns from whole conversations, tool output included; a tokenizer of single bytes is enough to play them.
    single_bytes = ChatFormat(make_tokenizer([], vocab_size=300))
    roomy = stage.model_copy(update={"sampling": stage.sampling.model_copy(update={"max_tokens": 1_000_000})})
    played = play_demonstrations(context, roomy, stage.demonstrator, single_bytes, num=sizes.num_texts)
    texts = [single_bytes.decode(trajectory.ids) async for trajectory in played]
    made = TinySize(num_parameters=0, vocab_size=0)

    def fill(directory: Path) -> None:
        nonlocal made
        made = make_tiny_model(sizes, texts, directory, seed=context.seed("weights"))

    write_directory(context.directory.model, fill)
    asked = "" if made.vocab_size == sizes.vocab_size else f" (of {sizes.vocab_size} asked for: the texts have no more)"
    return (
        context.directory.model,
        f"{made.num_parameters / 1e6:.2f} M parameters, {made.vocab_size} tokens{asked}, random weights",
    )


def find_model(path: str) -> Path:
    """A local model directory, or the hub's, fetched into its cache. Raises `ModelError` naming what is missing."""
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ModelError(f"{path}: no config.json there, so it is not a model directory. `strop model import` makes one.")
        return directory.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"{path}: no such directory. Give a model directory or a hub id such as org/name.")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ModelError(
            f"{path}: no such directory, and the hub could not give it: {str(error).splitlines()[0]}. Check the name and the"
            " connection, or import a model with `strop model import`."
        ) from error
