import re
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from strop.config import Choice, Config, load_toml, validate
from strop.errors import ConfigError
from strop.recipe.load import load_recipe


class Grpo(Config):
    kind: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    loss: str = "clip"
    also_called: ClassVar[dict[str, str]] = {"epsilon": "clip_low"}


class Ppo(Config):
    kind: Literal["ppo"] = "ppo"
    gae_lambda: float = 0.95


class Rl(Config):
    kind: Literal["rl"]
    method: Annotated[Grpo | Ppo, Choice()]
    steps: int = Field(default=1, ge=1)
    operators: tuple[str, ...] = ()


class Sft(Config):
    kind: Literal["sft"]
    steps: int = 1


class Root(Config):
    name: str
    stages: dict[str, Annotated[Rl | Sft, Choice()]]


def stages(name="rl", **keys):
    return {"name": "x", "stages": {name: {"kind": "rl", "method": {"kind": "grpo"}} | keys}}


def complaint(tree):
    with pytest.raises(ConfigError) as told:
        validate(Root, tree, place="r.toml")
    return str(told.value)


@pytest.mark.parametrize("name", ["rl", "sft", "second"])
def test_a_key_is_named_with_its_path_in_the_recipe_even_where_a_stage_is_called_like_its_kind(name):
    assert complaint(stages(name, stepps=1)) == f"r.toml: stages.{name}.stepps: unknown key. Did you mean 'steps'?"
    assert complaint(stages(name, steps=0)).startswith(f"r.toml: stages.{name}.steps: Input should be greater")
    assert (
        complaint(stages(name, method={"kind": "grpo", "clip_lo": 1}))
        == f"r.toml: stages.{name}.method.clip_lo: unknown key. Did you mean 'clip_low'?"
    )


def test_a_key_that_resembles_nothing_points_to_the_list():
    said = complaint(stages(zzz=1))
    assert said == "r.toml: stages.rl.zzz: unknown key. Remove it, or see the recipe reference for the keys that exist."


def test_a_key_by_the_name_that_others_give_it_is_told_with_ours():
    said = complaint(stages(method={"kind": "grpo", "epsilon": 0.1}))
    assert said == "r.toml: stages.rl.method.epsilon: unknown key. Did you mean 'clip_low'?"


def test_a_key_of_another_kind_is_said_to_be_one():
    said = complaint(stages(method={"kind": "grpo", "gae_lambda": 1}))
    assert said == (
        'r.toml: stages.rl.method.gae_lambda: unknown key. It is a key of stages.rl.method.kind = "ppo"; here that is "grpo".'
    )
    said = complaint(stages(method={"kind": "grpo", "gae_lamda": 1}))
    assert "unknown key. Did you mean 'gae_lambda'? That is a key of stages.rl.method.kind = \"ppo\"; here" in said
    said = complaint(stages("sft", kind="sft", method=1))
    assert said == 'r.toml: stages.sft.method: unknown key. It is a key of stages.sft.kind = "rl"; here that is "sft".'


def test_a_word_where_a_table_belongs_is_told_what_to_write():
    said = complaint(stages(method="ppo"))
    assert said == (
        "r.toml: stages.rl.method: 'ppo' is not a table. Write [stages.rl.method] with kind = \"ppo\","
        " or --set stages.rl.method.kind=ppo."
    )
    assert complaint(stages(method="pop")).endswith("--set stages.rl.method.kind=grpo (one of grpo, ppo).")
    said = complaint({"name": "x", "stages": {"first": {"steps": 1}}})
    assert said == "r.toml: stages.first.kind: required, but not set; one of rl, sft."


def test_a_key_that_is_required_is_named():
    assert complaint({"stages": {}}) == "r.toml: name: required, but not set."


def test_an_unknown_kind_is_named_with_the_real_ones():
    said = complaint(stages(method={"kind": "grp"}))
    assert said == "r.toml: stages.rl.method.kind: 'grp' is not one of grpo, ppo. Did you mean 'grpo'?"


