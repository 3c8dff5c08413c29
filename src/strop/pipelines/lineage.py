"""Lineage by content: what each stage stands on, which stages of a run are stale by that, and why.

A stage's digest covers its own part of the recipe and the recipe's root, the data that they name, the version of the code that
made it, and the digests of its parents. Keys that change no result count nowhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import strop
from strop.pipelines.claim import differences, without_free_keys
from strop.pipelines.recipe import Recipe
from strop.pipelines.stage import weights_digest
from strop.runs import RunDirectory, read_json, write_json

Lineage: TypeAlias = dict[str, Any]
"""What `lineage.json` holds."""
_FILES = ("path", "test_path", "prompt")


def lineages(recipe: Recipe, run: RunDirectory) -> dict[str, Lineage]:
    """What each stage stands on, as recipe and data are now.

    A stage that has begun keeps the version of the code and the number of processes that it began with: a newer strop, or
    another machine, is no reason to make all anew.
    """
    resolved = recipe.model_dump(mode="json")
    root = {key: value for key, value in resolved.items() if key not in ("name", "stages")}
    made: dict[str, Lineage] = {}
    for name, stage in recipe.stages.items():
        recorded = recorded_lineage(run, name)
        tree = _divided_as(resolved["stages"][name], recorded.get("recipe", {}).get("stages", {}).get(name, {}))
        cleaned: Mapping[str, Any] = without_free_keys({**root, "stages": {name: tree}})
        lineage: Lineage = {
            "recipe": cleaned,
            "data": _data({"tools": root["tools"], **tree}, recorded.get("data", {})),
            "code": recorded.get("code") or {"strop": strop.__version__},
            "parents": {f"{each.key}.{each.stage}": made[each.stage]["digest"] for each in stage.inputs()},
        }
        content = lineage | {"data": {key: facts["digest"] for key, facts in lineage["data"].items()}}
        made[name] = {"digest": _digest(json.dumps(content, sort_keys=True).encode()), **lineage}
    return made


def _divided_as(stage: dict[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved `stage` with the number of processes with which it was `begun`."""
    if not stage.get("trainer") or "workers" not in begun.get("trainer", {}):
        return stage
    return {**stage, "trainer": {**stage["trainer"], "workers": begun["trainer"]["workers"]}}


def recorded_lineage(run: RunDirectory, stage: str) -> Lineage:
    """What `stage` stood on when it began; {} where it has not begun."""
    path = run.stage(stage).lineage
    return read_json(path) if path.exists() else {}


def why_stale(run: RunDirectory, recipe: Recipe, now: Mapping[str, Lineage]) -> dict[str, str]:
    """Every stage that began with something else than what there is now, and what that is, in words."""
    found: dict[str, str] = {}
    for name, stage in recipe.stages.items():
        recorded = recorded_lineage(run, name)
        if not recorded or recorded["digest"] == now[name]["digest"]:
            continue
        told = [
            f"{key}: {there!r} then, {here!r} now" for key, there, here in differences(recorded["recipe"], now[name]["recipe"])
        ]
        before = recorded["data"]
        told += [
            f"{facts['path']} ({key}) has other contents"
            for key, facts in now[name]["data"].items()
            if before.get(key, {}).get("digest") != facts["digest"]
        ]
        told += [f"{each.stage} is stale" for each in stage.inputs() if each.stage in found]
        remade = [each for each in stage.inputs() if each.stage not in found]
        told += [
            f"{each.stage} was made anew"
            for each in remade
            if recorded["parents"].get(f"{each.key}.{each.stage}") != now[each.stage]["digest"]
        ]
        found[name] = "; ".join(told) or "what it stands on has changed"
    return found


def write_lineage(run: RunDirectory, stage: str, lineage: Lineage, *, product: Path | None = None) -> None:
    """Write down what `stage` stands on; with `product`, what it made of that, by content."""
    write_json(run.stage(stage).lineage, lineage if product is None else lineage | {"product": _content(product)})
    run.stage(stage).stale.unlink(missing_ok=True)


def _data(tree: Mapping[str, Any], before: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """The files and directories that a stage's part of the recipe or a tool names, by key, without those that are not there."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in sorted(tree.items()):
        place = f"{prefix}{key}"
        if isinstance(value, list):  # of entries of a schedule
            found |= _data({str(number): each for number, each in enumerate(value)}, before, f"{place}.")
        elif isinstance(value, Mapping):
            found |= _data(value, before, f"{place}.")
        elif key in _FILES and isinstance(value, str) and Path(value).expanduser().exists():
            path = Path(value).expanduser()
            found[place] = _facts(path, value, before.get(place, {}))
    return found


def _facts(path: Path, written: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """A file that has its size and time of last change is not read again."""
    files = [path] if path.is_file() else _files_below(path)
    stats = [each.stat() for each in files]
    seen = [[each.st_size, each.st_mtime_ns] for each in stats]
    digest = before["digest"] if before.get("seen") == seen else _content(path)
    return {"path": written, "digest": digest, "seen": seen}


def _content(path: Path) -> str:
    """A digest of a file, or of a directory: of its weights where it holds a model, else of its files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if any(path.glob("*.safetensors")):
        return weights_digest(path)
    return _digest("".join(f"{each.relative_to(path)} {_content(each)}\n" for each in _files_below(path)).encode())


def _files_below(directory: Path) -> list[Path]:
    return sorted(each for each in directory.rglob("*") if each.is_file())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
