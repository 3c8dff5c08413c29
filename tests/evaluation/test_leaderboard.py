import json

import pytest

from strop.errors import RunError
from strop.evaluation.results import gather, write_eval
from strop.reports.evaluations import benchmark_table, leaderboard_page, leaderboard_table
from strop.run_directory import write_json


def put(directory, accuracy, benchmark="gsm8k", **about):
    about = {"accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1, "run": directory.name} | about
    write_eval(directory / "stages" / "test" / "eval", {"accuracy": accuracy, "benchmark": benchmark, **about}, [])


def test_the_best_of_a_benchmark_comes_first_and_benchmarks_are_apart(tmp_path):
    for name, accuracy in (("worse", 0.2), ("best", 0.8), ("middle", 0.5)):
        put(tmp_path / name, accuracy)
    put(tmp_path / "other", 0.9, benchmark="aime24")
    board = gather([tmp_path])
    assert {name: [each.name for each in entries] for name, entries in board.benchmarks.items()} == {
        "aime24": ["other"],
        "gsm8k": ["best", "middle", "worse"],
    }


def test_several_stages_of_one_run_are_told_apart(tmp_path):
    put(tmp_path / "run", 0.5)
    put(tmp_path / "alone", 0.4)
    put(tmp_path / "run", 0.9, benchmark="aime24")
    (tmp_path / "run" / "stages" / "test").rename(tmp_path / "run" / "stages" / "other")
    put(tmp_path / "run", 0.6)
    put(tmp_path / "twice", 0.3)
    (tmp_path / "twice" / "stages" / "test").rename(tmp_path / "twice" / "stages" / "before")
    put(tmp_path / "twice", 0.7)
    board = gather([tmp_path])
    assert [each.name for each in board.benchmarks["gsm8k"]] == ["twice/test", "run", "alone", "twice/before"]
    assert [each.name for each in board.benchmarks["aime24"]] == ["run"]


def test_a_damaged_result_is_told_and_keeps_nobody_out(tmp_path):
    put(tmp_path / "good", 0.5)
    put(tmp_path / "cut", 0.5)
    (tmp_path / "cut" / "stages" / "test" / "eval" / "result.json").write_text('{"accuracy": 0.')
    board = gather([tmp_path])
    assert [each.name for each in board.benchmarks["gsm8k"]] == ["good"]
    assert "not valid JSON" in board.left_out[0]
    assert "not valid JSON" in leaderboard_page(board)


def test_what_a_run_has_put_aside_is_not_ranked(tmp_path):
    """`--from` moves what it makes anew to the run's `stale/`; a run that is called so itself is one like any other."""
    run = tmp_path / "run"
    put(run, 0.9)
    (run / "stale").mkdir()
    (run / "stages" / "test").rename(run / "stale" / "test-1")
    put(run, 0.5)
    put(tmp_path / "stale", 0.4)
    board = gather([tmp_path])
    assert [(each.name, each.accuracy) for each in board.benchmarks["gsm8k"]] == [("run", 0.5), ("stale", 0.4)]
    assert board.left_out == []


def test_a_stage_that_is_marked_stale_is_told_and_not_ranked(tmp_path):
    put(tmp_path / "run", 0.5)
    put(tmp_path / "changed", 0.9)
    write_json(tmp_path / "changed" / "stages" / "test" / "stale.json", {"because": "rl was made anew"})
    board = gather([tmp_path])
    assert [each.name for each in board.benchmarks["gsm8k"]] == ["run"]
    [told] = board.left_out
    assert "changed/stages/test/eval/result.json: stale, so it is not ranked: rl was made anew" in told


def test_truncated_sampling_is_a_setting_that_the_table_shows(tmp_path):
    put(tmp_path / "run", 0.5, k=4, num_tasks=30, maj_at_k=0.6, temperature=0.6, top_p=0.95, prompt="rstar2")
    [row] = leaderboard_table(list(gather([tmp_path]).benchmarks["gsm8k"])).rows
    assert row[-1] == "rstar2, t 0.6, top-p 0.95"


def test_results_with_too_many_void_rollouts_are_marked_in_the_tables(tmp_path):
    put(tmp_path / "whole", 0.5, is_final=True)
    put(tmp_path / "void", 0.6, is_final=False)
    rows = leaderboard_table(list(gather([tmp_path]).benchmarks["gsm8k"])).rows
    assert [row[:2] for row in rows] == [("void", "60.0% (not final)"), ("whole", "50.0%")]
    of_rl = {name: {"accuracy": 0.5, "is_final": name == "gsm8k"} for name in ("gsm8k", "aime24")}
    table = benchmark_table([*(("rl", name, result) for name, result in of_rl.items()), ("base", "gsm8k", {"accuracy": 0.25})])
    assert table.rows == (("rl", "50.0%", "50.0% (not final)"), ("base", "25.0%", "–"))


def test_where_nothing_lies_it_says_so(tmp_path):
    with pytest.raises(RunError, match=r"no evaluation to show: there is no eval/result.json"):
        gather([tmp_path])
    with pytest.raises(RunError, match="absent: no such directory"):
        gather([tmp_path / "absent"])


def test_the_table_and_the_page_show_what_was_found_and_escape_what_they_show(tmp_path):
    put(tmp_path / "run", 0.5, k=4, num_tasks=30, maj_at_k=0.6, temperature=0.6, prompt="rstar2", run="<b>run</b>")
    board = gather([tmp_path])
    [row] = leaderboard_table(list(board.benchmarks["gsm8k"])).rows
    assert row[:6] == ("<b>run</b>", "50.0%", "40.0% – 60.0%", "–", "60.0%", "30 × 4")
    assert row[-1] == "rstar2, t 0.6"
    page = leaderboard_page(board)
    assert "&lt;b&gt;run&lt;/b&gt;" in page
    assert "<b>run</b>" not in page
    json.dumps(board.as_json(), allow_nan=False)


def test_the_table_says_how_many_problems_are_not_in_pass_at_k(tmp_path):
    put(tmp_path / "run", 0.5, k=16, num_tasks=30, num_tasks_below_k=2, pass_at_k=0.75)
    put(tmp_path / "void", 0.4, k=16, num_tasks=30, num_tasks_below_k=30)
    rows = leaderboard_table(list(gather([tmp_path]).benchmarks["gsm8k"])).rows
    assert [row[3] for row in rows] == ["75.0% (without 2)", "– (without 30)"]
