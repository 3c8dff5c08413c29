"""What a curation was made of: the rules and the content of every file, so that no result is taken for another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.curation.config import AgreementRule, CurationConfig, DecontaminationRule, DifficultyRule, RowsSource
from strop.errors import TaskError
from strop.tasks.config import HubConfig

_FORMAT = 1  # of a result; another number makes one that is finished useless
VERDICTS = 2  # of parts; another number, where rules say other things than they did, makes old parts useless


def lineage(config: CurationConfig) -> dict[str, Any]:
    """The digests of all that the result depends on, and one over them.

    Sources and benchmarks count with their paths, which their rows have as source. Of outcomes the content alone does: those
    of a stage lie where the run does, which may be moved or spelt otherwise from try to try.

    Raises:
        TaskError: a file is not there.
    """
    outcomes = {rule.kind: rule.outcomes for rule in config.rules if isinstance(rule, AgreementRule | DifficultyRule)}
    judged_by = {kind: _digest(path) for kind, path in outcomes.items()}
    named = [path for key, path in named_files(config).items() if not key.endswith(".outcomes")]
    files = {str(path): _digest(path) for path in sorted({each for path in named for each in _below(path)})}
    said = config.model_dump(mode="json")
    for rule in said["rules"]:
        if rule["kind"] in judged_by:
            rule["outcomes"] = judged_by[rule["kind"]]
    whole = hashlib.sha256(json.dumps([_FORMAT, said, files], sort_keys=True).encode()).hexdigest()
    return {"digest": whole, "files": files | {str(path): judged_by[kind] for kind, path in outcomes.items()}}


def named_files(config: CurationConfig) -> dict[str, Path]:
    """The files and directories that `config` names, by key; of hub data sets those that are local directories."""
    found: dict[str, Path] = {}
    for number, source in enumerate(config.sources):
        found |= _named_by(source, f"sources.{number}")
    for rule in config.rules:
        if isinstance(rule, DecontaminationRule):
            for number, source in enumerate(rule.against):
                found |= _named_by(source, f"rules.{rule.kind}.against.{number}")
        elif isinstance(rule, AgreementRule | DifficultyRule):
            found[f"rules.{rule.kind}.outcomes"] = rule.outcomes
    return found


def _named_by(source: RowsSource, place: str) -> dict[str, Path]:
    if isinstance(source, HubConfig):
        directory = Path(source.name or "").expanduser()
        return {f"{place}.name": directory} if source.name and directory.is_dir() else {}
    paths = {"path": source.path, "test_path": source.test_path}
    return {f"{place}.{key}": path.expanduser() for key, path in paths.items() if path is not None}


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (each for each in path.rglob("*") if each.is_file())
    else:
        yield path


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskError(
            f"{path}: cannot be read: {error.strerror}. Set the path of a source or rule to a file of rows."
        ) from error
