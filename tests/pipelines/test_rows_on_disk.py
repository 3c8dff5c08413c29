"""Rows and demonstrations stay on disk while they are mixed and imitated, and come out as lists of them would."""

import asyncio
import json
import random
import tracemalloc
from contextlib import closing

import pytest

from scripted_runs import RECIPE, Watching, make_recipe, recipe_of, run_recipe
from strop.errors import RunError, TaskError
from strop.run_directory import LineWriter, RunDirectory, iter_lines, read_lines, write_json
from strop.stages.context import TASK, StageContext, tasks_to_play
from strop.stages.dpo import split_by_prompt
from strop.stages.loop.steps import batch_at
from strop.tasks import RowTasks
from strop.tasks.files import RowFile, writing_rows
from strop.types import Task, derive_seed


def test_rows_are_read_by_number_and_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"n": 0}, {"text": "я" * 9}, {"n": 2}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + '{"n": 3')
    with RowFile(iter_lines(path)) as file:
        assert [file[number] for number in (2, 0, 1)] == [rows[2], rows[0], rows[1]]
        assert list(file) == rows == read_lines(path)
        for number in (3, -1):
            with pytest.raises(IndexError):
                file[number]
    assert path.write_text("") == len(RowFile(iter_lines(path)))


def test_a_row_that_is_no_json_is_named_with_its_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": \n{"n": 2}\n')
    with pytest.raises(RunError, match=r"rows\.jsonl:2: not valid JSON"):
        RowFile(iter_lines(path))


def test_the_order_of_an_epoch_is_that_of_a_list_that_is_shuffled():
    numbers = list(range(20))
    for epoch in range(3):
        random.Random(derive_seed(5, "epoch", epoch)).shuffle(order := list(range(20)))
        found = [each for step in range(5) for each in batch_at(numbers, 5 * epoch + step, batch_size=4, seed=5)]
        assert found == order


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_preferences_are_split_as_a_list_of_their_prompts_would_be(share):
    prompts = [f"{random.Random(number).randrange(30)} \ud800" for number in range(80)]
    unlike = list(dict.fromkeys(prompts))
    random.Random(5).shuffle(unlike)
    held_out = set(unlike[: max(1, round(share * len(unlike)))])
    train, test = split_by_prompt(iter(prompts), share=share, seed=5)
    assert list(train) == [number for number, prompt in enumerate(prompts) if prompt not in held_out]
    assert list(test) == [number for number, prompt in enumerate(prompts) if prompt in held_out]


def context_of(name, recipe, run, events=None):
    return StageContext(
        name=name,
        stage=recipe.stages.get(name),
        recipe=recipe,
        run=run,
        runner=None,
        tools=(),
        open_engines=None,
        progress=Watching(),
        trackers=(),
        events=events,
    )


def tasks_of_stages(tmp_path, **made):
    """What an RL stage plays that stands on these stages, each of which made these tasks."""
    run = RunDirectory(tmp_path)
    for name, tasks in made.items():
        with writing_rows(run.stage(name).kept) as add:
            for each in tasks:
                add(TASK.dump_python(each, mode="json"))
        write_json(run.stage(name).done, {"data": f"stages/{name}/data/kept.jsonl"})
    rl = make_recipe().stages["rl"].replaced(data=tuple(made)).config
    context = context_of("rl", make_recipe(), run)
    return context, lambda: tasks_to_play(context, rl)


