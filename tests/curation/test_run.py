import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from strop.curation import run
from strop.curation.config import CurationConfig, load_curation
from strop.curation.decontamination import read_benchmark
from strop.curation.rules import AgreementRule, key_of
from strop.curation.run import run_curation
from strop.errors import ConfigError, DeadlineExceeded, RunError, TaskError
from strop.recipe.load import load_recipe
from strop.tasks import load_rows
from strop.tasks.rows import HubRows, JsonlRows

from .problems import problems, reworded

RULES = """
[[rules]]
kind = "integer_answer"
[[rules]]
kind = "decontamination"
against = [{ kind = "jsonl", path = "benchmark.jsonl" }]
[[rules]]
kind = "exact_duplicates"
[[rules]]
kind = "near_duplicates"
"""


CHUNK = 200


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(run, "CHUNK_TASKS", CHUNK)


@pytest.fixture
def file(tmp_path):
    """641 rows next to a curation file: 60 without an integer answer, 10 of a benchmark, 30 twice, one no problem."""
    pytest.importorskip("rensa", reason="needs the extra strop[data]")
    benchmark = problems(100, seed=1, source="benchmark")
    rest = [asdict(task) for task in problems(600, seed=2)]
    for row in rest[:60]:
        row["answer"] += ".5"
    planted = [asdict(reworded(task)) for task in benchmark[:10]]
    write(tmp_path / "benchmark.jsonl", [asdict(task) for task in benchmark])
    write(tmp_path / "rows.jsonl", [*rest, *planted, *rest[100:130], {"id": "bad", "question": "", "answer": "1"}])
    source = 'name = "test"\n[[sources]]\nkind = "jsonl"\ndataset = "strop"\npath = "rows.jsonl"\n'
    (tmp_path / "file.toml").write_text(source + RULES)
    return tmp_path / "file.toml"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


EXPECTED = {"unreadable": 1, "integer_answer": 60, "decontamination": 10, "exact_duplicates": 30, "near_duplicates": 0}


def test_each_rule_tells_what_it_dropped_and_nothing_is_dropped_silently(file, tmp_path):
    summary = run_curation(load_curation(file), tmp_path / "out", jobs=1)
    assert {rule["name"]: rule["num_dropped"] for rule in summary["rules"]} == EXPECTED
    kept, dropped = read(tmp_path / "out" / "kept.jsonl"), read(tmp_path / "out" / "dropped.jsonl")
    assert len(kept) + len(dropped) == summary["num_tasks"] == 641
    assert all(row["rule"] and row["reason"] for row in dropped)
    assert {row["id"] for row in kept}.isdisjoint(row["id"] for row in dropped if row["rule"] != "exact_duplicates")


def test_the_page_shows_counts_and_samples_of_every_rule_and_escapes_what_a_row_says(file, tmp_path):
    rows = read(tmp_path / "rows.jsonl")
    write(tmp_path / "rows.jsonl", [{**rows[0], "question": "<script>alert(1)</script>"}])
    run_curation(load_curation(file), tmp_path / "out", jobs=1)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert "Dropped by integer_answer" in page
    assert "is not an integer" in page
    assert "src=" not in page  # it needs no other file


def test_two_processes_write_what_one_writes(file, tmp_path):
    for jobs in (1, 2):
        run_curation(load_curation(file), tmp_path / f"out-{jobs}", jobs=jobs)
    for name in ("kept.jsonl", "dropped.jsonl", "report.html"):
        assert (tmp_path / "out-1" / name).read_bytes() == (tmp_path / "out-2" / name).read_bytes()


def test_what_was_kept_is_read_as_tasks_again(file, tmp_path):
    run_curation(load_curation(file), tmp_path / "out", jobs=1)
    tasks = load_rows(JsonlRows(path=tmp_path / "out" / "kept.jsonl", dataset="strop"), split="train")
    assert len(tasks) == 540
    assert (tasks[0].id, tasks[0].source) == ("rest/60", "rest")


