"""The lineage of a stage: the keys, files and results of other stages that it reads. A stage whose lineage changed is stale.

`lineage.json` of a stage is written when the stage begins, and again with the digests of its result when it finishes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import strop
from strop.errors import RunError
from strop.recipe.recipe import Recipe
from strop.run_directory import RunDirectory, copy_lines, file_digest, file_digests, read_json, write_directory, write_json
from strop.runs.manifest import Difference, differences, locked, without_free_keys

Lineage: TypeAlias = dict[str, Any]
"""The content of a `lineage.json`."""
_FILE_KEYS = ("path", "test_path", "prompt")
_CODE_KEYS = ("function", "source", "kind")
"""Keys that may hold `module:name`, code of the user's."""
_MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of the files that decide what a model directory computes: weights, config, tokenizer, chat template, own code."""


def stage_keys(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the keys of `recipe` that change what the stage `name` makes, as JSON values."""
    stage = recipe.stages[name]
    root = recipe.for_stage(name).model_dump(mode="json", include={"seed", "threads", *stage.root_keys})
    own = {key: value for key, value in stage.keys().items() if key != "engine"}  # which is that of the root by now
    return without_free_keys({**root, "stages": {name: own}})


def lineages(recipe: Recipe, run: RunDirectory) -> dict[str, Lineage]:
    """Return the lineage of each stage as recipe and files are now, without the results of other stages."""
    found: dict[str, Lineage] = {}
    for name in recipe.stages:
        recorded = recorded_lineage(run, name)
        keys = stage_keys(recipe, name)
        found[name] = {
            "keys": keys,
            "files": _files(recipe, name, keys, recorded.get("files", {})),
            "code": recorded.get("code") or {"strop": strop.__version__, "digest": _source_digest()},
        }
        if "hub" in recorded:  # the stage goes on with the commits that it has read
            found[name]["hub"] = recorded["hub"]
    return found


def recorded_lineage(run: RunDirectory, stage: str) -> Lineage:
    """Return the lineage with which `stage` began; {} if it has not begun."""
    path = run.stage(stage).lineage
    return read_json(path) if path.exists() else {}


def why_stale(run: RunDirectory, recipe: Recipe, now: Mapping[str, Lineage]) -> dict[str, str]:
    """Return each stage of which something that it reads has changed since it began, and what has changed."""
    found: dict[str, str] = {}
    for name in recipe.stages:
        recorded = recorded_lineage(run, name)
        if not recorded:
            continue
        changes = [
            f"{key}: {there!r} -> {here!r}" for key, there, here in blocking_changes(recorded["keys"], now[name]["keys"])
        ]
        before, files = recorded["files"], now[name]["files"]
        if not changes:  # else the recipe may name other files
            changes += [f"{facts['path']} ({key}) is missing" for key, facts in before.items() if key not in files]
        changes += [
            f"{facts['path']} ({key}) has other contents"
            for key, facts in files.items()
            if before.get(key, {}).get("digest") != facts["digest"]
        ]
        for parent in parents_of(recipe, name):
            if parent in found:
                changes.append(f"{parent} is stale")
            elif has_other_product(run, recorded, parent):
                changes.append(f"{parent} has another result")
        if changes:
            found[name] = "; ".join(changes)
    return found


def state_of(run: RunDirectory, recipe: Recipe) -> list[str]:
    """Return what the plan says of a run that has begun: the finished stages, and those that are stale."""
    if not run.manifest.exists():
        return []
    done = ", ".join(name for name in recipe.stages if run.stage(name).done.exists())
    stale = why_stale(run, recipe, lineages(recipe, run))
    return [f"{run.path}: finished before: {done or 'nothing'}."] + [
        f"{name} is stale: {why}. Rerun it with --from {name}." for name, why in stale.items()
    ]