@pytest.mark.parametrize(("value", "shown"), [("3", "'3'"), (3.5, "3.5"), (None, "None"), (True, "True")])
def test_nothing_is_silently_converted_into_a_number(value, shown):
    said = complaint(stages(steps=value))
    assert said.startswith("r.toml: stages.rl.steps: Input should be a valid integer")
    assert f"(got {shown})" in said


def test_lists_become_tuples_and_a_config_cannot_be_changed():
    root = validate(Root, stages(operators=["+", "-"]), place="r.toml")
    assert root.stages["rl"].operators == ("+", "-")
    with pytest.raises(ValueError, match="frozen"):
        root.name = "y"


def test_the_command_line_beats_the_file_and_its_values_are_toml_or_words(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('name = "x"\n[stages.rl]\nsteps = 3\n')
    overrides = ["stages.rl.steps=10", "stages.rl.method=grpo", 'name="y"', "a.b.c=[1, 2]", "lr=1e-3", "on=true"]
    assert load_toml(path, overrides) == {
        "name": "y",
        "stages": {"rl": {"steps": 10, "method": "grpo"}},
        "a": {"b": {"c": [1, 2]}},
        "lr": 1e-3,
        "on": True,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("a..b=3", "--set a..b=3: expected key=value"),
        ("name.first=3", "--set name.first=3: name is 'x', which has no keys of its own."),
        ("stop=[</answer>]", "--set stop=[</answer>]: the value is not valid TOML"),
        ("rule={above=}", "--set rule={above=}: the value is not valid TOML"),
    ],
)
def test_an_override_that_makes_no_sense_is_explained(tmp_path, override, message):
    (tmp_path / "r.toml").write_text('name = "x"\n')
    with pytest.raises(ConfigError) as told:
        load_toml(tmp_path / "r.toml", [override])
    assert str(told.value).startswith(message)


def test_an_override_through_a_word_shows_the_table_to_write(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[stages.rl]\nmethod = "grpo"\n')
    with pytest.raises(ConfigError, match=r"no keys of its own\. Write a table, as in --set 'stages\.rl\.method=\{kind="):
        load_toml(path, ["stages.rl.method.clip_high=0.3"])


def test_a_recipe_of_a_windows_editor_is_read(tmp_path):
    (tmp_path / "r.toml").write_bytes(b'\xef\xbb\xbfname = "x"\r\ntext = """a\r\nb"""\r\n')
    assert load_toml(tmp_path / "r.toml") == {"name": "x", "text": "a\nb"}


def test_a_path_that_no_file_system_can_have_is_named_with_its_key(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'name = "x"\n[stages.base]\nkind = "model"\npath = "{"a" * 300}"\n')
    with pytest.raises(ConfigError, match=rf"{re.escape(str(recipe))}: path: 'aaa.*too long. Shorten it") as raised:
        load_recipe(recipe)
    assert len(str(raised.value)) < 300


def test_a_file_that_is_no_recipe_is_explained(tmp_path):
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"r\.toml, line 1: not UTF-8: byte 0xff\. Save the file in the encoding UTF-8"):
        load_toml(tmp_path / "r.toml")
    (tmp_path / "r.toml").write_bytes(b'a = 1\r\nb = "\xe9"\r\n')
    with pytest.raises(ConfigError, match=r"r\.toml, line 2: not UTF-8: byte 0xe9"):
        load_toml(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match="cannot be read as a recipe"):
        load_toml(tmp_path)


class OfSeveral(Config):
    several: tuple[Rl, ...] = Field(min_length=1)


def test_a_list_whose_item_is_wrong_is_not_called_too_short_as_well():
    item = {"kind": "rl", "method": {"kind": "grpo"}}
    with pytest.raises(ConfigError) as told:
        validate(OfSeveral, {"several": [item | {"step": 3}]}, place="x.toml")
    assert str(told.value) == "x.toml: several.0.step: unknown key. Did you mean 'steps'?"
    with pytest.raises(ConfigError, match=r"several: .* at least 1 item"):
        validate(OfSeveral, {"several": []}, place="x.toml")
