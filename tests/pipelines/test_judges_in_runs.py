"""What becomes of a run whose judges cannot judge: a real HTTP server on this machine says nonsense, or refuses."""

from __future__ import annotations

import re

import pytest

from rewards.scorers.chat_service import Answer, said, serving
from scripted_runs import Watching, answer, lines_of, make_recipe, run_recipe, untimed
from strop.errors import CannotLearnError, UserError
from strop.rewards.sum import EXCLUDED
from strop.run_directory import RunDirectory, read_lines
from strop.stages.loop.ledger import read_rollouts, void_reasons

NONSENSE = "bla bla"
VERDICT = "Well. [[7]]"


def never(task, trajectory):
    """A function of a reward that judges nothing, for it returns None."""


def with_judge(service, *, cache=None, tries=2, max_running=16):
    chat = {"url": service.url, "model": "the-judge", "max_running": max_running}
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


def test_a_judge_that_gives_no_verdicts_ends_the_run_and_the_same_command_goes_on(tmp_path):
    is_repaired = False
    with serving(lambda *_: said(VERDICT if is_repaired else NONSENSE)) as service:
        recipe = make_recipe(reward=with_judge(service, cache=tmp_path / "replies", max_running=1))
        why = f"the judge 'the-judge' at {service.url} gave no verdict in 2 replies; the last reply ends with '{NONSENSE}'"
        with pytest.raises(UserError, match=re.escape("8 responses in a row were not judged") + ".*" + re.escape(why)):
            run_recipe(tmp_path / "run", recipe, say=says_anything)
        run = RunDirectory(tmp_path / "run")
        before = of_step(run, 1)
        assert void_reasons(run.stage("rl").rollouts(1)) == [f"part 'clear': {why}"] * 7

        is_repaired = True
        done = run_recipe(tmp_path / "run", recipe, say=says_anything)
        after = of_step(done.run, 1)
        assert after[: len(before)] == before
        assert (len(after), len(voids(after))) == (18, 7)
        assert (len(of_step(done.run, 2)), len(voids(of_step(done.run, 2)))) == (18, 0)


def test_a_judge_that_is_confused_by_every_third_response_goes_on_with_its_counts(tmp_path, caplog):
    order = {}

    def every_third(asked, _):
        place = order.setdefault(question(asked), len(order))
        return said(NONSENSE if place % 3 == 2 else VERDICT)

    with serving(every_third) as service:
        reward = with_judge(service, tries=1, max_running=1)  # one after the other: never two in a row
        done = run_recipe(tmp_path / "run", make_recipe(reward=reward), say=says_anything)
    assert [len(voids(of_step(done.run, step))) for step in (1, 2)] == [6, 6]
    lines = lines_of(done.run)
    assert [line["rollout/void_fraction"] for line in lines] == [pytest.approx(1 / 3)] * 2
    assert re.findall(r"excluded from their groups: (\d+) so far", caplog.text) == ["1", "2", "4", "8"]


JUDGE, SCORER, FUNCTION = "judge", "scorer", "function"


@pytest.mark.parametrize("kind", [JUDGE, SCORER, FUNCTION])
def test_a_step_whose_rollouts_are_void_names_who_could_not_judge_and_so_does_its_ledger(tmp_path, kind):
    first_asked = []

    def refuses(asked, number):
        if kind == SCORER:
            return Answer(body={"error": "too long"}, status=400) if number else Answer(body={"scores": [0.5]})
        first_asked.append(question(asked))
        return said(VERDICT if question(asked) == first_asked[0] else NONSENSE)

    with serving(refuses) as service:
        scorer = {"kind": "http", "url": service.url, "max_batch": 1, "max_running": 1}
        clear = {
            JUDGE: with_judge(service, max_running=1)["parts"]["clear"],
            SCORER: {"kind": "scorer", "scorer": scorer},
            FUNCTION: {"kind": "function", "function": "test_judges_in_runs:never"},
        }[kind]
        reward = {"kind": "sum", "parts": {"accuracy": {"kind": "math"}, "clear": clear}}
        recipe, progress = make_recipe(steps=2, give_up_after=1, reward=reward), Watching()
        with pytest.raises(CannotLearnError):
            run_recipe(tmp_path / "run", recipe, say=says_one_thing, progress=progress)
    why = {
        JUDGE: f"the judge 'the-judge' at {service.url} gave no verdict in 2 replies; the last reply ends with '{NONSENSE}'",
        SCORER: "the reward model's service refused it; a warning in the log shows the service's answer",
        FUNCTION: "test_judges_in_runs:never returned None",
    }[kind]
    num = {JUDGE: 12, SCORER: 17, FUNCTION: 18}[kind]
    first = (
        "every rollout is void: engine, tools or judges fail"
        if kind == FUNCTION
        else f"every group is tied: all {18 - num} rewards are"
    )
    told = [text for text in progress.warnings if text.startswith("step 1 cannot learn: ")]
    assert told[0].startswith(f"step 1 cannot learn: {first}")
    assert told[1:] == [f"step 1 cannot learn: {num} rollouts are void, most often because: part 'clear': {why}."]
    run = RunDirectory(tmp_path / "run")
    assert void_reasons(run.stage("rl").rollouts(1)) == [f"part 'clear': {why}"] * num
    [row] = read_lines(run.updates)
    assert "most often" not in row.get("why_skipped", "")  # that would contain addresses and replies


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
