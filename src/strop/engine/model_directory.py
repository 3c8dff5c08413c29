"""What a model directory says of its model's architecture, read from the disk alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from strop.errors import ModelError


def config_of(directory: Path) -> Any:
    """The `transformers` config of the model in `directory`.

    Raises:
        ModelError: no such directory, or nothing in it that `transformers` knows as a model. No hub is asked for it.
    """
    if not directory.is_dir():  # what is no path may be an id to transformers, which asks its hub, and again, and again
        raise ModelError(
            f"{directory}: no such model directory. Give the path of one, as `strop model import` makes it; a hub id is none."
        )
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: not a model directory that transformers can load: {error}") from error
