"""Makes the six data files of recipes/presets/r1-pipeline.toml by the commands of docs/guides/r1-data.md, word for word.

    make experiments-r1-data DATA=path/with/gsm8k

Each file is then read as the stage reads it that learns from it. Texts of a model of 135 M parameters are of no use; what is
shown is that each command runs and each file loads. Counts go to results/r1-data.json; the files stay below --run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import code_of, processor

from strop.recipe.load import load_recipe
from strop.run_directory import read_lines, write_json, write_text
from strop.tasks import load_rows
from strop.tasks.rows import JsonlRows
from strop.training.preferences import read_preferences

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "r1-data.md"
PRESET = ROOT / "recipes" / "presets" / "r1-pipeline.toml"
RESULTS = ROOT / "experiments" / "results"
FENCE = re.compile(r"^```(toml|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEAST = 50  # rows of each file


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="holds gsm8k/train.jsonl")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "r1-data", help="where the files are made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where counts are written")
    options = parser.parse_args(arguments)
    if not (options.data / "gsm8k" / "train.jsonl").exists():
        print(f"error: no {options.data}/gsm8k/train.jsonl. Give --data (make: DATA=) its directory.", file=sys.stderr)
        return 2
    (options.run / "data").mkdir(parents=True, exist_ok=True)
    gsm8k = options.run / "data" / "gsm8k"
    if not gsm8k.exists():
        gsm8k.symlink_to((options.data / "gsm8k").resolve())
    commands = [made for kind, text in FENCE.findall(PAGE.read_text(encoding="utf-8")) for made in _do(kind, text, options.run)]
    files = counts(options.run)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "name": processor()}
    made_of = {"command": "make experiments-r1-data DATA=path/with/gsm8k", "model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    found = {**made_of, "files": files, "commands": commands, "processor": machine, "code": code_of(ROOT)}
    write_json(options.results / "r1-data.json", found)
    for name, count in files.items():
        print(f"{name:<16} {count}")
    return 0 if all(each["rows"] >= LEAST for each in files.values()) else 1


def _do(kind: str, text: str, run: Path) -> list[dict[str, Any]]:
    """Write a block of TOML to the file that its first line names, or run a block of commands and return what they said."""
    if kind == "toml":
        name = text.partition("\n")[0].removeprefix("# ")
        write_text(run / name, text)
        return []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = []
    for command in re.split(r"(?<!\\)\n", text.strip()):
        start = time.monotonic()
        ended = subprocess.run(
            ["bash", "-c", command], cwd=run, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        if ended.returncode:
            raise SystemExit(f"{command}\n{ended.stdout}{ended.stderr}")
        said = ended.stdout.strip().splitlines()
        done.append({"command": command, "seconds": round(time.monotonic() - start, 1), "said": said})
        print(command.partition(" --")[0], *said[-1:], sep="\n  ", flush=True)
    return done


def counts(run: Path) -> dict[str, dict[str, Any]]:
    """Rows of each file, as the stage reads them that learns from it."""
    stages = load_recipe(PRESET).stages
    tasks = {
        "r1-cold-start": stages["cold_start"].config.tasks,
        "r1-reasoning": stages["rejection"].config.tasks,
        "r1-general-sft": stages["general"].config.tasks,
        "r1-general": stages["rl2"].config.schedule[0].tasks,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, source in tasks.items():
        keys = source.config.model_dump() | {"path": run / "data" / f"{name}.jsonl"}
        rows = load_rows(JsonlRows(**keys), split="train")
        found[name] = {"rows": len(rows)}
        if name == "r1-general":
            found[name]["kinds"] = dict(Counter(task.facts.get("kind", "reasoning") for task in rows))
        if name == "r1-cold-start":
            found[name]["right"] = sum(f"<answer> {task.answer} </answer>" in task.facts["response"] for task in rows)
    for name in ("r1-preferences", "r1-safety"):
        path = run / "data" / f"{name}.jsonl"
        found[name] = {"rows": len(read_preferences(path))}
    found["r1-safety"]["labels"] = dict(Counter(row["label"] for row in read_lines(run / "data" / "r1-safety.jsonl")))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