def test_a_killed_curation_goes_on_behind_its_parts_and_ends_the_same(file, tmp_path):
    run_curation(load_curation(file), tmp_path / "whole", jobs=1)
    program = (
        "from pathlib import Path; from strop.curation.config import load_curation; import strop.curation.run as run, time;"
        f"run.CHUNK_TASKS = {CHUNK};"
        "run._compare_all = lambda *_: time.sleep(600);"  # it is killed when all parts but no result is there
        f"run.run_curation(load_curation(Path({str(file)!r})), Path({str(tmp_path / 'out')!r}), jobs=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(tmp_path / "out" / "parts" / "part-000002.jsonl")
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    parts = sorted((tmp_path / "out" / "parts").glob("part-*.jsonl"))
    parts[1].unlink()  # as if the kill had come before it
    untouched = parts[0].stat().st_mtime_ns
    judged = []
    seen = []

    def look(num):
        judged.append(num)
        seen.append(parts[0].stat().st_mtime_ns)

    run_curation(load_curation(file), tmp_path / "out", jobs=1, progress=look)
    assert set(seen) == {untouched}
    assert sum(judged) == 641
    for name in ("kept.jsonl", "dropped.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out" / "parts").exists()


def wait_for(path, deadline_s=100):
    end = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear within {deadline_s} s"
        time.sleep(0.05)


def test_processes_that_hang_end_the_curation_and_the_same_call_resumes(file, tmp_path, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(run, "_CHUNK_DEADLINE_S", 0.01)
        with pytest.raises(DeadlineExceeded, match="no chunk of 200 tasks was judged within"):
            run_curation(load_curation(file), tmp_path / "out", jobs=2)
    assert run_curation(load_curation(file), tmp_path / "out", jobs=1)["num_tasks"] == 641


@pytest.mark.slow
def test_no_process_outlives_a_curation_that_is_killed(file, tmp_path):
    """Workers whose parent is killed with no chance to tell them must end by themselves."""
    write(tmp_path / "rows.jsonl", [asdict(task) for task in problems(20_000, seed=4)])
    program = (
        "from pathlib import Path; from strop.curation import load_curation, run_curation;"
        "\nif __name__ == '__main__':"
        f" run_curation(load_curation(Path({str(file)!r})), Path({str(tmp_path / 'out')!r}), jobs=2)"
    )
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen([sys.executable, str(tmp_path / "program.py")])
    wait_for(tmp_path / "out" / "parts" / "part-000000.jsonl")
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) >= 2
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.1)


def test_a_finished_curation_is_not_done_again_and_another_one_does_not_overwrite_it(file, tmp_path):
    first = run_curation(load_curation(file), tmp_path / "out", jobs=1)
    before = (tmp_path / "out" / "kept.jsonl").stat().st_mtime_ns
    assert run_curation(load_curation(file), tmp_path / "out", jobs=1) == first
    assert (tmp_path / "out" / "kept.jsonl").stat().st_mtime_ns == before
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(asdict(problems(1, seed=9)[0])) + "\n")
    with pytest.raises(RunError, match=r"different rules or files\. Choose another --out"):
        run_curation(load_curation(file), tmp_path / "out", jobs=1)


def test_parts_of_other_rules_are_not_gone_on_with(file, tmp_path):
    stale = tmp_path / "out" / "parts"
    stale.mkdir(parents=True)
    (stale / "inputs.json").write_text('{"digest": "another"}')
    (stale / "part-000000.jsonl").write_text("")
    assert run_curation(load_curation(file), tmp_path / "out", jobs=1)["num_tasks"] == 641


def stop(_):
    raise KeyboardInterrupt


def outcomes_of(tasks, *, num_right):
    keys = [key_of(each) for each in tasks]
    return [{"task_id": name, "question_digest": of, "num_right": num_right, "num_judged": 16} for name, of in keys]


