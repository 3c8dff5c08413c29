"""Opening the engines of a recipe, of any kind: all of them, or none."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config

from strop.config import Config, validate
from strop.engine.config import EngineChoice, EngineConfig, SglangConfig, VllmConfig
from strop.engine.opening import check_interpreter, open_engines
from strop.engine.servers.sglang import SglangServer
from strop.engine.torch.engine import TorchEngine
from strop.errors import ConfigError, EngineLost, ModelError, UserError
from strop.recipe.recipe import Recipe, resolve
from strop.recipe.stage import Machine

from .servers.fake_sglang import FakeSglang
from .support import make_model, make_request


class OneEngine(Config):
    engine: EngineChoice = EngineConfig()


def engine_of(**tree):
    return validate(OneEngine, {"engine": tree}, place="r.toml").engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def test_a_recipe_that_names_no_kind_means_the_embedded_engine():
    assert engine_of(slots=3) == EngineConfig(slots=3)
    assert engine_of(kind="vllm", python="/env/python") == VllmConfig(python=Path("/env/python"))
    assert engine_of(devices=[1], replicas=1).devices == (1,)
    assert engine_of(kind="vllm", addresses=["http://a"], arguments=["--x"]).addresses == ("http://a",)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"kind": "vlm"}, r"engine\.kind: 'vlm' is not one of torch, vllm, sglang\. Did you mean 'vllm'\?"),
        ({"kind": ""}, r"engine\.kind: '' is not one of torch, vllm, sglang\.$"),
        ({"slotz": 3}, r"^r\.toml: engine\.slotz: unknown key\. Did you mean 'slots'\?"),
        ({"kind": "vllm"}, "engine: engine needs either python"),
        ({"kv_mib": 64}, r'engine\.kv_mib: unknown key\. It is a key of engine\.kind = "vllm"; here that is "torch"\.'),
        (
            {"python": "p"},
            r'engine\.python: unknown key\. It is a key of engine\.kind = "vllm" or "sglang"; here that is "torch"\.',
        ),
        ("vllm", r"engine: 'vllm' is not a table\. Write \[engine\] with kind = \"vllm\", or --set engine\.kind=vllm\.$"),
        ({"kind": 3}, r"engine\.kind: 3 is not one of torch, vllm, sglang\.$"),
        (
            {"kind": "vllm", "python": "p", "addresses": ["http://x"]},
            r"^r\.toml: engine\.python and engine\.addresses are both set\.",
        ),
        (
            {"kind": "vllm", "addresses": ["a:8000"]},
            r"engine\.addresses\.0: String should match pattern .*got 'a:8000'",
        ),
        ({"kind": "vllm", "addresses": ["http://"]}, r"engine\.addresses\.0: String should match pattern .*got 'http://'"),
        (
            {"kind": "vllm", "addresses": ["http://a:1", "http://a:1"]},
            r"engine\.addresses names a server twice\. .* each server once",
        ),
        ({"kind": "vllm", "addresses": ["http://x"], "replicas": 2}, "replicas is 2, but there are 1 addresses"),
        ({"kind": "vllm", "python": "p", "tensor_parallel": 2, "devices": [0]}, "names 1 devices, but 1 replicas of 2 need 2"),
        (
            {"replicas": 2, "devices": [0, 1, 2]},
            r"^r\.toml: engine\.devices names 3 devices, which cannot be divided evenly among 2 engines\. ",
        ),
    ],
)
def test_mistakes_are_named(tree, match):
    with pytest.raises(ConfigError, match=match):
        validate(OneEngine, {"engine": tree}, place="r.toml")


def test_the_keys_of_engines_are_read_without_torch():
    """Both take seconds to import, and a mistake in a recipe is reported before that."""
    code = (
        "import sys, strop.engine.config, strop.engine.protocol; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SERVER = {"kind": "vllm", "addresses": ["http://127.0.0.1:8000"]}
TORCH = {"kind": "torch"}


@pytest.mark.parametrize(("engine", "own", "is_refused"), [(TORCH, {}, True), (SERVER, TORCH, True), (TORCH, SERVER, False)])
def test_a_dry_run_names_an_architecture_that_the_engine_does_not_implement(engine, own, is_refused, tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    stages = {"base": {"kind": "model", "path": str(tmp_path)}, "eval": {"kind": "eval", "init": "base", "engine": own}}
    tree = {"name": "r", "tasks": {"kind": "arithmetic"}, "engine": engine, "stages": stages}
    recipe = validate(Recipe, resolve(tree), place="test")
    problems = [str(each) for each in recipe.stages["base"].check("base", recipe, Machine())]
    assert len(problems) == is_refused
    for problem in problems:
        assert f"stages.base.path: {tmp_path}: the torch engine does not implement the architecture 'gpt2'" in problem
        assert "it implements llama, qwen2, qwen3. Use one of these, or another kind of engine." in problem


def test_each_replica_is_told_its_own_share():
    embedded = EngineConfig(replicas=2, devices=(4, 6), threads=3)
    assert embedded.only(1) == EngineConfig(devices=(6,), threads=3, own_process=True)
    assert embedded.only(1).only(0) == embedded.only(1)
    given = SglangConfig(addresses=("http://a", "http://b"))
    assert given.only(1) == SglangConfig(addresses=("http://b",))


def test_one_embedded_engine_lives_in_this_process_and_samples_from_the_directory(model):
    async def scenario():
        config = EngineConfig(slots=2, max_length=32, device="cpu")
        [engine] = await open_engines(model, config, detokenize=None)
        assert isinstance(engine, TorchEngine)
        assert (await engine.complete(make_request("a", [1]))).policy_version == 0
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("key", [{"replicas": 2}, {"own_process": True}, {"devices": [0]}])
def test_engines_in_processes_need_ray_or_a_server(key, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    stages = {"base": {"kind": "model", "path": str(tmp_path)}, "eval": {"kind": "eval", "init": "base"}}
    tree = {"name": "r", "tasks": {"kind": "arithmetic"}, "engine": key, "stages": stages}
    recipe = validate(Recipe, resolve(tree), place="test")
    [problem] = [each for each in recipe.stages["eval"].check("eval", recipe, Machine()) if "Ray" in str(each)]
    assert str(problem).startswith(f"engine.{next(iter(key))} needs Ray, which is not installed. Install it with: pip install ")
    assert str(problem).endswith('A server engine, such as engine.kind = "vllm", needs no Ray.')
    with pytest.raises(UserError, match="needs Ray"):
        asyncio.run(open_engines(tmp_path, recipe.engine, detokenize=None, logs=tmp_path))


@pytest.mark.slow
def test_several_embedded_engines_live_in_processes_of_their_own(model, tmp_path):
    async def scenario():
        config = EngineConfig(replicas=2, slots=2, max_length=32, device="cpu")
        engines = await open_engines(model, config, detokenize=None, logs=tmp_path)
        completions = [await engine.complete(make_request("a", [1])) for engine in engines]
        assert completions[0].ids == completions[1].ids
        assert len({engine._actor.pid for engine in engines}) == 2
        for engine in engines:
            await engine.close()

    asyncio.run(scenario())


def test_when_one_cannot_be_opened_none_is(model, monkeypatch):
    closed = []
    close = SglangServer.close

    async def note_and_close(server):
        closed.append(server.name)
        await close(server)

    monkeypatch.setattr(SglangServer, "close", note_and_close)

    async def scenario():
        fake = FakeSglang()
        async with fake.serve() as address:
            config = SglangConfig(addresses=(address, "http://127.0.0.1:9"), slots=3, max_length=100)
            with pytest.raises(
                UserError, match=r"^engine\.addresses: nothing listens at http://127\.0\.0\.1:9 .* Start a server"
            ):
                await open_engines(model, config, detokenize=None)
            assert sorted(closed) == sorted(f"SGLang at {each}" for each in config.addresses)

    asyncio.run(scenario())


def test_a_directory_that_holds_no_model_is_the_users_mistake(tmp_path):
    config = VllmConfig(python=Path("/no/such/python"))
    with pytest.raises(ModelError, match=str(tmp_path)):
        asyncio.run(open_engines(tmp_path, config, detokenize=None))


def test_an_interpreter_that_does_not_exist_is_named(model, tmp_path):
    config = VllmConfig(python=Path("/no/such/python"), start_timeout_s=10.0)
    with pytest.raises(UserError, match=r"^engine\.python: /no/such/python does not exist\. Name the interpreter of"):
        asyncio.run(open_engines(model, config, detokenize=None, logs=tmp_path))


@pytest.mark.parametrize("kind", [VllmConfig, SglangConfig])
def test_an_environment_that_lacks_the_server_is_named_with_the_remedy(model, tmp_path, kind):
    config = kind(python=Path(sys.executable), start_timeout_s=60.0)  # ours has neither of them
    with pytest.raises(UserError) as told:
        asyncio.run(open_engines(model, config, detokenize=None, logs=tmp_path))
    assert str(told.value).startswith(f"engine.python: {sys.executable} has no module '{config.kind}'. Name the interpreter of")
    assert "`make test-vllm`" in str(told.value)


def test_a_file_that_is_no_program_is_left_to_the_start_of_the_server(tmp_path):
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF, but no program")
    python.chmod(0o755)
    check_interpreter(VllmConfig(python=python))


def test_a_server_that_ends_for_another_reason_is_lost_with_the_end_of_its_log(model, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no room >&2; exit 3\n")
    python.chmod(0o755)
    with pytest.raises(EngineLost, match=r"exit code 3 before it was ready[\s\S]*no room"):
        asyncio.run(open_engines(model, VllmConfig(python=python), detokenize=None, logs=tmp_path))