def test_tasks_of_several_stages_are_those_of_one_list_and_their_texts_are_not_in_memory(tmp_path):
    made = {
        name: [Task(id=f"{name}-{number}", question="x" * 2000, answer="1", source="here") for number in range(num)]
        for name, num in (("first", 900), ("none", 0), ("second", 700))
    }
    context, tasks = tasks_of_stages(tmp_path, **made)
    tracemalloc.start()
    source = tasks()
    order = [source.task(index).id for index in range(2000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.2 * 1600 * 2000
    of_list = RowTasks([*made["first"], *made["second"]], seed=context.seed("tasks"))
    assert order == [of_list.task(index).id for index in range(2000)]
    assert source.num_tasks == 1600


def test_a_row_that_is_no_task_is_named_before_any_is_played(tmp_path):
    good = Task(id="a", question="q", answer="1", source="here")
    context, tasks = tasks_of_stages(tmp_path, first=[good, good], second=[good, good])
    path = context.run.stage("second").kept
    path.write_text(path.read_text().splitlines()[0] + '\n{"id": "b"}\n')
    with pytest.raises(TaskError, match=r"row 2 of what stage 'second' made is no task \(question: .*--from second"):
        tasks()


NUM_ROWS = {"first": 900, "second": 700}
MIXES = [  # and the rows of each
    ({}, NUM_ROWS),
    ({"counts": {"first": 7, "second": 500}}, {"first": 7, "second": 500}),
]


def conversations(path, name, num):
    row = {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "x" * 2000}]}
    path.write_text("".join(json.dumps(row | {"id": f"{name}-{number}"}) + "\n" for number in range(num)))
    return {"kind": "conversations", "path": str(path)}


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory):
    """Two stages of conversations, 3 MB of them."""
    directory = tmp_path_factory.mktemp("mixing")
    return {name: conversations(directory / f"{name}.jsonl", name, num) for name, num in NUM_ROWS.items()}


def mixing(stages, mix):
    mixed = {"mixed": {"kind": "mix", "data": list(stages), **mix}}
    return recipe_of(stages | mixed)


@pytest.mark.parametrize(("mix", "counts"), MIXES)
def test_a_mix_has_the_rows_that_lists_would_give_in_their_order_and_holds_none_of_them(two_sets, tmp_path, mix, counts):
    recipe = mixing(two_sets, mix)
    run = run_recipe(tmp_path / "run", recipe, until="second").run
    with closing(LineWriter(run.events)) as events:
        context = context_of("mixed", recipe, run, events)
        tracemalloc.start()
        path = asyncio.run(recipe.stages["mixed"].run(context)).product
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 0.2 * sum((run.stage(name).path / "data" / "kept.jsonl").stat().st_size for name in two_sets)
    expected = []
    for name in two_sets:
        rows = read_lines(run.stage(name).path / "data" / "kept.jsonl")
        expected += random.Random(context.seed("draw", name)).sample(rows, counts[name])
    random.Random(context.seed("order")).shuffle(expected)
    assert read_lines(path) == expected


def test_more_rows_than_there_are_cannot_be_mixed(two_sets, tmp_path):
    with pytest.raises(TaskError, match=r"stages\.mixed: 901 rows of 'first' are asked for, but it made 900\. Lower the count"):
        run_recipe(tmp_path / "run", mixing(two_sets, {"counts": {"first": 901, "second": 1}}))


def test_demonstrations_that_are_played_in_parts_are_those_that_are_played_at_once(monkeypatch, tmp_path):
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")}
    stages["sft"] = stages["sft"] | {"num_demonstrations": 11}
    played = {"kind": "demonstrations", "init": "base", "num_demonstrations": 11, "demonstrator": {"kind": "arithmetic"}}
    recipe = recipe_of(stages | {"played": played})
    at_once = run_recipe(tmp_path / "at-once", recipe).run
    monkeypatch.setattr("strop.stages.conversations._HELD_AT_ONCE", 3)
    in_parts = run_recipe(tmp_path / "in-parts", recipe).run
    for name in ("sft/data/demonstrations.jsonl", "played/data/kept.jsonl"):
        mine, theirs = (without_times(read_lines(run.path / "stages" / name)) for run in (in_parts, at_once))
        assert mine == theirs
        assert len(mine) == 11
    mine, theirs = (run.stage("sft").model / "model.safetensors" for run in (in_parts, at_once))
    assert mine.read_bytes() == theirs.read_bytes()


def without_times(value):
    """What a clock said, taken out of a rollout."""
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key != "duration_s"}
    return [without_times(each) for each in value] if isinstance(value, list) else value
