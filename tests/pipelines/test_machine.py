"""What a recipe names and this machine lacks is told before anything runs."""

import json
import re
from pathlib import Path

import pytest

from scripted_runs import RECIPE, recipe_of, run_recipe
from strop.errors import ConfigError, UserError
from strop.pipeline.plan import check_stages, plan
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


def check_machine(recipe, *, done=(), **options):
    check_stages(recipe, [name for name in recipe.stages if name not in done], **options)


def recipe(python, **engine):
    """One whose engine is a vLLM server of the interpreter `python`."""
    tree = RECIPE | {"engine": {"kind": "vllm", "max_length": 256, "python": str(python)} | engine}
    return Recipe.model_validate_json(json.dumps(resolve(tree)))


@pytest.fixture
def interpreter(tmp_path):
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text("")
    return path


def test_an_interpreter_that_cannot_be_run_is_named_with_its_key_and_the_remedy(tmp_path, interpreter):
    faults = {
        tmp_path / "none" / "python": "does not exist",
        interpreter: "is not executable",
        interpreter.parent: "is a directory",
        "no-such-python": "is not on the PATH",
    }
    for python, fault in faults.items():
        with pytest.raises(UserError) as told:
            check_machine(recipe(python))
        assert str(told.value).startswith(
            f"engine.python: {python} {fault}. Name the interpreter of an environment that has vllm"
        )
        assert "`make test-vllm`, as an example, sets up .venv-vllm" in str(told.value)


def test_only_stages_that_will_sample_need_an_engine(tmp_path):
    bad = recipe(tmp_path / "none")
    check_machine(bad, done=["before", "rl", "after"])
    with pytest.raises(UserError, match=r"engine\.python"):
        check_machine(bad, done=["before", "rl"])
    check_machine(bad.model_copy(update={"stages": {name: bad.stages[name] for name in ("base", "sft")}}))


def scripted(engine=(), trainer=()):
    """The scripted recipe, with other keys for its engine and for the trainers of its stages."""
    tree = {key: value for key, value in RECIPE.items() if key != "engine"}
    return Recipe.model_validate_json(
        json.dumps(resolve({**tree, "engine": RECIPE["engine"] | dict(engine), "trainer": dict(trainer)}))
    )


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def no_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": {"device": "cuda"}}, 'engine.device is "cuda", but torch sees no CUDA device here. Use "auto" or "cpu".'),
        ({"engine": {"devices": [0]}}, "engine.devices names [0], but torch sees no CUDA device here"),
        ({"trainer": {"device": "cuda"}}, "stages.sft.trainer.device is 'cuda', but torch sees no CUDA device here"),
        ({"trainer": {"device": "gpu"}}, "stages.sft.trainer.device is 'gpu', which is no device. Write"),
    ],
)
def test_a_cuda_device_that_is_not_there_is_named_with_its_key_and_the_remedy(no_devices, keys, message):
    with pytest.raises(UserError) as told:
        check_machine(scripted(**keys))
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": {"devices": [1, 2]}}, "engine.devices names [2], but torch sees 2 CUDA devices here."),
        ({"trainer": {"device": "cuda:2"}}, "stages.sft.trainer.device is 'cuda:2', but torch sees 2 CUDA devices here."),
        (
            {"trainer": {"device": "cuda", "workers": 3}},
            "stages.sft.trainer.device is 'cuda' and stages.sft.trainer.work",
        ),
    ],
)
def test_a_device_beyond_the_last_is_refused(two_devices, keys, message):
    with pytest.raises(UserError) as told:
        check_machine(scripted(**keys))
    assert str(told.value).startswith(message)


def test_heads_that_ranks_cannot_divide_are_refused_before_anything_is_run():
    check_machine(scripted(trainer={"workers": 4, "sequence_parallel": 2}))
    message = r"stages\.sft\.trainer\.sequence_parallel is 3, which does not divide the 2 heads of keys and values"
    with pytest.raises(ConfigError, match=message):
        check_machine(scripted(trainer={"workers": 3, "sequence_parallel": 3}))


def test_the_device_of_a_reward_model_is_looked_for_before_anything_is_rolled_out(no_devices, models):
    _, reward_model = models
    on_cuda = judged_by(reward_model, device="cuda")
    with pytest.raises(UserError) as told:
        check_machine(on_cuda)
    key = "stages.before.reward.parts.helpful.scorer.device"
    assert str(told.value).startswith(f"{key} is 'cuda', but torch sees no CUDA device here")
    check_machine(on_cuda, done=["before", "rl", "after"])