def test_outcomes_count_with_what_they_say_and_not_with_where_they_lie(tmp_path):
    tasks = problems(4, seed=3)
    write(tmp_path / "rows.jsonl", map(asdict, tasks))
    write(tmp_path / "here.jsonl", outcomes_of(tasks, num_right=2))
    (tmp_path / "there.jsonl").write_bytes((tmp_path / "here.jsonl").read_bytes())
    source = JsonlRows(path=tmp_path / "rows.jsonl", dataset="strop")
    here, there = (
        CurationConfig(name="agreed", sources=(source,), rules=(AgreementRule(outcomes=tmp_path / name),))
        for name in ("here.jsonl", "there.jsonl")
    )
    with pytest.raises(KeyboardInterrupt):
        run_curation(here, tmp_path / "out", jobs=1, progress=stop)
    part = tmp_path / "out" / "parts" / "part-000000.jsonl"
    judged, seen = part.stat().st_mtime_ns, []
    first = run_curation(there, tmp_path / "out", jobs=1, progress=lambda _: seen.append(part.stat().st_mtime_ns))
    assert set(seen) == {judged}
    assert first["num_kept"] == 4
    assert str(tmp_path / "there.jsonl") in first["inputs"]["files"]
    assert run_curation(here, tmp_path / "out", jobs=1) == first
    write(tmp_path / "here.jsonl", outcomes_of(tasks, num_right=1))
    with pytest.raises(RunError, match="different rules or files"):
        run_curation(here, tmp_path / "out", jobs=1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('rules=[{kind="near_duplicates"}, {kind="integer_answer"}]', "near_duplicates before integer_answer.* last"),
        ('rules=[{kind="integer_answer"}, {kind="integer_answer"}]', "integer_answer twice"),
        ('rules=[{kind="integer_answers"}]', r"file\.toml: rules\.0\.kind: 'integer_answers' .* Did you mean 'integer_answer'"),
        ('rules=[{kind="simple_answer", max_char=9}]', r"rules\.0\.max_char: unknown key\. Did you mean 'max_chars'"),
        ('rules={kind="exact_duplicates"}', r"rules: one table, where a list of them belongs\. Write \[\[rules\]\]\.$"),
        (
            'rules=["exact_duplicates"]',
            r"rules\.0: 'exact_duplicates' is not a table\. Write \[\[rules\]\] with kind = \"exact_duplicates\"\.$",
        ),
        (
            'rules=[{kind="decontamination", against=["gsm8k"]}]',
            r"rules\.0\.against\.0\.kind: 'gsm8k' is not one of jsonl, parquet, hub\.",
        ),
        ("rules=[]", "rules"),
    ],
)
def test_rules_that_make_no_sense_are_refused(file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_curation(file, [override])


def test_a_benchmark_that_is_not_there_stops_before_anything_is_judged(file, tmp_path):
    (tmp_path / "benchmark.jsonl").unlink()
    with pytest.raises(TaskError, match=r"benchmark\.jsonl: cannot be read"):
        run_curation(load_curation(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_each_rule_and_where_the_page_lies(file, tmp_path):
    command = [sys.executable, "-m", "strop.cli", "data", "curate", str(file), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "COLUMNS": "200"}, check=True
    )
    assert "decontamination      dropped        10 of       580" in done.stdout
    assert done.stdout.rstrip().endswith("report.html")


def test_a_curation_that_keeps_nothing_ends_in_an_error_behind_its_files(tmp_path):
    write(tmp_path / "rows.jsonl", [{"id": "1", "question": "Half a turn in radians?", "answer": "pi"}])
    file = tmp_path / "curate.toml"
    file.write_text('name = "x"\n[[sources]]\nkind = "jsonl"\npath = "rows.jsonl"\n[[rules]]\nkind = "integer_answer"\n')
    command = [sys.executable, "-m", "strop.cli", "data", "curate", str(file), "--out", str(tmp_path / "out"), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing is kept. integer_answer dropped most (1 of 1)" in " ".join(done.stderr.split())
    assert [row["answer"] for row in read(tmp_path / "out" / "dropped.jsonl")] == ["pi"]


def write_sources(directory, *numbers_of_rows):
    for name, num in zip("ab", numbers_of_rows, strict=True):
        rows = [{"question": f"{name} {each.question}", "answer": "9" * 40} for each in problems(num, seed=7)]
        write(directory / f"{name}.jsonl", rows)


def test_rows_that_the_limits_of_a_source_leave_out_are_dropped_by_name(tmp_path):
    rows = [asdict(task) for task in problems(10, seed=2)]
    rows[1]["question"] = "x" * 2000
    rows[2]["facts"] = {"solution": "<<1+1=2>> <<2+1=3>>"}
    write(tmp_path / "rows.jsonl", [*rows, {"id": "bad", "question": "", "answer": "1"}])
    (tmp_path / "file.toml").write_text(
        'name = "test"\n[[sources]]\nkind = "jsonl"\ndataset = "strop"\npath = "rows.jsonl"\nmax_question_chars = 1000\n'
        'max_solution_steps = 1\nlimit = 5\n[[rules]]\nkind = "integer_answer"\n'
    )
    summary = run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=1)
    found = {rule["name"]: rule["num_dropped"] for rule in summary["rules"]}
    assert found == {"unreadable": 1, "max_question_chars": 1, "max_solution_steps": 1, "limit": 3, "integer_answer": 0}
    assert (summary["num_kept"], summary["num_tasks"]) == (5, 11)
    dropped = {row["id"]: (row["rule"], row["reason"]) for row in read(tmp_path / "out" / "dropped.jsonl")}
    assert dropped["rest/1"] == ("max_question_chars", "2000 characters, more than 1000")
    assert dropped["rest/2"] == ("max_solution_steps", "2 steps of its solution, more than 1")
    assert dropped["rest/9"] == ("limit", "6 rows, more than 5")


def test_rows_of_another_type_are_dropped_by_the_rule_where_even_without_an_answer(tmp_path):
    kinds = ["has_answer_extracted", "converted_proof", "no_answer_extracted", "has_answer_extracted"]
    answers = ["1", "2", "", ""]  # the last one has none though it should
    write(
        tmp_path / "rows.jsonl",
        [
            {"problem": f"p{n}", "expected_answer": answer, "problem_type": kind}
            for n, (kind, answer) in enumerate(zip(kinds, answers, strict=True))
        ],
    )
    (tmp_path / "file.toml").write_text(
        'name = "test"\n[[sources]]\nkind = "jsonl"\ndataset = "openmathreasoning"\npath = "rows.jsonl"\n'
        '[[rules]]\nkind = "integer_answer"\n'
    )
    summary = run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=1)
    found = [(rule["name"], rule["num_seen"], rule["num_dropped"]) for rule in summary["rules"]]
    assert found == [("where", 4, 2), ("unreadable", 2, 1), ("integer_answer", 1, 0)]
    dropped = {row["question"]: row for row in read(tmp_path / "out" / "dropped.jsonl")}
    assert (dropped["p1"]["rule"], dropped["p1"]["answer"]) == ("where", "2")
    [without_answer] = [row for question, row in dropped.items() if '"p2"' in question]
    assert without_answer["reason"] == "its problem_type is 'no_answer_extracted', not 'has_answer_extracted'"
    assert "Dropped by where" in (tmp_path / "out" / "report.html").read_text()


def test_decontamination_against_a_set_without_a_test_split_reads_what_there_is(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write(tmp_path / "test.jsonl", [{"description": "Add them all up.", "solution": "1"}])
    found = read_benchmark(HubRows(name=str(tmp_path), dataset="project-euler"))
    assert [task.question for task in found] == ["Add them all up."]


TWO_SOURCES = """
name = "two"
[[sources]]
kind = "jsonl"
path = "a.jsonl"
[[sources]]
kind = "jsonl"
path = "b.jsonl"
[[rules]]
kind = "small_numbers"
sources = ["b.jsonl"]
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_rule_judges_the_sources_that_it_names(tmp_path, jobs):
    write_sources(tmp_path, 3, 4)
    (tmp_path / "file.toml").write_text(TWO_SOURCES)
    run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=jobs)
    assert {row["id"] for row in read(tmp_path / "out" / "kept.jsonl")} == {f"a.jsonl:{n}" for n in (1, 2, 3)}
    assert {row["rule"] for row in read(tmp_path / "out" / "dropped.jsonl")} == {"small_numbers"}


def test_a_comparison_remembers_no_problem_of_other_sources(tmp_path):
    write_sources(tmp_path, 2, 2)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [{"question": "the same", "answer": "1"}] * 2)
    (tmp_path / "file.toml").write_text(TWO_SOURCES.replace("small_numbers", "exact_duplicates"))
    run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=1)
    assert [row["id"] for row in read(tmp_path / "out" / "kept.jsonl")] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]


def test_a_rule_for_a_source_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "file.toml").write_text(TWO_SOURCES.replace('["b.jsonl"]', '["c.jsonl"]'))
    with pytest.raises(ConfigError, match=r"'c\.jsonl', which is not one of the sources.*Did you mean"):
        load_curation(tmp_path / "file.toml")


def test_parts_that_a_kill_left_behind_the_result_go_with_the_next_call(tmp_path):
    write_sources(tmp_path, 3, 4)
    (tmp_path / "file.toml").write_text(TWO_SOURCES)
    first = run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=1)
    (tmp_path / "out" / "parts").mkdir()
    (tmp_path / "out" / "parts" / "part-000000.jsonl").write_text("")
    assert run_curation(load_curation(tmp_path / "file.toml"), tmp_path / "out", jobs=1) == first
    assert not (tmp_path / "out" / "parts").exists()


def test_the_shipped_curation_scopes_its_rules_as_the_paper_does():
    config = load_curation(Path(__file__).parents[2] / "recipes" / "curation" / "rstar2.toml")
    scopes = {rule.kind: config.scope(rule) for rule in config.rules}
    assert scopes["agreement"] == {"openmathreasoning", "nvidia/OpenMathReasoning[cot]"}
    assert scopes["small_numbers"] == {"project-euler", "PatrickHaller/pecc[test]"}
    assert [scopes[kind] for kind in ("integer_answer", "decontamination", "exact_duplicates", "near_duplicates")] == [None] * 4
    [agreement] = [rule for rule in config.rules if rule.kind == "agreement"]
    assert (agreement.min_right, agreement.num_rollouts) == (2, 16)


def test_the_shipped_curation_is_checked_against_every_benchmark_whose_recipe_is_shipped():
    recipes = Path(__file__).parents[2] / "recipes"
    config = load_curation(recipes / "curation" / "rstar2.toml")
    [rule] = [rule for rule in config.rules if rule.kind == "decontamination"]
    in_use = {
        stage.config.tasks.config.dataset
        for path in (recipes / "eval" / "math.toml", recipes / "eval" / "gpqa-diamond.toml")
        for stage in load_recipe(path, ()).stages.values()
        if stage.kind == "eval"
    }
    assert len(in_use) == 7
    assert in_use <= {source.config.dataset for source in rule.against}
