"""What the tests of the presets share: where they lie, their leaves by line of text, and a way to resolve them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "recipes" / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))

_TABLE = re.compile(r"^(\[\[?)([\w.-]+)\]\]?\s*$")
_LEAF = re.compile(r"^([\w.-]+)\s*=\s*(.*)$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def preset_path(name: str) -> Path:
    return PRESETS / f"{name}.toml"


@cache
def resolved(name: str) -> Recipe:
    return load_recipe(preset_path(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A key that stands on a line of its own, with what the line or the one above says about where it comes from."""

    path: str  # as in stages.rl.schedule[0].at_step
    source: str


def leaves_of(text: str) -> Iterator[Leaf]:
    """Every key of a preset. A comment line is about the key right below it."""
    table, above, numbers = "", "", dict[str, int]()
    for line in text.splitlines():
        bare = _STRING.sub(lambda found: "_" * len(found[0]), line)
        hash_at = bare.find("#") if "#" in bare else len(line)
        code, comment = line[:hash_at].strip(), line[hash_at + 1 :].strip()
        if header := _TABLE.match(code):
            table = header[2]
            if header[1] == "[[":
                numbers[table] = numbers.get(table, -1) + 1
                table = f"{table}[{numbers[table]}]"
        elif leaf := _LEAF.match(code):
            yield Leaf(path=f"{table}.{leaf[1]}".lstrip("."), source=comment or above)
        above = comment if not code else ""


def paths_of(tree: Mapping[str, Any], stops: frozenset[str], prefix: str = "") -> Iterator[str]:
    """The path of every value of parsed TOML, down to those in `stops`, which are tables written on one line."""
    for key, value in tree.items():
        path = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, dict) and path not in stops:
            yield from paths_of(value, stops, path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, each in enumerate(value):
                yield from paths_of(each, stops, f"{path}[{number}]")
        else:
            yield path


def parsed(name: str) -> dict[str, Any]:
    return tomllib.loads(preset_path(name).read_text(encoding="utf-8"))


def value_at(tree: Any, path: str) -> Any:
    """What stands at `path` of a resolved recipe; a key that is not there is None."""
    for step in re.findall(r"\w[\w-]*", path):
        if isinstance(tree, list):
            tree = tree[int(step)] if int(step) < len(tree) else None
        else:
            tree = tree.get(step) if isinstance(tree, dict) else None
    return tree
