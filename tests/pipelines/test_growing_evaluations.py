"""An `eval` stage of a run of which more is asked than it played: it plays the rest, and nothing else is made anew."""

import os
import shutil

import pytest

from scripted_runs import RECIPE, RecordingEngine, answer, run_recipe, untimed
from strop.config import validate
from strop.errors import EngineLost, RunError, UserError
from strop.evaluation.leaderboard import gather
from strop.evaluation.results import read_eval
from strop.pipelines import growth
from strop.pipelines.recipe import Recipe, resolve
from strop.runs import RunDirectory, read_json, read_lines


def make(*, before=(), after=(), **root):
    """The scripted recipe with an export that stands on its last evaluation."""
    stages = RECIPE["stages"]
    stages = stages | {
        "before": stages["before"] | dict(before),
        "after": stages["after"] | dict(after),
        "release": {"kind": "export", "init": "rl", "results": ["after"]},
    }
    return validate(Recipe, resolve(RECIPE | root | {"stages": stages}), place="test")


MORE = {"num_tasks": 4, "k": 3}  # 12 rollouts, of which 3 x 2 are played


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("done") / "run", make()).run


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """A run that was asked for the larger evaluations from the first."""
    return run_recipe(tmp_path_factory.mktemp("at-once") / "run", make(before=MORE, after=MORE)).run


@pytest.fixture
def run(done, tmp_path):
    return RunDirectory(shutil.copytree(done.path, tmp_path / "run"))


def never_right(conversation, draw):
    return answer(draw.choice([0, 1]))


def num_rollouts(run, stage):
    return len({str(line["rollout"]["trajectory"]["key"]) for line in read_lines(run.stage(stage).rollouts(0))})


def test_the_same_command_with_more_asked_plays_the_rest_and_makes_no_other_stage_again(run, at_once):
    weights = (run.stage("rl").model / "model.safetensors").stat().st_mtime_ns
    played = run.stage("before").rollouts(0).read_text()
    ran = run_recipe(run.path, make(before=MORE))
    assert len(ran.engines) == 1  # of one stage alone
    assert [name for name, summary in ran.progress.stages if "done before" not in summary] == ["before"]
    assert ran.progress.warnings == []
    assert (run.stage("rl").model / "model.safetensors").stat().st_mtime_ns == weights
    assert run.stage("before").rollouts(0).read_text().startswith(played)
    grown, whole = (read_eval(each.stage("before").path) for each in (run, at_once))
    assert grown.problems == whole.problems
    assert untimed(grown.result) == untimed(whole.result)
    assert grown.result["num_taken_over"] == 6
    assert num_rollouts(run, "before") == 12
    assert not (run.path / "stale").exists()
    digests = [read_json(each.stage("before").lineage)["digest"] for each in (run, at_once)]
    assert digests[0] == digests[1]
    assert read_json(run.manifest)["recipe"]["stages"]["before"]["num_tasks"] == 4
    assert run_recipe(run.path, make(before=MORE)).engines == []


def test_a_kill_while_it_grows_costs_what_was_in_flight(run, at_once):
    with pytest.raises(EngineLost):
        run_recipe(run.path, make(before=MORE), make_engine=Lost)
    assert not run.stage("before").evaluation.exists()  # it would be of fewer problems than the recipe asks for
    run_recipe(run.path, make(before=MORE))
    assert read_eval(run.stage("before").path).problems == read_eval(at_once.stage("before").path).problems


class Lost(RecordingEngine):
    """Gone after its third answer."""

    num = 0

    async def complete(self, request):
        completion = await super().complete(request)
        self.num += 1
        if self.num > 2:
            raise EngineLost("scripted: the engine is gone")
        return completion


def test_a_larger_number_by_mistake_can_be_taken_back_until_it_is_played(run, at_once):
    before = read_eval(run.stage("after").path)
    with pytest.raises(EngineLost):
        run_recipe(run.path, make(after=MORE), make_engine=Lost, until="after")
    assert not run.stage("after").evaluation.exists()
    ran = run_recipe(run.path, make())
    assert ran.engines == []
    assert read_eval(run.stage("after").path) == before
    assert not list(run.path.glob("stages/*/stale.json"))  # `release` stands on what it stood on
    assert read_json(run.manifest)["recipe"]["stages"]["after"]["k"] == 2
    assert not growth.kept_before(run.stage("after")).exists()
    with pytest.raises(RunError, match="release: after is stale"):  # it may grow once more, as before
        run_recipe(run.path, make(after=MORE))
    run_recipe(run.path, make(after=MORE), until="after")
    assert read_eval(run.stage("after").path).problems == read_eval(at_once.stage("after").path).problems
    assert not growth.kept_before(run.stage("after")).exists()
    with pytest.raises(RunError, match="a run of another recipe"):  # it has grown
        run_recipe(run.path, make())


