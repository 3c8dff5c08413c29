"""Other harnesses: on files written here, in the layout of what bfcl-eval 2026.3.23 and lm-eval 0.4.13 wrote when they ran.

`harness_files` has whole directories with every field of the real ones; what is made in code has the fields that are read.
"""

import json
from pathlib import Path

import pytest

from strop.errors import ConfigError, RunError
from strop.evaluation.harnesses import bfcl_commands, lm_eval_command, read_bfcl, read_lm_eval

ADDRESS = "http://127.0.0.1:8000"
STAMP = "2025-11-22T01-00-00.000000"
FILES = Path(__file__).with_name("harness_files")


def put_bfcl(root, category, right, total, *, group="", version="v3"):
    path = root / "Qwen_Qwen3-4B" / group / f"BFCL_{version}_{category}_score.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = {"id": f"{category}_0", "valid": False, "error": ["wrong"]}
    lines = [{"accuracy": right / total, "correct_count": right, "total_count": total}, failed]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def put_lm_eval(root, verdicts, *, model="served"):
    root.mkdir(parents=True, exist_ok=True)
    share = sum(verdicts) / len(verdicts)
    figures = {
        "alias": "ifeval",
        "prompt_level_strict_acc,none": share,
        "prompt_level_strict_acc_stderr,none": 0.1,
        "inst_level_strict_acc,none": 0.8,
        "inst_level_strict_acc_stderr,none": "N/A",
    }
    tree = {
        "results": {"ifeval": figures},
        "n-samples": {"ifeval": {"original": 541, "effective": len(verdicts)}},
        "model_name": model,
    }
    (root / f"results_{STAMP}.json").write_text(json.dumps(tree))
    samples = [
        {"doc_id": at, "doc": {"key": 1000 + at, "prompt": f"Write {at} words."}, "target": 0, "prompt_level_strict_acc": each}
        for at, each in enumerate(verdicts)
    ]
    (root / f"samples_ifeval_{STAMP}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))


def test_commands_name_the_server_and_keep_every_sample(tmp_path):
    generate, judge = bfcl_commands(
        ADDRESS, model="Qwen/Qwen3-4B", tokenizer=Path("my model"), categories=["multi_turn", "live"], out=tmp_path
    )
    assert generate.startswith("LOCAL_SERVER_ENDPOINT=127.0.0.1 LOCAL_SERVER_PORT=8000 ")
    assert " bfcl generate --model Qwen/Qwen3-4B --test-category multi_turn,live " in generate
    assert generate.endswith("my model'")
    assert judge.endswith(f"--score-dir {tmp_path / 'score'}")
    command = lm_eval_command(ADDRESS, model="served", tasks=["ifeval"], out=tmp_path)
    assert f"model=served,base_url={ADDRESS}/v1/chat/completions," in command
    assert "--apply_chat_template --log_samples" in command


def test_addresses_and_names_that_a_harness_would_misread_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Write http://host:port, without a path"):
        bfcl_commands("127.0.0.1:8000", model="m", tokenizer=Path("m"), categories=["live"], out=tmp_path)
    with pytest.raises(ConfigError, match="separates names by commas"):
        lm_eval_command(ADDRESS, model="a,b", tasks=["ifeval"], out=tmp_path)


def test_bfcl_scores_become_one_result_a_category_in_either_layout(tmp_path):
    put_bfcl(tmp_path, "multi_turn_base", 120, 200, group="multi_turn")
    put_bfcl(tmp_path, "simple", 380, 400)
    multi, simple = sorted(read_bfcl(tmp_path).found, key=lambda each: each.result["benchmark"])
    assert (multi.result["benchmark"], multi.result["run"]) == ("bfcl-v3/multi_turn_base", "Qwen_Qwen3-4B")
    assert (multi.result["accuracy"], multi.result["num_tasks"]) == (0.6, 200)
    assert multi.result["accuracy_low"] == pytest.approx(0.6 - 1.96 * (0.24 / 200) ** 0.5)
    assert simple.result["accuracy"] == 0.95


def test_ifeval_is_its_prompt_level_strict_accuracy_with_the_harnesss_own_error(tmp_path):
    put_lm_eval(tmp_path / "served", [True, False, True, True])
    [found] = read_lm_eval(tmp_path).found
    assert (found.result["benchmark"], found.result["metric"]) == ("ifeval", "prompt_level_strict_acc")
    assert (found.result["accuracy"], found.result["num_tasks"]) == (0.75, 4)
    assert found.result["accuracy_low"] == pytest.approx(0.75 - 0.196)
    assert found.result["figures"]["inst_level_strict_acc"] == 0.8
    assert [line["correct"] for line in found.problems] == [[1], [0], [1], [1]]


def put_gsm8k(root):
    """Two problems, each judged by two filters of answers, as lm-eval's gsm8k has them; in a group that adds nothing up."""
    figures = {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.5,
        "exact_match_stderr,strict-match": 0.2,
        "exact_match,flexible-extract": 1.0,
        "exact_match_stderr,flexible-extract": 0.0,
    }
    tree = {
        "results": {"math": {" ": " ", "alias": "math"}, "gsm8k": figures},
        "group_subtasks": {"math": ["gsm8k"], "gsm8k": []},
        "n-samples": {"gsm8k": {"original": 1319, "effective": 2}},
        "model_name": "served",
    }
    (root / f"results_{STAMP}.json").write_text(json.dumps(tree))
    samples = [
        {"doc_id": at, "doc": {"question": f"{at} + 1?"}, "target": "1", "filter": name, "exact_match": verdict}
        for name, verdicts in (("strict-match", (1.0, 0.0)), ("flexible-extract", (1.0, 1.0)))
        for at, verdict in enumerate(verdicts)
    ]
    (root / f"samples_gsm8k_{STAMP}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))


def test_all_right_and_all_wrong_are_no_certainty_whatever_error_the_harness_tells(tmp_path):
    """lm-eval's standard error of four right answers is 0, and so is a share's."""
    put_lm_eval(tmp_path / "out", [True] * 4)
    [found] = read_lm_eval(tmp_path / "out").found
    assert (found.result["accuracy_low"], found.result["accuracy_high"]) == (pytest.approx(0.025**0.25), 1.0)
    put_bfcl(tmp_path / "score", "simple", 0, 4)
    [found] = read_bfcl(tmp_path / "score").found
    assert (found.result["accuracy_low"], found.result["accuracy_high"]) == (0.0, pytest.approx(1 - 0.025**0.25))


def test_a_metric_of_two_filters_has_the_error_and_the_problems_of_the_one_that_is_told(tmp_path):
    put_gsm8k(tmp_path)
    [found] = read_lm_eval(tmp_path).found
    assert (found.result["metric"], found.result["accuracy"]) == ("exact_match,strict-match", 0.5)
    assert found.result["accuracy_high"] == pytest.approx(0.5 + 1.96 * 0.2)
    assert found.result["figures"] == {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1.0}
    assert [(line["question"], line["correct"]) for line in found.problems] == [("0 + 1?", [1]), ("1 + 1?", [0])]


def test_every_category_of_bfcl_is_its_models_however_deep_its_file_lies():
    for place in (
        FILES / "bfcl",
        FILES / "bfcl" / "score",
        FILES / "bfcl" / "score" / "tiny_a",
        FILES / "bfcl/score/tiny_a/agentic",
    ):
        found = {each.result["benchmark"]: each.result for each in read_bfcl(place).found}
        assert {each["run"] for each in found.values()} == {"tiny_a"}
        assert (found["bfcl-v4/memory_kv"]["accuracy"], found["bfcl-v4/memory_kv"]["num_tasks"]) == (0.5, 2)


def test_a_category_of_v3_is_another_benchmark_than_v4s_of_the_same_name(tmp_path):
    for version in ("v3", "v4"):
        put_bfcl(tmp_path / version, "multi_turn_base", 1, 4, version=version)
    found = read_bfcl(tmp_path).found
    assert [each.result["benchmark"] for each in found] == ["bfcl-v3/multi_turn_base", "bfcl-v4/multi_turn_base"]
    assert len({each.name for each in found}) == 2


def test_answers_that_bfcl_never_got_are_counted_and_named():
    harvest = read_bfcl(FILES / "bfcl")
    failed = {each.result["benchmark"]: each.result["num_requests_failed"] for each in harvest.found}
    assert failed == {
        "bfcl-v4/memory_kv": 0,
        "bfcl-v4/live_irrelevance": 0,
        "bfcl-v4/multi_turn_base": 1,
        "bfcl-v4/simple_python": 1,
    }
    assert len(harvest.notes) == 2
    assert any("simple_python_score.json: 1 of 4 got no answer from the server" in each for each in harvest.notes)


def test_two_score_files_of_one_model_and_category_are_refused_by_name(tmp_path):
    put_bfcl(tmp_path / "monday", "simple", 1, 2)
    put_bfcl(tmp_path / "friday", "simple", 2, 2)
    with pytest.raises(RunError, match=r"monday.*friday|friday.*monday"):
        read_bfcl(tmp_path)


def test_each_models_newest_figures_of_each_task_are_taken():
    harvest = read_lm_eval(FILES / "lm_eval")
    found = {(each.result["run"], each.result["benchmark"]): each.result for each in harvest.found}
    assert {key: (each["accuracy"], each["num_tasks"]) for key, each in found.items()} == {
        ("tiny__b", "rules"): (1.0, 4),
        ("tiny__a", "sums"): (0.5, 4),  # 0.25 in the older file
        ("tiny__a", "sums_hard"): (0.0, 2),  # of 9, by --limit
        ("tiny__a", "arithmetic"): (2 / 6, 6),  # a group that adds its tasks up
        ("tiny__a", "rules"): (0.5, 4),  # in the older file alone
    }


def test_the_problems_of_a_task_are_its_own_beside_one_whose_name_begins_alike():
    found = {(each.result["run"], each.result["benchmark"]): each for each in read_lm_eval(FILES / "lm_eval").found}
    sums = found["tiny__a", "sums"].problems
    assert [(each["question"], each["correct"]) for each in sums] == [
        ("1 + 1?", [1]),
        ("2 + 2?", [0]),  # by strict-match; flexible-extract has it right
        ("3 + 3?", [1]),
        ("4 + 4?", [0]),
    ]
    assert [each["question"] for each in found["tiny__a", "sums_hard"].problems] == ["17 + 25?", "38 + 46?"]
    assert found["tiny__a", "arithmetic"].problems == []


def test_a_task_whose_figures_are_no_shares_or_better_when_smaller_is_left_out_by_name(tmp_path):
    tree = {
        "results": {
            "prose": {"alias": "prose", "word_perplexity,none": 21.5},
            "guesses": {"alias": "guesses", "brier_score,none": 0.3},
            "sums": {"alias": "sums", "acc,none": 0.5},
        },
        "higher_is_better": {"guesses": {"brier_score": False}},
        "model_name": "served",
    }
    (tmp_path / f"results_{STAMP}.json").write_text(json.dumps(tree))
    harvest = read_lm_eval(tmp_path)
    assert [each.result["benchmark"] for each in harvest.found] == ["sums"]
    assert any("21.5 for 'prose', which is not between 0 and 1" in each for each in harvest.notes)
    assert any("'guesses' has no metric that is better when higher" in each for each in harvest.notes)
    del tree["results"]["sums"]
    (tmp_path / f"results_{STAMP}.json").write_text(json.dumps(tree))
    with pytest.raises(RunError, match=r"no result of lm-eval that can be used.*prose.*guesses"):
        read_lm_eval(tmp_path)


def test_folders_and_files_of_another_kind_say_what_to_give(tmp_path):
    with pytest.raises(RunError, match="Give the folder that `bfcl evaluate --score-dir` wrote"):
        read_bfcl(tmp_path)
    with pytest.raises(RunError, match="Give the folder that `lm_eval --output_path` wrote"):
        read_lm_eval(tmp_path)
    (tmp_path / "BFCL_v3_simple_score.json").write_text('{"id": "simple_0"}\n')
    with pytest.raises(RunError, match="no accuracy and total_count"):
        read_bfcl(tmp_path)
    (tmp_path / "results_x.json").write_text("[]")
    with pytest.raises(RunError, match="no table 'results'"):
        read_lm_eval(tmp_path)