def blocking_changes(there: Any, here: Any) -> list[Difference]:
    """Return the changes of a stage's keys that make it stale. With another number of processes a stage may go on."""
    free = (".trainer.workers", ".trainer.fsdp_size", ".trainer.sequence_parallel")
    return [each for each in differences(there, here) if not each[0].endswith(free)]


def parents_of(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Return the stages that the stage `name` reads from."""
    return tuple(dict.fromkeys(each.stage for each in recipe.stages[name].inputs()))


def has_other_product(run: RunDirectory, recorded: Lineage, parent: str) -> bool:
    """Return whether the result of `parent` differs from the one that a stage began with. An unfinished parent has none."""
    had, has = recorded["parents"].get(parent), recorded_lineage(run, parent).get("product")
    return had is not None and has is not None and had != has


def write_lineage(run: RunDirectory, recipe: Recipe, stage: str, lineage: Lineage, *, product: Path | None = None) -> None:
    """Record the lineage of `stage`, with the digests of its parents' results and of its own result, `product`."""
    parents = {each: recorded_lineage(run, each).get("product") for each in parents_of(recipe, stage)}
    made = {} if product is None else {"product": digests_of(product)}
    write_json(run.stage(stage).lineage, lineage | {"parents": parents} | made)
    run.stage(stage).stale.unlink(missing_ok=True)


def mark_stale(run: RunDirectory, recipe: Recipe, stale: Mapping[str, str]) -> None:
    """Write `stale.json` for each stage in `stale`, and remove that of others.

    A mark stays while a parent is unfinished: its result, once it is there, may be another one.
    """
    unknown: set[str] = set()
    for name in recipe.stages:
        parents = parents_of(recipe, name)
        if name in stale:
            write_json(run.stage(name).stale, {"because": stale[name]})
        elif any(each in unknown or not run.stage(each).done.exists() for each in parents):
            unknown.add(name)
        else:
            run.stage(name).stale.unlink(missing_ok=True)


def check_inputs(run: RunDirectory, recipe: Recipe, name: str) -> None:
    """Compare every file that the stage `name` reads from finished stages with what these stages wrote.

    Raises:
        RunError: a file has changed, or is missing.
    """
    for parent in parents_of(recipe, name):
        written = recorded_lineage(run, parent).get("product")
        if not written:
            continue
        done = read_json(run.stage(parent).done)
        product = run.path / str(done.get("model") or done["data"])
        found = digests_of(product) if product.exists() else {}
        for file in sorted({*written, *found}):
            if written.get(file) != found.get(file):
                path = product / file if product.is_dir() else product
                what = "removed" if file not in found else "changed" if file in written else "added"
                raise RunError(
                    f"{path}: {what} since stage {parent} finished. Restore it, or rerun the stage with --from {parent}."
                )


def _files(recipe: Recipe, name: str, keys: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the stage reads from outside the run, by key. A key that names no existing file is left out."""
    found: dict[str, dict[str, Any]] = {}
    # Tools and engine are not in one table with the stage's keys: an evaluation has a key `tools` of its own.
    shared = [each for root in ("tools", "engine") for each in _texts(keys.get(root, {}), f"{root}.")]
    for place, key, text, table in (*shared, *_texts(keys["stages"][name])):
        if key in _CODE_KEYS and (module := _module_file(text)) is not None:
            # The docstring of a function tool is its description in the prompt.
            found[place] = {"path": text, "digest": syntax_digest(module, with_docstrings=place.startswith("tools."))}
        elif key in _FILE_KEYS or (key == "name" and table.get("kind") == "hub"):  # `datasets` loads directories too
            path = Path(text).expanduser()
            if path.exists():
                found[place] = _facts(path, text, before.get(place, {}))
    paths = {facts["path"] for facts in found.values()}
    others = {key: path for key, path in recipe.stages[name].files().items() if str(path) not in paths and path.exists()}
    return found | {key: _facts(path, str(path), before.get(key, {})) for key, path in others.items()}


def _texts(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield each text in `table` and the tables in it: its place, its key, the text, and the table that holds it."""
    for key, value in sorted(table.items()):
        inner = {str(number): each for number, each in enumerate(value)} if isinstance(value, list) else value
        if isinstance(inner, Mapping):
            yield from _texts(inner, f"{prefix}{key}.")
        elif isinstance(inner, str):
            yield f"{prefix}{key}", key, inner, table


def _module_file(value: str) -> Path | None:
    """Return the file of the user's module in `module:name` or `path/to/script.py:name`."""
    module, colon, _ = value.partition(":")
    if not colon or module.partition(".")[0] == "strop":
        return None
    if module.endswith(".py"):
        script = Path(module).expanduser()
        return script if script.exists() else None
    if "" not in sys.path:  # as where it is imported
        sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, SyntaxError, NameError, ValueError):  # the import reports what is wrong
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _facts(path: Path, written: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return path, sizes, times and digest. Files whose sizes and times are as `before` are not read again."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    stats = [each.stat() for each in files]
    seen = [[each.st_size, each.st_mtime_ns] for each in stats]
    digest = before["digest"] if before.get("seen") == seen else digest_of(path)
    return {"path": written, "seen": seen, "digest": digest}


@cache
def _source_digest() -> str:
    """Return a digest of strop's own files. One version number covers many commits."""
    return digest_of(Path(strop.__file__).parent)


def digests_of(path: Path) -> dict[str, str]:
    """Return the digest of each file in `path` that matters, by its name in `path`; of a file, its own.

    In a model directory a model card, the lineage of an export and hidden files do not matter.
    """
    if path.is_file():
        return {path.name: file_digest(path)}
    files = sorted(each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
    if any(path.glob("*.safetensors")):
        files = [each for each in files if _matters(each.relative_to(path))]
    return {str(each.relative_to(path)): digest for each, digest in file_digests(files).items()}


def digest_of(path: Path) -> str:
    """Return one digest of a file or a directory."""
    return _joined(digests_of(path))


def weights_digest(model: Path) -> str:
    """Return a digest of the weight files of a model directory."""
    return _joined({path.name: digest for path, digest in file_digests(sorted(model.glob("*.safetensors"))).items()})


def syntax_digest(module: Path, *, with_docstrings: bool) -> str:
    """Return a digest of a Python file that comments and layout, and without `with_docstrings` docstrings, do not change."""
    try:
        tree = ast.parse(module.read_bytes())
    except (SyntaxError, ValueError):
        return file_digest(module)
    if not with_docstrings:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [each for place, each in enumerate(node.body) if place or not _is_text(each)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _matters(path: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in _MODEL_SUFFIXES and path.name != "lineage.json" and not is_hidden


def _joined(digests: dict[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def num_common(one: Recipe, other: Recipe) -> int:
    """Return how many first stages two recipes have in common. Keys that change no result may differ."""
    num = 0
    for name, other_name in zip(one.stages, other.stages, strict=False):
        if name != other_name or stage_keys(one, name) != stage_keys(other, name):
            break
        num += 1
    return num


def num_done(run: RunDirectory, recipe: Recipe) -> int:
    """Return how many first stages of `recipe` are finished in `run`."""
    done = [run.stage(name).done.exists() for name in recipe.stages]
    return [*done, False].index(False)


def copy_stages(run: RunDirectory, source: RunDirectory, recipe: Recipe, *, num: int) -> None:
    """Copy those of the first `num` stages from `source` that `run` has not finished. `run` already has its manifest.

    Files are hard links where the file system allows it: a finished stage is not written to again.

    Raises:
        RunError: another process uses the run, or the disk is full.
    """
    with locked(run):
        for name in list(recipe.stages)[num_done(run, recipe) : num]:
            for file in ("metrics", "updates", "events"):
                copy_lines(getattr(run, file), getattr(source, file), name)
            copy = partial(shutil.copytree, source.stage(name).path, copy_function=_link_or_copy, dirs_exist_ok=True)
            write_directory(run.stage(name).path, copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
