"""Lineage by content: what each stage stands on, which stages of a run are stale by that, and why.

A stage's digest covers its own part of the recipe and the recipe's root, the data and the user's own modules that they name,
the code that made it, and the digests of its parents. Keys that change no result count nowhere. What the parents had made when
the stage began stands beside it: one recipe may make other weights another time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import strop
from strop.pipelines.claim import differences, without_free_keys
from strop.pipelines.curations import files_of
from strop.pipelines.recipe import CurationStage, Recipe
from strop.pipelines.stage import weights_digest
from strop.runs import RunDirectory, read_json, write_json

Lineage: TypeAlias = dict[str, Any]
"""What `lineage.json` holds."""
_FILES = ("path", "test_path", "prompt")
_CODE = ("function", "source")
"""Keys that hold `module:name`, code of the user's own."""
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Endings of a model directory's files that say how its weights are used: config, tokenizer, chat template, code of its own."""


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
        code = recorded.get("code") or {"strop": strop.__version__, "source": _source_digest()}
        before = recorded.get("data", {})
        of_curation = files_of(stage) if isinstance(stage, CurationStage) else {}
        lineage: Lineage = {
            "recipe": cleaned,
            "data": _data({"tools": root["tools"], **tree}, before, is_whole="source" in code)
            | {key: _facts(path, str(path), before.get(key, {})) for key, path in of_curation.items() if path.exists()},
            "code": code,
            "parents": {f"{each.key}.{each.stage}": made[each.stage]["digest"] for each in stage.inputs()},
        }
        content = lineage | {"data": {key: facts["digest"] for key, facts in lineage["data"].items()}}
        digest = _digest(json.dumps(content, sort_keys=True).encode())
        made[name] = {"digest": digest, **lineage, "stands_on": list(dict.fromkeys(each.stage for each in stage.inputs()))}
        if "hub" in recorded:  # the commits that it has read go on to be those that it reads
            made[name]["hub"] = recorded["hub"]
    return made


def begun_with_other_code(now: Mapping[str, Lineage]) -> list[str]:
    """Of `lineages`, the stages that began under other files of strop than lie here now; they are kept as they are."""
    return [name for name, lineage in now.items() if lineage["code"].get("source", _source_digest()) != _source_digest()]


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
        if not recorded:
            continue
        parents = list(dict.fromkeys(each.stage for each in stage.inputs()))
        stale = [each for each in parents if each in found]
        other = [each for each in parents if each not in found and has_other_product(run, recorded, each)]
        is_changed = recorded["digest"] != now[name]["digest"]
        if not (is_changed or stale or other):
            continue
        told = [
            f"{key}: {there!r} then, {here!r} now" for key, there, here in differences(recorded["recipe"], now[name]["recipe"])
        ]
        before = recorded["data"]
        if not told:  # else a file of before may be one that the recipe names no more
            gone = [(key, facts["path"]) for key, facts in before.items() if key not in now[name]["data"]]
            told += [f"{path} ({key}) is not there any more" for key, path in gone]
        told += [
            f"{facts['path']} ({key}) has other contents"
            for key, facts in now[name]["data"].items()
            if before.get(key, {}).get("digest") != facts["digest"]
        ]
        told += [f"{each} is stale" for each in stale]
        remade = [
            each.stage
            for each in stage.inputs()
            if each.stage not in found and recorded["parents"].get(f"{each.key}.{each.stage}") != now[each.stage]["digest"]
        ]
        told += [f"{each} was made anew" for each in parents if each in remade or each in other]
        found[name] = "; ".join(told) or "what it stands on has changed"
    return found


def write_lineage(run: RunDirectory, stage: str, lineage: Lineage, *, product: Path | None = None) -> None:
    """Write down what `stage` stands on; with `product`, what it made of that, by content.

    A product that is not what stages behind it had begun with makes these stale: they are marked, and all that stand on them.
    """
    made = {} if product is None else {"product": _content(product)}
    had = {each: recorded_lineage(run, each).get("product") for each in lineage["stands_on"]}
    write_json(run.stage(stage).lineage, lineage | {"parent_products": had} | made)
    run.stage(stage).stale.unlink(missing_ok=True)
    if made:
        _mark_what_had_another(run, stage)