def test_devices_that_are_there_pass(two_devices):
    check_machine(scripted(engine={"device": "cuda"}, trainer={"device": "cuda:1"}))
    check_machine(scripted(engine={"devices": [1, 0]}, trainer={"device": "cuda", "workers": 2}))


@pytest.mark.parametrize(
    ("engine", "trainer", "devices"),
    [({}, {"workers": 4}, ("cpu", "cuda")), ({"device": "cpu"}, {}, ("cuda", "cpu"))],
)
def test_a_trainer_that_would_choose_another_device_than_the_engine_is_refused(two_devices, engine, trainer, devices):
    of_trainer, of_engine = devices
    with pytest.raises(ConfigError) as told:
        check_machine(scripted(engine=engine, trainer=trainer))
    message = str(told.value)
    assert message.startswith(f'stages.rl.trainer.device is "auto", which is {of_trainer} here')
    assert f'engine.device = "{engine.get("device", "auto")}" is {of_engine}: torch sees 2 CUDA devices here. Set' in message


def test_a_trainer_whose_device_is_named_or_left_to_a_server_may_have_another(two_devices, monkeypatch):
    check_machine(scripted(engine={"device": "cpu"}, trainer={"device": "cuda"}))
    check_machine(scripted(trainer={"optimizer": {"moments": "disk"}}))
    check_machine(scripted(engine={"kind": "vllm", "python": "true"}, trainer={"workers": 4}))
    check_machine(scripted())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_machine(scripted(trainer={"workers": 4}))


def test_of_what_a_start_leaves_as_it_is_nothing_is_asked(run, monkeypatch):
    """Another machine may have trained it."""
    asked = []
    monkeypatch.setattr("strop.pipeline.run.check_stages", lambda recipe, names, *, run: asked.append(set(names)))
    run_recipe(run.path, start="after")
    run_recipe(run.path, start="rl")
    assert asked == [{"after"}, {"rl", "after"}]


