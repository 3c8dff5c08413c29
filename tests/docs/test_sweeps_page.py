"""The page on sweeps has every key of a sweep file with its default and every shipped sweep; its example is a sweep."""

import json
import re
from pathlib import Path

from pydantic_core import to_jsonable_python

from strop.pipeline.sweep_file import SweepFile, load_sweep

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")


def default_of(name, field):
    if name == "name":
        return "computed"  # from the file's name
    if field.is_required():
        return "required"
    return "not set" if field.default is None else f"`{json.dumps(to_jsonable_python(field.default))}`"


def test_every_key_is_listed_with_its_default():
    [section] = re.findall(r"^## Every key.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.MULTILINE))
    assert listed == {name: default_of(name, field) for name, field in SweepFile.model_fields.items()}


def test_every_shipped_sweep_is_listed():
    listed = re.findall(r"^\| `((?:cs336|ppo)-[\w-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "recipes" / "sweeps").glob("*.toml"))


def test_the_example_is_a_sweep_with_the_arms_that_the_page_names(tmp_path):
    [example] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example.replace("../demo.toml", str(ROOT / "recipes" / "demo.toml")))
    arms = [arm.name for arm in load_sweep(path).arms]
    assert len(arms) == 4
    assert all(f"`{arm}`" in PAGE for arm in arms)