def has_other_product(run: RunDirectory, recorded: Lineage, parent: str) -> bool:
    """Whether `parent` has made something else than what a stage began with. Not told by an older strop, it is the same."""
    had, has = recorded.get("parent_products", {}).get(parent), recorded_lineage(run, parent).get("product")
    return had is not None and has is not None and had != has


def _mark_what_had_another(run: RunDirectory, remade: str) -> None:
    begun = {path.parent.name: read_json(path) for path in sorted(run.path.glob("stages/*/lineage.json"))}
    because = {name: f"{remade} was made anew" for name, recorded in begun.items() if has_other_product(run, recorded, remade)}
    fresh = list(because)
    while fresh:
        parent = fresh.pop()
        behind = [name for name, recorded in begun.items() if parent in recorded.get("stands_on", ()) and name not in because]
        because |= dict.fromkeys(behind, f"{parent} is stale")
        fresh += behind
    for name, why in because.items():
        if not run.stage(name).stale.exists():
            write_json(run.stage(name).stale, {"because": why})


def _data(tree: Mapping[str, Any], before: Mapping[str, Any], prefix: str = "", *, is_whole: bool) -> dict[str, dict[str, Any]]:
    """What a stage's part of the recipe or a tool names, by key: files, directories, the user's own modules; without those
    that are not there.

    Args:
        before: what is recorded; what has its size and time of last change is not read again.
        is_whole: with modules and with local directories of data sets, which a stage that an older strop began does not have.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in sorted(tree.items()):
        place = f"{prefix}{key}"
        if isinstance(value, list):  # of entries of a schedule
            found |= _data({str(number): each for number, each in enumerate(value)}, before, f"{place}.", is_whole=is_whole)
        elif isinstance(value, Mapping):
            found |= _data(value, before, f"{place}.", is_whole=is_whole)
        elif isinstance(value, str) and (path := _named(tree, key, value, is_whole=is_whole)) is not None and path.exists():
            found[place] = _facts(path, value, before.get(place, {}))
    return found


def _named(table: Mapping[str, Any], key: str, value: str, *, is_whole: bool) -> Path | None:
    """The file or directory that `value` stands for, where it does."""
    if key in _FILES:
        return Path(value).expanduser()
    if is_whole and key == "name" and table.get("kind") == "hub":  # of the hub, or a directory that `datasets` loads
        return Path(value).expanduser()
    return _module_file(value) if is_whole and key in _CODE and ":" in value else None


def _module_file(path: str) -> Path | None:
    """Where the module of `module:name` lies; None for one of strop's own, which `code` has, and for one that is not there."""
    module = path.partition(":")[0]
    if module.partition(".")[0] == "strop":
        return None
    if "" not in sys.path:  # as where it is imported
        sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, SyntaxError, NameError, ValueError):  # whoever imports it says what is wrong
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


@cache
def _source_digest() -> str:
    """Of this package as it lies here: programs, prompts and templates. Releases have one version, and so has all between."""
    package = Path(strop.__file__).parent
    files = [each for each in _files_below(package) if "__pycache__" not in each.parts]
    return _digest("".join(f"{each.relative_to(package)} {_content(each)}\n" for each in files).encode())


def model_digest(model: Path) -> str:
    """A digest of a model directory: its weights, and what says how they are used. A card beside them changes nothing."""
    beside = [
        each
        for each in _files_below(model)
        if each.suffix in _BESIDE_WEIGHTS
        and each.name != "lineage.json"  # where an export says what it comes from
        and not any(part.startswith(".") for part in each.relative_to(model).parts)
    ]
    told = "".join(f"{each.relative_to(model)} {_content(each)}\n" for each in beside)
    return _digest(f"{weights_digest(model)}\n{told}".encode())


def _facts(path: Path, written: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """A file that has its size and time of last change is not read again.

    Of a model directory a stage that an older strop began has the digest of the weights alone, and keeps to that.
    """
    files = [path] if path.is_file() else _files_below(path)
    stats = [each.stat() for each in files]
    seen = [[each.st_size, each.st_mtime_ns] for each in stats]
    is_whole_model = path.is_dir() and any(path.glob("*.safetensors")) and (not before or "has_tokenizer" in before)
    facts = {"path": written, "seen": seen} | ({"has_tokenizer": True} if is_whole_model else {})
    if before.get("seen") == seen:
        return facts | {"digest": before["digest"]}
    return facts | {"digest": model_digest(path) if is_whole_model else _content(path)}


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
