"""The stage that serves a policy to another program: real models, engines, programs and HTTP."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from killing import started
from rich.console import Console

from scripted_runs import RECIPE, Watching, recipe_of, run_recipe
from strop.engine.opening import open_engines
from strop.errors import ConfigError, EngineLost, NotThere, RunError
from strop.pipeline.plan import plan
from strop.pipeline.run import train
from strop.reports.console import ConsoleProgress
from strop.run_directory import RunDirectory, read_json
from strop.sandbox.scripted import ScriptedSandbox

EXAMPLES = Path(__file__).parents[2] / "examples"
ASK = f"{sys.executable} {EXAMPLES / 'sums_harness.py'} $base_url $out/sums.json"
RIGHT = {"accuracy": {"file": "sums.json", "at": ["results", "right"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    recipe = recipe_of({"base": RECIPE["stages"]["base"]})
    return run_recipe(tmp_path_factory.mktemp("model") / "run", recipe).run.stage("base").model


def stage(command=ASK, *, init="base", benchmark="sums", metrics=RIGHT, **keys):
    commands = [command] if isinstance(command, str) else command
    return {"kind": "harness", "init": init, "benchmark": benchmark, "commands": commands, "metrics": metrics, **keys}


def recipe(model, **stages):
    return recipe_of({"base": {"kind": "model", "path": str(model)}, **stages}, name="harness")


def run(directory, recipe, *, opening=open_engines, **words):
    progress = Watching()
    result = asyncio.run(
        train(recipe, directory, progress=progress, runner=ScriptedSandbox(answer=lambda _: ""), open_engines=opening, **words)
    )
    return result.run, progress


def python(code):
    return f'{sys.executable} -c "{code}" $out'


WRITE = "import json, sys, time; out = sys.argv[1]; open(out + '/runs', 'a').write('x'); "


def test_figures_come_from_the_file_and_a_finished_stage_does_not_run_again(model, tmp_path):
    counting = python(WRITE + "pass")
    harness = recipe(model, sums=stage([ASK, counting]))
    found, progress = run(tmp_path / "run", harness)
    result = read_json(found.stage("sums").evaluation)
    written = json.loads((found.stage("sums").path / "out" / "sums.json").read_text())["results"]
    assert (result["accuracy"], written["num"]) == (written["right"], 16)
    assert (result["num_requests"], result["num_refused"]) == (16, 0)
    assert (result["benchmark"], result["init"], result["harness"]) == ("sums", "base", Path(sys.executable).name)
    assert not progress.warnings

    _, again = run(tmp_path / "run", harness)
    assert (found.stage("sums").path / "out" / "runs").read_text() == "x"
    assert "(done before)" in dict(again.stages)["sums"]


def test_a_failed_command_names_its_exit_code_and_its_last_words_and_runs_again(model, tmp_path):
    failing = python(WRITE + "runs = open(out + '/runs').read(); print('no judge'); sys.exit(3 if runs == 'x' else 0)")
    harness = recipe(model, sums=stage([failing, ASK]))
    with pytest.raises(RunError, match=r"(?s)stages\.sums\.commands: .*ended with exit code 3.*no judge.*run strop again"):
        run(tmp_path / "run", harness)
    found, _ = run(tmp_path / "run", harness)
    assert (found.stage("sums").path / "out" / "runs").read_text() == "xx"
    assert found.stage("sums").done.exists()


def test_a_missing_program_is_found_before_anything_runs(model, tmp_path):
    harness = recipe(model, sums=stage("no-such-harness --model $model"))
    with pytest.raises(NotThere, match=r"stages\.sums\.commands: no-such-harness is not on the PATH.*Install it"):
        run(tmp_path / "run", harness)
    assert not (tmp_path / "run").exists()
    [_, planned] = plan(harness)
    assert planned.arithmetic == "sums by no-such-harness"
    assert "no-such-harness is not on the PATH" in planned.schedule[0]
    with pytest.raises(NotThere, match=r"stages\.sums\.cwd: /nowhere is no directory"):
        run(tmp_path / "run", recipe(model, sums=stage(cwd="/nowhere")))


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (
            {"file": "*.csv", "at": ["x"]},
            r"stages\.sums\.metrics\.accuracy\.file: there is no \*\.csv .* It has runs, sums\.json",
        ),
        (
            {"file": "sums.json", "at": ["results", "acc"]},
            r"metrics\.accuracy\.at: .*sums\.json has no 'acc' .* It has right, num",
        ),
        ({"file": "sums.json", "at": ["results"]}, r"metrics\.accuracy: results of .*sums\.json is .*, not a number"),
        ({"file": "sums.json", "at": ["results", "num"]}, r"metrics\.accuracy is 16, but a share is between 0 and 1"),
    ],
)
def test_a_figure_that_is_not_there_says_what_is_and_is_mended_without_another_run(model, tmp_path, figure, said):
    counting = [ASK, python(WRITE + "pass")]
    with pytest.raises(RunError, match=said):
        run(tmp_path / "run", recipe(model, sums=stage(counting, metrics={"accuracy": figure})))
    found, _ = run(tmp_path / "run", recipe(model, sums=stage(counting)))
    assert "accuracy" in read_json(found.stage("sums").evaluation)
    assert (found.stage("sums").path / "out" / "runs").read_text() == "x"


def test_figures_of_jsonl_and_csv_files_and_their_intervals(model, tmp_path):
    """As BFCL writes them: the first line of a score file, a share in percent of a table."""
    wrote = python(
        WRITE + "open(out + '/BFCL_v3_live_score.json', 'w').write(json.dumps(dict(accuracy=0.25)) + '\\n{}\\n');"
        "open(out + '/data_overall.csv', 'w').write('Rank,Overall Acc\\n1,62.50%\\n')"
    )
    metrics = {
        "live": {"file": "BFCL_*_live_score.json", "at": ["accuracy"]},
        "accuracy": {"file": "data_overall.csv", "at": ["Overall Acc"]},
        "accuracy_stderr": {"file": "BFCL_*_live_score.json", "at": ["accuracy"]},
    }
    found, _ = run(tmp_path / "run", recipe(model, bfcl=stage(wrote, metrics=metrics)))
    result = read_json(found.stage("bfcl").evaluation)
    assert (result["live"], result["accuracy"]) == (0.25, 0.625)
    assert (result["accuracy_low"], result["accuracy_high"]) == (pytest.approx(0.625 - 1.96 * 0.25), 1.0)


def test_commands_and_variables_name_the_address_the_model_and_the_results(model, tmp_path):
    shown = python(
        WRITE + "import os; json.dump(dict(os.environ, argv=sys.argv, cwd=os.getcwd()), open(out + '/env.json', 'w'))"
    )
    keys = {"environment": {"HARNESS_PORT": "$port", "PRICE": "5 $$"}, "cwd": str(tmp_path)}
    found, _ = run(tmp_path / "run", recipe(model, sums=stage([f"{shown} $model $base_url", ASK], **keys)))
    seen = read_json(found.stage("sums").path / "out" / "env.json")
    out, served, base_url = seen["argv"][1:]
    assert (Path(out), Path(served)) == (found.stage("sums").path / "out", Path(model))
    assert base_url == f"http://127.0.0.1:{seen['HARNESS_PORT']}/v1"
    assert (seen["PRICE"], seen["cwd"]) == ("5 $", str(tmp_path))
    with pytest.raises(ConfigError, match=r"stages\.sums\.commands: '\$bas_url' names what is not one of \$base_url, \$port"):
        recipe(model, sums=stage("ask $bas_url"))
    with pytest.raises(ConfigError, match=r"stages\.sums\.commands: No closing quotation"):
        recipe(model, sums=stage("ask 'this"))
    with pytest.raises(ConfigError, match=r"stages\.sums\.environment: '\$foo' names what"):
        recipe(model, sums=stage("ask") | {"environment": {"A": "$foo"}})


def test_refused_requests_are_counted_and_warned_of(model, tmp_path):
    long = (
        "import urllib.request, urllib.error, json, sys; r = urllib.request.Request(sys.argv[2] + '/completions',"
        " json.dumps(dict(prompt='1', max_tokens=5000)).encode()); "
        "exec('try: urllib.request.urlopen(r)\\nexcept urllib.error.HTTPError: pass')"
    )
    found, progress = run(tmp_path / "run", recipe(model, sums=stage([f"{python(long)} $base_url", ASK])))
    result = read_json(found.stage("sums").evaluation)
    assert (result["num_requests"], result["num_refused"]) == (17, 1)
    assert any("1 of 17 requests were refused" in each and "raise engine.max_length" in each for each in progress.warnings)


def test_a_lost_engine_ends_the_stage_and_its_command(model, tmp_path):
    async def opening(*words, **keys):
        engines = await open_engines(*words, **keys)

        async def complete(request):
            raise EngineLost("the engine is gone")

        engines[0].complete = complete
        return engines

    patient = f"sh -c '{ASK}; sleep 600'"
    with pytest.raises(EngineLost, match="the engine is gone"):
        run(tmp_path / "run", recipe(model, sums=stage(patient)), opening=opening)


def test_an_interrupted_run_ends_the_program_and_all_that_it_started(model, tmp_path):
    """And the next one runs the commands again."""
    code = (
        WRITE + "import subprocess; open(out + '/pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    )
    file = tmp_path / "harness.toml"
    lines = ["name = 'harness'", "[engine]", "max_length = 256", "[stages.base]", "kind = 'model'", f"path = '{model}'"]
    lines += ["[stages.sums]", "kind = 'harness'", "init = 'base'", "benchmark = 'sums'", f"commands = ['''{python(code)}''']"]
    lines += ["[stages.sums.metrics.accuracy]", "file = 'sums.json'", "at = ['results', 'right']"]
    file.write_text("\n".join(lines))
    where = RunDirectory(tmp_path / "run")
    pid_file = where.stage("sums").path / "out" / "pid"
    for number, sent in enumerate([signal.SIGINT, signal.SIGKILL], start=1):
        with started(where, file) as process:
            deadline = time.monotonic() + 200
            while not (pid_file.exists() and pid_file.read_text()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            pid = int(pid_file.read_text())
            pid_file.unlink()
            assert psutil.pid_exists(pid)
            os.kill(process.pid, sent)
            process.wait(timeout=100)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
        assert not psutil.pid_exists(pid)
        assert (pid_file.with_name("runs")).read_text() == "x" * number


def test_before_and_after_are_rows_of_one_table_in_terminal_and_report(model, tmp_path):
    writing = [python(WRITE + f"json.dump(dict(a={share}), open(out + '/a.json', 'w'))") for share in (0.25, 0.5, 0.125, 0.75)]
    share = {"accuracy": {"file": "a.json", "at": ["a"]}}
    table = {"kind": "model", "path": str(model)}
    tree = recipe(
        model,
        rl=table,
        sums_before=stage(writing[0], metrics=share),
        chat_before=stage(writing[1], metrics=share, benchmark="chat"),
        sums_after=stage(writing[2], metrics=share, init="rl"),
    )
    console = Console(record=True, width=100)
    asyncio.run(train(tree, tmp_path / "run", progress=ConsoleProgress(console), runner=ScriptedSandbox(answer=lambda _: "")))
    words = [line.split() for line in console.export_text().splitlines()]
    assert ["model", "sums", "chat"] in words
    assert ["base", "25.0%", "50.0%"] in words
    assert ["rl", "12.5%", "–"] in words
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<th>model</th><th>sums</th><th>chat</th>" in page
    assert "<th>rl</th><td>12.5%</td><td>–</td>" in page
