"""A recipe names an engine of the user's own, which samples, is recorded and is refused as the built-in ones are."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from strop.config import validate
from strop.engine.config import EngineConfig
from strop.engine.opening import open_engines
from strop.engine.torch.engine import TorchEngine
from strop.errors import ConfigError, WeightsNotProven
from strop.recipe.recipe import Recipe, resolve

from .support import Tensors, load, make_model, make_request, named, publish

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = f"{EXAMPLES / 'plain_engine.py'}:Plain"
FAULTY = """
import asyncio
from strop import Engine
from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine

class Raising(Engine):
    async def open(self, model, *, detokenize):
        raise RuntimeError("no such device")

class Returning(Engine):
    async def open(self, model, *, detokenize):
        return "an engine"

class Silent:
    def __init__(self, engine):
        self.engine = engine
    def __getattr__(self, name):
        return getattr(self.engine, name)
    async def complete(self, request):
        return None

class Mute(Engine):
    async def open(self, model, *, detokenize):
        return Silent(await asyncio.to_thread(TorchEngine.from_directory, model, EngineConfig(slots=8, max_length=128)))

class Lacking(Engine):
    pass

class Other:
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(directory)
    return directory


def engine_of(kind, **keys):
    tree = {"name": "own", "tasks": {"kind": "arithmetic"}, "engine": {"kind": kind, **keys}}
    tree["stages"] = {"base": {"kind": "model", "path": "model"}, "check": {"kind": "eval", "init": "base"}}
    return validate(Recipe, resolve(tree), place="test").engine


def in_plain_engine(model, scenario):
    async def play():
        [engine] = await open_engines(model, engine_of(PLAIN, slots=4, max_length=200), detokenize=str)
        async with asyncio.timeout(60):
            await scenario(engine)
        await engine.close()

    asyncio.run(play())


def test_it_samples_what_the_embedded_engine_does(model):
    async def scenario(engine):
        embedded = TorchEngine.from_directory(model, EngineConfig(slots=4, max_length=200, device="cpu", threads=1))
        try:
            for seed, temperature in ((1, 1.0), (2, 0.6), (3, 0.0)):
                request = make_request(f"r{seed}", [1, 2, 3], max_tokens=24, seed=seed, temperature=temperature)
                own, theirs = await engine.complete(request), await embedded.complete(request)
                assert own.ids == theirs.ids
                assert own.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
                assert own.entropies == pytest.approx(theirs.entropies, abs=1e-4)
        finally:
            await embedded.close()

    in_plain_engine(model, scenario)


def test_it_takes_published_weights_and_samples_from_no_others(model):
    async def scenario(engine):
        before = await engine.complete(make_request("a", [1, 2, 3]))
        await publish(engine, make_model("llama", seed=1), version=5)
        after = await engine.complete(make_request("b", [1, 2, 3]))
        assert (before.policy_version, after.policy_version) == (0, 5)
        assert before.logprobs != after.logprobs
        with pytest.raises(WeightsNotProven):
            await load(engine, Tensors(named(make_model("llama")), checksum="0" * 32), version=6)
        with pytest.raises(WeightsNotProven):
            await engine.complete(make_request("c", [1, 2, 3]))

    in_plain_engine(model, scenario)


def test_an_aborted_request_is_cancelled(model):
    async def scenario(engine):
        running = [asyncio.create_task(engine.complete(make_request(name, [1], max_tokens=190))) for name in ("a", "b")]
        await asyncio.sleep(0)
        for name in ("a", "b"):
            await engine.abort(name)
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        with pytest.raises(asyncio.CancelledError):
            await running[1]
        assert await engine.progress() < 190

    in_plain_engine(model, scenario)


def test_the_recipe_records_its_keys_and_where_it_is_found(tmp_path):
    config = engine_of(PLAIN, slots=4)
    assert config.model_dump(mode="json")["kind"] == PLAIN
    tree = {"name": "own", "tasks": {"kind": "arithmetic"}, "engine": config.model_dump(mode="json")}
    tree["stages"] = {"base": {"kind": "model", "path": "model"}}
    recipe = validate(Recipe, resolve(tree), place="test")
    assert recipe.engine == config
    assert json.loads(recipe.model_dump_json())["engine"] == config.model_dump(mode="json")
    assert [config.only(place).replicas for place in range(config.num_engines)] == [1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Other", r"engine.kind: .*:Other' is not a subclass of strop.Engine. Derive the class from it."),
        ("Lacking", r"engine.kind: .*:Lacking' has no open. Define it."),
        ("Missing", r"engine.kind: .*has no attribute 'Missing'"),
    ],
)
def test_a_class_that_is_no_engine_is_a_mistake_in_the_recipe(tmp_path, kind, words):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(ConfigError, match=words):
        engine_of(f"{tmp_path / 'faulty.py'}:{kind}")


def test_an_unknown_key_of_an_own_engine_is_named():
    with pytest.raises(ConfigError, match=r"engine.slotz: unknown key. Did you mean 'slots'\?"):
        engine_of(PLAIN, slotz=4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Raising", r"open \(.*faulty.py, line 9\) raised RuntimeError: no such device when an engine was opened"),
        ("Returning", r"engine .*:Returning \(.*faulty.py, line 12\) returned 'an engine'. Return an InferenceEngine"),
    ],
)
def test_a_mistake_in_open_is_one_message_with_its_place(tmp_path, model, kind, words):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(ConfigError, match=words):
        asyncio.run(open_engines(model, engine_of(f"{tmp_path / 'faulty.py'}:{kind}"), detokenize=str))


def test_a_completion_of_another_type_ends_a_run_with_its_place(tmp_path, strop):
    (tmp_path / "faulty.py").write_text(FAULTY)
    kind = f"engine.kind={tmp_path / 'faulty.py'}:Mute"
    code, said = strop("train", EXAMPLES / "plain_engine.toml", "--runs", tmp_path, "--set", kind)
    assert code == 2
    assert re.search(r"error: engine-0 \(.*faulty.py, line 20\) returned None. Return a Completion\.", said), said
