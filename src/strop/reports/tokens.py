"""Finds the tokenizer of a run's stage, and says what text each of its tokens has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from strop.reports.log import RunLog, StageLog
from strop.runs import RunDirectory, read_json


def find_tokenizer(run: RunDirectory, log: RunLog, stage: StageLog) -> Tokenizer | None:
    """The stage's own, that of the model it began with, or that of an earlier stage; None where no file of one is found."""
    names = [each.name for each in log.stages]
    earlier = names[: names.index(stage.name)]
    files = (
        place / "tokenizer.json"
        for name in [stage.name, *([stage.init] if stage.init else []), *reversed(earlier)]
        for place in _models(run, name)
    )
    return next((Tokenizer.from_file(str(file)) for file in files if file.is_file()), None)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id. Of a character that several ids share, the first has it all and the others are empty."""
    pieces: list[str] = []
    while len(pieces) < len(ids):
        start = len(pieces)
        for width in (1, 2, 3, 4):
            text = tokenizer.decode(list(ids[start : start + width]), skip_special_tokens=False)
            if "\ufffd" not in text:
                break
        else:
            text, width = tokenizer.decode([ids[start]], skip_special_tokens=False), 1
        if (tokenizer.id_to_token(ids[start]) or "").startswith("▁") and not text.startswith(" "):
            text = " " + text  # SentencePiece takes the space off a text's first word
        pieces += [text, *[""] * (min(width, len(ids) - start) - 1)]
    return pieces


def _models(run: RunDirectory, stage: str) -> list[Path]:
    """Where the model of `stage` may lie: in the stage, or, where it only named one, where it says."""
    directory = run.stage(stage)
    elsewhere = read_json(directory.done).get("model") if directory.done.exists() else None
    return [directory.model, *([Path(elsewhere)] if elsewhere else [])]
