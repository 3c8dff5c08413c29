"""What becomes of a run whose judges cannot judge: a real HTTP server on this machine says nonsense, or refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rewards.scorers.chat_service import Answer, said, serving
from scripted_runs import RECIPE, Watching, answer, make_recipe, run_recipe, untimed
from strop.errors import CannotLearnError, MachineError, UserError
from strop.pipelines.ledger import read_rollouts, void_reasons
from strop.pipelines.recipe import Recipe, resolve
from strop.rewards.sum import EXCLUDED
from strop.runs import RunDirectory, read_lines

NONSENSE = "bla bla"
VERDICT = "Well. [[7]]"


def never(task, trajectory):
    """A function of a reward that judges nothing, for it returns None."""


def with_judge(service, *, cache=None, tries=2, max_running=16):
    chat = {"url": service.url, "model": "the-judge", "backoff_s": 0.01, "max_running": max_running}
    judge = {"service": chat | ({} if cache is None else {"cache": str(cache)}), "tries": tries}
    return {"kind": "sum", "parts": {"accuracy": {"kind": "math"}, "clear": {"kind": "judge", "judge": judge}}}


def says_anything(conversation, draw):
    return answer(draw.randrange(10**6))


def says_one_thing(conversation, draw):
    return answer("none")


def question(asked):
    return asked.body["messages"][0]["content"]


def of_step(run, step):
    return read_rollouts(run.stage("rl").rollouts(step))


def voids(rollouts):
    return [scored for scored in rollouts if EXCLUDED in scored.reward_parts]


def test_a_judge_that_turns_to_nonsense_ends_the_run_and_the_same_command_goes_on(tmp_path, caplog):
    is_mended = False

    def turns_to_nonsense(_, number):
        return said(VERDICT) if is_mended or number < 2 else replace(said(NONSENSE), delay_s=0.05)  # behind the verdicts

    with serving(turns_to_nonsense) as service:
        recipe = make_recipe(reward=with_judge(service, cache=tmp_path / "replies", max_running=1))
        with pytest.raises(UserError) as raised:
            run_recipe(tmp_path / "run", recipe, say=says_anything)
        told = str(raised.value)
        assert f"the judge 'the-judge' at {service.url} gave no verdict on " in told
        row, num_unclear, num = map(int, re.search(r"on (\d+) different .*\((\d+) of (\d+) judgements so far", told).groups())
        assert 8 <= row <= num_unclear == num - 2 <= 10  # of groups of six, of which four count each
        assert f"the last reply ends with '{NONSENSE}'" in told
        counts = [re.findall(r"(\d+ of \d+) judgements so far hold no verdict", each.getMessage()) for each in caplog.records]
        assert [found[0] for found in counts if found][:3] == ["1 of 3", "2 of 4", "4 of 6"]
        assert all(service.url in each.getMessage() for each, found in zip(caplog.records, counts, strict=True) if found)

        run = RunDirectory(tmp_path / "run")
        before = of_step(run, 1)
        assert len(before) - len(voids(before)) == 2  # what it had judged is on disk
        why = f"part 'clear': the judge 'the-judge' at {service.url} gave no verdict in 2 replies; the last reply ends with"
        assert void_reasons(run.stage("rl").rollouts(1)) == [f"{why} '{NONSENSE}'"] * (num_unclear - 1)

        is_mended, num_before = True, len(service.asked)
        done = run_recipe(tmp_path / "run", recipe, say=says_anything)
        after = of_step(done.run, 1)
        assert after[: len(before)] == before
        assert (len(after), len(voids(after))) == (18, num_unclear - 1)
        assert len(of_step(done.run, 2)) == 18
        asked_again = {question(each) for each in service.asked[num_before:]} & {
            question(each) for each in service.asked[:num_before]
        }
        assert asked_again  # nonsense that was kept would have ended the run again
        assert len(voids(of_step(done.run, 2))) == 0


def test_a_judge_that_is_confused_by_every_third_response_goes_on_with_its_counts(tmp_path, caplog):
    order = {}

    def every_third(asked, _):
        place = order.setdefault(question(asked), len(order))
        return said(NONSENSE if place % 3 == 2 else VERDICT)

    with serving(every_third) as service:
        reward = with_judge(service, tries=1, max_running=1)  # one after the other: never two in a row
        done = run_recipe(tmp_path / "run", make_recipe(reward=reward), say=says_anything)
    assert [len(voids(of_step(done.run, step))) for step in (1, 2)] == [6, 6]
    lines = [line for line in read_lines(done.run.metrics) if line["stage"] == "rl"]
    assert [line["rollout/void_fraction"] for line in lines] == [pytest.approx(1 / 3)] * 2
    counts = re.findall(r"(\d+ of \d+) judgements so far hold no verdict", caplog.text)
    assert counts == ["1 of 3", "2 of 6", "4 of 12", "8 of 24"]


JUDGE, SCORER, FUNCTION = "judge", "scorer", "function"


@pytest.mark.parametrize("kind", [JUDGE, SCORER, FUNCTION])
def test_a_step_whose_rollouts_are_void_names_who_could_not_judge_and_so_does_its_ledger(tmp_path, kind):
    def refuses(asked, number):
        if kind == SCORER:
            return Answer(body={"error": "too long"}, status=400) if number else Answer(body={"scores": [0.5]})
        return said(NONSENSE)  # on three questions in all: too few to blame the judge

    with serving(refuses) as service:
        scorer = {"kind": "http", "url": service.url, "max_batch": 1, "max_running": 1, "backoff_s": 0.01}
        clear = {
            JUDGE: with_judge(service)["parts"]["clear"],
            SCORER: {"kind": "scorer", "scorer": scorer},
            FUNCTION: {"kind": "function", "function": "test_judges_in_runs:never"},
        }[kind]
        reward = {"kind": "sum", "parts": {"accuracy": {"kind": "math"}, "clear": clear}}
        recipe, progress = make_recipe(steps=2, give_up_after=1, reward=reward), Watching()
        with pytest.raises(CannotLearnError):
            run_recipe(tmp_path / "run", recipe, say=says_one_thing, progress=progress)
    why = {
        JUDGE: f"the judge 'the-judge' at {service.url} gave no verdict in 2 replies; the last reply ends with '{NONSENSE}'",
        SCORER: "the reward model refused to look at it; a warning says what its service answered",
        FUNCTION: "test_judges_in_runs:never returned None",
    }[kind]
    num = 17 if kind == SCORER else 18
    first = (
        "every group is tied: all 1 rewards are" if kind == SCORER else "every rollout is void: engine, tools or judges fail"
    )
    told = [text for text in progress.warnings if text.startswith("step 1 cannot learn: ")]
    assert told[0].startswith(f"step 1 cannot learn: {first}")
    assert told[1:] == [f"step 1 cannot learn: {num} of 18 rollouts are void, most often because: part 'clear': {why}."]
    run = RunDirectory(tmp_path / "run")
    assert void_reasons(run.stage("rl").rollouts(1)) == [f"part 'clear': {why}"] * num
    [row] = read_lines(run.updates)
    assert "most often" not in row["why_skipped"]  # which hangs on addresses and replies


def test_an_evaluation_that_nobody_could_judge_says_which_part_could_not(tmp_path):
    parts = {"accuracy": {"kind": "function", "function": "test_judges_in_runs:never"}}
    before = RECIPE["stages"]["before"] | {"init": "base", "reward": {"kind": "sum", "parts": parts}}
    recipe = RECIPE | {"stages": {"base": RECIPE["stages"]["base"], "before": before}}
    with pytest.raises(MachineError, match=r"most often: part 'accuracy': test_judges_in_runs:never returned None\. All"):
        run_recipe(tmp_path / "run", Recipe.model_validate_json(json.dumps(resolve(recipe))))


def test_runs_that_a_judge_left_with_void_rollouts_are_equal_whatever_the_order_was(tmp_path):
    def by_response(asked, _):
        return said(
            VERDICT if re.search(r"[02468]}</answer>", question(asked)) else NONSENSE if "7}" in question(asked) else "[[2]]"
        )

    with serving(by_response) as service:
        recipe = make_recipe(reward=with_judge(service))
        runs = [run_recipe(tmp_path / name, recipe, say=says_anything).run for name in ("one", "two")]
    metrics, updates = (
        [[untimed(line) for line in read_lines(getattr(run, name))] for run in runs] for name in ("metrics", "updates")
    )
    assert metrics[0] == metrics[1]
    assert updates[0] == updates[1]
    assert any(line.get("rollout/void_fraction", 0) > 0 for line in metrics[0])