def test_with_any_other_change_nothing_is_taken_back(run):
    with pytest.raises(EngineLost):
        run_recipe(run.path, make(before=MORE), make_engine=Lost)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for other in (make(seed=7), make(before={"k": 1}), make(before={"tools": "none"})):
        with pytest.raises(RunError, match="a run of another recipe"):
            run_recipe(run.path, other)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_kill_while_it_is_taken_back_costs_nothing(run, monkeypatch):
    evaluation = read_eval(run.stage("before").path)
    with pytest.raises(EngineLost):
        run_recipe(run.path, make(before=MORE), make_engine=Lost)

    def killed(directory):
        raise KeyboardInterrupt

    monkeypatch.setattr(growth, "_put_back", killed)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(run.path, make())
    monkeypatch.undo()
    assert run_recipe(run.path, make()).engines == []
    assert read_eval(run.stage("before").path) == evaluation


def test_what_stands_on_it_is_made_anew_on_request_alone_and_nothing_is_touched_before(run, at_once):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"stale:\n  release: after is stale\nMake them anew with --from release .* after keeps"):
        run_recipe(run.path, make(after=MORE))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    run_recipe(run.path, make(after=MORE), start="release")
    assert read_eval(run.stage("after").path).result["num_taken_over"] == 6
    assert {path.name for path in (run.path / "stale").iterdir()} == {"release-1"}
    assert "| 4 | 3 |" in (run.stage("release").model / "README.md").read_text()
    digests = [read_json(each.stage("release").lineage)["parents"] for each in (run, at_once)]
    assert digests[0] == digests[1]


def test_from_plays_it_all_again(run):
    run_recipe(run.path, make(before=MORE), start="before", until="before")
    assert read_eval(run.stage("before").path).result["num_taken_over"] == 0
    assert (run.path / "stale" / "before-1").exists()


def test_behind_until_it_stays_as_it_is_and_is_marked_until_a_try_comes_to_it(run):
    ran = run_recipe(run.path, make(after=MORE), until="rl")
    assert ran.engines == []
    assert any("after is stale: stages.after.k: 2 then, 3 now" in text for text in ran.progress.warnings)
    assert any("after/eval/result.json: stale" in told for told in gather([run.path]).left_out)
    run_recipe(run.path, make(after=MORE), until="after")
    assert read_eval(run.stage("after").path).result["num_taken_over"] == 6
    assert not run.stage("after").stale.exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"before": {"num_tasks": 2}},
        {"before": {"num_tasks": 4, "k": 1}},
        {"before": MORE | {"tools": "none"}},
        {"before": MORE, "after": {"k": 1}},
        {"before": MORE, "seed": 7},
    ],
    ids=["fewer", "fewer of one", "another condition", "fewer of another stage", "another root"],
)
def test_whatever_else_changes_is_refused_as_before(run, asked):
    with pytest.raises(RunError, match="a run of another recipe"):
        run_recipe(run.path, make(**asked))
    assert run.stage("before").evaluation.exists()


def test_an_evaluation_of_a_policy_that_was_made_anew_does_not_grow(run):
    """What was played is another policy's."""
    run_recipe(run.path, make(), start="rl", until="rl", say=never_right)
    with pytest.raises(RunError, match=r"stale:\n  after: .*rl was made anew"):
        run_recipe(run.path, make(after=MORE))
    assert run.stage("after").evaluation.exists()


def test_what_it_will_open_is_looked_for_before_anything_is_written(run, tmp_path):
    engine = {"kind": "vllm", "python": str(tmp_path / "none"), "max_length": 256}
    with pytest.raises(UserError, match=r"engine\.python"):
        run_recipe(run.path, make(before=MORE, engine=engine))
    assert run.stage("before").done.exists()


def test_files_that_arms_of_a_sweep_share_are_not_appended_to(run, tmp_path):
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other", copy_function=os.link))
    shared = {path: path.read_bytes() for path in run.stage("before").path.rglob("*") if path.is_file()}
    for path in (other.manifest, other.metrics, other.events):  # a sweep shares the directories of stages alone
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    run_recipe(other.path, make(before=MORE))
    assert num_rollouts(other, "before") == 12
    assert {path: path.read_bytes() for path in run.stage("before").path.rglob("*") if path.is_file()} == shared