def test_engines_with_devices_of_their_own_are_not_judged_by_what_the_trainer_may_see(no_devices, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_machine(scripted(engine={"devices": [3]}))


def judged_by(path, *, kind="embedded", device=None, **stages):
    """The scripted recipe, whose stages are judged by a reward model in `path`."""
    served = {"url": "http://127.0.0.1:9", "model": "helpful"} if kind == "vllm" else {}
    on = {} if device is None else {"device": device}
    part = {"kind": "scorer", "scorer": {"kind": kind, "path": str(path), **served, **on}}
    tree = RECIPE | {"reward": {"kind": "sum", "parts": {"accuracy": {"kind": "math"}, "helpful": part}}}
    return Recipe.model_validate_json(json.dumps(resolve(tree | {"stages": RECIPE["stages"] | stages})))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A language model, and a reward model on its decoder."""
    directory = tmp_path_factory.mktemp("models")
    pairs = directory / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{n}?", "chosen": "a b", "rejected": "b"}) + "\n" for n in range(20)))
    stages = {
        "base": RECIPE["stages"]["base"],
        "helpful": {"kind": "reward_model", "init": "base", "path": str(pairs), "batch_size": 9},
    }
    made = run_recipe(directory / "run", recipe_of(stages))
    return made.run.stage("base").model, made.run.stage("helpful").model


def test_a_reward_model_that_is_not_there_is_named_with_its_key_before_anything_runs(tmp_path, models):
    language_model, _ = models
    faults = {
        tmp_path / "none": "there is no model here: config.json is missing. Name a directory that transformers can load.",
        language_model: "a language model, not a reward model: it has no head of one number.",
    }
    for path, fault in faults.items():
        with pytest.raises(UserError) as told:
            check_machine(judged_by(path))
        assert str(told.value).startswith(f"stages.before.reward.parts.helpful.scorer.path: {path}: {fault}")
    with pytest.raises(UserError, match=r"scorer\.path: .*none: no tokenizer that transformers can load"):
        check_machine(judged_by(tmp_path / "none", kind="vllm"))


def test_a_plan_tells_a_reward_model_that_is_not_there_yet_and_refuses_one_that_is_none(tmp_path, models):
    language_model, _ = models
    told = {stage.name: "\n".join(stage.schedule) for stage in plan(judged_by(tmp_path / "none"))}
    missing = f"reward.parts.helpful.scorer.path: {tmp_path / 'none'}: there is no model here"
    assert {name for name, lines in told.items() if missing in lines} == {"before", "rl", "after"}
    with pytest.raises(UserError, match="a language model, not a reward model"):
        plan(judged_by(language_model))


def test_a_reward_model_that_is_there_passes_and_stages_that_judge_nothing_need_none(tmp_path, models):
    language_model, reward_model = models
    check_machine(judged_by(reward_model))
    check_machine(judged_by(language_model, kind="vllm"))  # of which the tokenizer alone is read here
    missing = judged_by(tmp_path / "none")
    check_machine(missing, done=["before", "rl", "after"])
    validated = judged_by(
        tmp_path / "none", sft=RECIPE["stages"]["sft"] | {"validation": {"every_steps": 1, "num_tasks": 1, "k": 1}}
    )
    with pytest.raises(UserError, match=r"stages\.sft\.reward\.parts\.helpful\.scorer\.path"):
        check_machine(validated, done=["before", "rl", "after"])


def test_a_run_ends_before_its_directory_is_made(strop, tmp_path):
    engine = ["--set", "engine.kind=vllm", "--set", f"engine.python={tmp_path / 'none'}"]
    code, said = strop("train", DEMO, *engine, "--runs", tmp_path / "runs")
    assert code == 2
    assert f"engine.python: {tmp_path / 'none'} does not exist." in " ".join(said.split())
    assert not (tmp_path / "runs").exists()


def test_a_plan_says_which_interpreter_is_missing(tmp_path):
    python = tmp_path / "none"
    lines = [line for stage in plan(recipe(python)) for line in stage.schedule]
    assert sum(line.startswith(f"engine.python: {python} does not exist.") for line in lines) == 3


LATE = {"kind": "jsonl", "path": "late.jsonl"}
PLAYED = {"demonstrator": {"kind": "arithmetic"}, "num_demonstrations": 2}


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ({"kind": "conversations", "path": "late.jsonl"}, "path"),
        ({"kind": "reward_model", "init": "rl", "path": "late.jsonl", "judged_on": "response"}, "path"),
        ({"kind": "sft", "init": "rl", "tasks": LATE, "steps": 1, "batch_size": 1, **PLAYED}, "tasks"),
        ({"kind": "filter", "init": "rl", "tasks": {"kind": "lookup", "path": "late.jsonl"}, "num_tasks": 1}, "tasks"),
        (RECIPE["stages"]["rl"] | {"schedule": [{"at_step": 2, "tasks": LATE}]}, "schedule.tasks"),
        ({"kind": "model", "tiny": {}, "demonstrator": {"kind": "arithmetic"}, "tasks": LATE}, "tasks"),
    ],
)
def test_a_file_of_a_late_stage_is_missed_before_the_first_begins(tmp_path, monkeypatch, stage, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("{}\n")
    played = {"kind": "demonstrations", "init": "base", **PLAYED}
    late = recipe_of(RECIPE["stages"] | {"played": played, "late": stage})
    with pytest.raises(UserError, match=rf"stages\.late\.{key}: .*late\.jsonl: no such file\. .* Nothing was begun\."):
        check_machine(late)
    check_machine(late, is_plan=True)
    check_machine(late, done=["late"])
    late_plan = next(each for each in plan(late) if each.name == "late")
    [line] = [line for line in late_plan.schedule if "no such file" in line]
    assert line.startswith(f"stages.late.{key}: late.jsonl: no such file.")


@pytest.mark.parametrize("kind", ["bm25", "kept"])
def test_a_corpus_that_is_not_there_is_named_once_before_anything_runs(tmp_path, kind):
    tree = RECIPE | {"tools": {"search": {"kind": "search", "backend": {"kind": kind, "path": str(tmp_path / "corpus.jsonl")}}}}
    searching = Recipe.model_validate_json(json.dumps(resolve(tree)))
    said = f"tools.search.backend.path: {tmp_path}/corpus.jsonl: no such file or directory. Mend the path."
    with pytest.raises(UserError, match=f"{re.escape(said)} Nothing was begun"):
        check_machine(searching)
    assert {each.name for each in plan(searching) if said in each.schedule} == {"base"}
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    check_machine(searching)


def test_a_file_that_an_earlier_stage_may_make_is_not_missed(tmp_path):
    run = RunDirectory(tmp_path / "run")

    def reading(name):
        tasks = {"kind": "jsonl", "path": str(run.stage(name).path / "data" / "kept.jsonl")}
        late = {"kind": "demonstrations", "init": "base", "tasks": tasks, **PLAYED}
        return recipe_of(RECIPE["stages"] | {"late": late})

    check_machine(reading("sft"), run=run)
    for name, done in (("sft", ["base", "sft"]), ("late", [])):
        with pytest.raises(UserError, match=rf"stages\.late\.tasks: .*{name}/data/kept\.jsonl: no such file"):
            check_machine(reading(name), done=done, run=run)
