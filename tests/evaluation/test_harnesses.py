"""Other harnesses: on files written here in the schema that their publishers document."""

import json
from pathlib import Path

import pytest

from strop.errors import ConfigError, RunError
from strop.evaluation.compare import compare
from strop.evaluation.harnesses import bfcl_commands, lm_eval_command, read_bfcl, read_lm_eval
from strop.evaluation.results import read_eval, write_eval

ADDRESS = "http://127.0.0.1:8000"
STAMP = "2025-11-22T01-00-00.000000"


def put_bfcl(root, category, right, total, *, group=""):
    path = root / "Qwen_Qwen3-4B" / group / f"BFCL_v3_{category}_score.json"
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


def test_bfcl_is_told_of_the_server_and_writes_where_it_is_read(tmp_path):
    generate, judge = bfcl_commands(
        ADDRESS, model="Qwen/Qwen3-4B", tokenizer=Path("m"), categories=["multi_turn", "live"], out=tmp_path
    )
    assert generate.words[:2] == ("bfcl", "generate")
    assert "--skip-server-setup" in generate.words
    assert generate.words[generate.words.index("--test-category") + 1] == "multi_turn,live"
    assert (generate.environment["LOCAL_SERVER_ENDPOINT"], generate.environment["LOCAL_SERVER_PORT"]) == ("127.0.0.1", "8000")
    assert judge.words[-2:] == ("--score-dir", str(tmp_path / "score"))


def test_lm_eval_is_told_of_the_server_and_keeps_its_samples(tmp_path):
    words = lm_eval_command(ADDRESS, model="served", tasks=["ifeval"], out=tmp_path).words
    assert f"model=served,base_url={ADDRESS}/v1/chat/completions" in words[words.index("--model_args") + 1]
    assert {"--log_samples", "--apply_chat_template"} <= set(words)


def test_addresses_and_names_that_a_harness_would_misread_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Write http://host:port, without a path"):
        bfcl_commands("127.0.0.1:8000", model="m", tokenizer=Path("m"), categories=["live"], out=tmp_path)
    with pytest.raises(ConfigError, match="separates names by commas"):
        lm_eval_command(ADDRESS, model="a,b", tasks=["ifeval"], out=tmp_path)


def test_bfcl_scores_become_one_result_a_category_in_either_layout(tmp_path):
    put_bfcl(tmp_path, "multi_turn_base", 120, 200, group="multi_turn")
    put_bfcl(tmp_path, "simple", 380, 400)
    multi, simple = sorted(read_bfcl(tmp_path), key=lambda each: each.result["benchmark"])
    assert (multi.result["benchmark"], multi.result["run"]) == ("bfcl/multi_turn_base", "Qwen_Qwen3-4B")
    assert (multi.result["accuracy"], multi.result["num_tasks"]) == (0.6, 200)
    assert multi.result["accuracy_low"] == pytest.approx(0.6 - 1.96 * (0.24 / 200) ** 0.5)
    assert simple.result["accuracy"] == 0.95


def test_ifeval_is_its_prompt_level_strict_accuracy_with_the_harnesss_own_error(tmp_path):
    put_lm_eval(tmp_path / "served", [True, False, True, True])
    [found] = read_lm_eval(tmp_path)
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


def test_a_metric_of_two_filters_has_the_error_and_the_problems_of_the_one_that_is_told(tmp_path):
    put_gsm8k(tmp_path)
    [found] = read_lm_eval(tmp_path)
    assert (found.result["metric"], found.result["accuracy"]) == ("exact_match,strict-match", 0.5)
    assert found.result["accuracy_high"] == pytest.approx(0.5 + 1.96 * 0.2)
    assert found.result["figures"] == {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1.0}
    assert [(line["question"], line["correct"]) for line in found.problems] == [("0 + 1?", [1]), ("1 + 1?", [0])]


def test_two_models_that_lm_eval_judged_are_compared_in_pairs(tmp_path):
    places = []
    for name, verdicts in (("a", [False, False, True]), ("b", [True, True, True])):
        put_lm_eval(tmp_path / name, verdicts, model=name)
        [found] = read_lm_eval(tmp_path / name)
        write_eval(tmp_path / "ours" / name / "eval", found.result, found.problems)
        places.append(read_eval(tmp_path / "ours" / name))
    assert compare(*places).metrics[0].paired.num_better == 2


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
