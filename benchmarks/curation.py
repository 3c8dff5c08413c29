"""Curates 100 000 generated problems: how long it takes, how much memory, and whether what was planted is found.

    python benchmarks/curation.py            writes benchmarks/results/curation.{json,txt}

The limits are 10 minutes and 2 GiB on 2 cores, without the rules that need a model. The problems are sentences that recur with
other names and numbers; among them are planted: exact copies, near copies (a word changed), problems of a benchmark (some with
other first and last words), of which some are short, and answers that a rule is there for.
A smaller arm has problems of one sentence, with as many answers, ten and one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path

from strop.curation.config import load_curation
from strop.curation.rules import NearDuplicates
from strop.curation.run import run_curation
from strop.types import Task

NUM_BENCHMARK = 5000
NUM_SHORT = 2000  # further benchmark problems, of one sentence
NUM_OF_EACH = 500  # planted
COMMAND = "make bench-curation"
LIMIT_S, LIMIT_MIB = 600.0, 2048.0
NUM_TEMPLATED = 5000
RESULTS = Path(__file__).parent / "results"

NAMES = ["Ada", "Bela", "Chidi", "Dora", "Emeka", "Freya", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mira", "Nils"]
THINGS = ["apples", "kites", "marbles", "tickets", "pencils", "stamps", "lanterns", "bricks", "melons", "ribbons", "coins"]
PLACES = ["the market", "a small shop", "her garden", "the harbour", "school", "the town hall", "a farm", "the museum"]
OPENINGS = ["On a cold morning", "Last year", "In the week before the fair", "After lunch", "Each spring", "One day"]
VERBS = ["buys", "finds", "paints", "counts", "sells", "borrows", "wraps", "weighs", "collects", "repairs", "hides"]
ASIDES = [
    "which nobody expected",
    "as the rules of the club demand",
    "though it rains",
    "without telling {b}",
    "for the school play",
]
QUESTIONS = [
    "How many {thing} does {a} have in the end?",
    "How many {thing} are left in total when the week is over?",
    "What is the smallest number of {thing} that {b} could have started with?",
    "Let $x$ be the number of {thing}. Find the remainder when $x^{n}$ is divided by ${m}$.",
]

TEMPLATE = (
    "A train leaves the station at noon and travels at {a} km per hour until it reaches a town that is {b} km away. How many"
    " minutes does it take?"
)

FILE = """
name = "generated"

[[sources]]
kind = "jsonl"
dataset = "strop"
path = "problems.jsonl"

[[rules]]
kind = "integer_answer"
[[rules]]
kind = "verifiable_answer"
[[rules]]
kind = "simple_answer"
[[rules]]
kind = "small_numbers"
[[rules]]
kind = "decontamination"
against = [{ kind = "jsonl", dataset = "strop", path = "benchmark.jsonl" }]
[[rules]]
kind = "exact_duplicates"
[[rules]]
kind = "near_duplicates"
"""


def question(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.randint(2, 5)):
        number, more = draw.randint(2, 999), draw.randint(2, 99)
        parts.append(
            f"{draw.choice(OPENINGS)}, {draw.choice(NAMES)} {draw.choice(VERBS)} {number} {draw.choice(THINGS)} at"
            f" {draw.choice(PLACES)}, {draw.choice(ASIDES)}, and {draw.choice(VERBS)} {more} more."
        )
    text = " ".join([*parts, draw.choice(QUESTIONS)])
    first, second = draw.sample(NAMES, 2)
    for place, word in (
        ("a", first),
        ("b", second),
        ("thing", draw.choice(THINGS)),
        ("m", draw.randint(3, 997)),
        ("n", draw.randint(2, 50)),
    ):
        text = text.replace(f"{{{place}}}", str(word))
    return text


def rows(num: int, *, seed: int, source: str) -> list[dict[str, object]]:
    draw = random.Random(seed)
    return [
        {
            "id": f"{source}/{number}",
            "question": question(draw),
            "answer": str(draw.randint(0, 9999)),
            "source": source,
            "facts": {},
        }
        for number in range(num)
    ]


def short_rows(num: int, *, seed: int) -> list[dict[str, object]]:
    """One question of 15 words each, of names that are made up: as those of HotpotQA are."""
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choice(["ba", "ke", "li", "mor", "nu", "ra", "sten", "to", "vi"]) for _ in range(3)).title()

    return [
        {
            "id": f"short/{number}",
            "question": f"In which year did {name()} {name()} of {name()} meet the {draw.choice(VERBS)[:-1]}er {name()} at"
            f" {draw.choice(PLACES)}?",
            "answer": str(draw.randint(1800, 2020)),
            "source": "short",
            "facts": {},
        }
        for number in range(num)
    ]


def planted(
    problems: list[dict[str, object]], benchmark: list[dict[str, object]], draw: random.Random
) -> dict[str, list[dict[str, object]]]:
    """By the rule that must find them."""

    def copies(of: list[dict[str, object]], rule: str) -> list[dict[str, object]]:
        chosen = draw.sample(of, NUM_OF_EACH)
        return [{**row, "id": f"{rule}/{number}", "source": rule} for number, row in enumerate(chosen)]

    near = copies(problems, "near_duplicates")
    for row in near:
        said = str(row["question"]).split()
        said[draw.randrange(len(said))] = "indeed"
        row["question"] = " ".join(said)
    contaminated = copies(benchmark, "decontamination")
    for row in contaminated[: NUM_OF_EACH * 2 // 5]:
        said = str(row["question"]).split()
        k = 4 if len(said) >= 24 else 2
        row["question"] = " ".join(
            [*["Once", "upon", "a", "time,"][:k], *said[k:-k], *["Tell", "us,", "please,", "quickly."][:k]]
        )
    huge = copies(problems, "small_numbers")
    no_integer = copies(problems, "integer_answer")
    for row in huge:
        row.update(answer="7" * 40, question=question(draw))
    for row in no_integer:
        row.update(answer=draw.choice(["\\frac{1}{2}", "yes", "x+1", "the larger one"]), question=question(draw))
    return {
        "integer_answer": no_integer,
        "small_numbers": huge,
        "decontamination": contaminated,
        "exact_duplicates": copies(problems, "exact_duplicates"),
        "near_duplicates": near,
    }


def templated(num_answers: int) -> dict[str, float]:
    """What near-duplicates cost among problems of one sentence, and how many of the planted ones are found."""
    draw = random.Random(4)
    tasks = [
        Task(
            id=f"templated/{number}",
            question=TEMPLATE.format(a=draw.randint(10, 9999), b=draw.randint(100, 99_999)),
            answer=str(number % num_answers),
            source="templated",
        )
        for number in range(NUM_TEMPLATED)
    ]
    chosen = draw.sample(tasks, NUM_OF_EACH)
    copies = [
        Task(id=f"copy/{n}", question=f"{of.question} Explain.", answer=of.answer, source="copy") for n, of in enumerate(chosen)
    ]
    all_of_them = [*tasks, *copies]
    rule, unbounded = NearDuplicates(), NearDuplicates(max_compared=len(all_of_them))
    started = time.process_time()
    dropped = [rule.judge(task) is not None for task in all_of_them]
    used_s = time.process_time() - started
    expected = [unbounded.judge(task) is not None for task in all_of_them]
    return {
        "num_answers": num_answers,
        "planted": len(copies),
        "found": sum(dropped[len(tasks) :]),
        "others": sum(dropped[: len(tasks)]),
        "decided_otherwise_without_a_bound": sum(one != other for one, other in zip(dropped, expected, strict=True)),
        "compared_per_problem": round(rule.num_compared / len(dropped), 2),
        "cpu_s": round(used_s, 2),
    }


class Memory(threading.Thread):
    """The largest sum of the proportional set sizes of this process and its children, seen every half second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak_mib = max(self.peak_mib, sum(map(pss_mib, family(os.getpid()))))


def family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                found += family(int(child))
        except OSError:
            continue
    return found


def pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        benchmark = [*rows(NUM_BENCHMARK, seed=1, source="benchmark"), *short_rows(NUM_SHORT, seed=3)]
        base = rows(arguments.num - 5 * NUM_OF_EACH, seed=2, source="base")
        extra = planted(base, benchmark, draw)
        later = [row for found in extra.values() for row in found]
        draw.shuffle(later)
        write(place / "benchmark.jsonl", benchmark)
        write(place / "problems.jsonl", [*base, *later])  # copies come after what they are copies of
        (place / "file.toml").write_text(FILE)
        num_bytes = (place / "problems.jsonl").stat().st_size
        memory = Memory()
        memory.start()
        started, started_cpu = time.perf_counter(), cpu_s()
        summary = run_curation(load_curation(place / "file.toml"), place / "out", jobs=arguments.jobs)
        elapsed, used_cpu = time.perf_counter() - started, cpu_s() - started_cpu
        memory.done.set()
        found = verdicts(place / "out" / "dropped.jsonl")
    report(
        arguments.results,
        arguments,
        summary,
        extra,
        found,
        [templated(NUM_TEMPLATED), templated(10), templated(1)],
        elapsed=elapsed,
        cpu=used_cpu,
        peak_mib=memory.peak_mib,
        num_bytes=num_bytes,
    )


def write(path: Path, of: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in of))


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def verdicts(path: Path) -> dict[str, str]:
    with path.open() as file:
        return {row["id"]: row["rule"] for row in map(json.loads, file)}


def report(
    directory: Path,
    arguments: argparse.Namespace,
    summary: dict[str, object],
    extra: dict[str, list[dict[str, object]]],
    found: dict[str, str],
    arms: list[dict[str, float]],
    *,
    elapsed: float,
    cpu: float,
    peak_mib: float,
    num_bytes: int,
) -> None:
    rules = {
        rule: {
            "planted": len(rows),
            "found": sum(found.get(str(row["id"])) == rule for row in rows),
            "others": sum(other == rule for name, other in found.items() if not name.startswith(f"{rule}/")),
        }
        for rule, rows in extra.items()
    }
    missed = sum(each["planted"] - each["found"] for each in rules.values())
    others = sum(each["others"] for each in rules.values())
    own = arms[0]  # where each has its own answer; with few, what a copy is of may itself be dropped as too much like another
    unseen, compared = own["planted"] - own["found"], own["compared_per_problem"]
    otherwise = sum(arm["decided_otherwise_without_a_bound"] for arm in arms)
    bars: dict[str, dict[str, object]] = {
        "time_s": {"value": round(elapsed, 1), "bar": f"<= {LIMIT_S:.0f}", "holds": elapsed <= LIMIT_S},
        "peak_mib": {"value": round(peak_mib), "bar": f"<= {LIMIT_MIB:.0f}", "holds": peak_mib <= LIMIT_MIB},
        "planted_and_not_found": {"value": missed, "bar": "== 0", "holds": missed == 0},
        "others_dropped": {"value": others, "bar": "== 0", "holds": others == 0},
        "templated_and_not_found": {"value": unseen, "bar": "== 0", "holds": unseen == 0},
        "templated_decided_otherwise": {"value": otherwise, "bar": "== 0", "holds": otherwise == 0},
        "templated_compared_per_problem": {"value": compared, "bar": "<= 1", "holds": compared <= 1},
    }
    result = {
        "command": COMMAND,
        "bars": bars,
        "num_problems": arguments.num,
        "megabytes": round(num_bytes / 1e6, 1),
        "jobs": arguments.jobs,
        "num_cpus": os.cpu_count(),
        "elapsed_s": round(elapsed, 1),
        "cpu_s": round(cpu, 1),
        "problems_per_s": round(arguments.num / elapsed),
        "peak_mib": round(peak_mib),
        "num_kept": summary["num_kept"],
        "rules": rules,
        "templated": arms,
    }
    lines = [
        f"{arguments.num:,} problems ({result['megabytes']} MB), {arguments.jobs} processes on {os.cpu_count()} cores",
        f"time    {elapsed:8.1f} s   of {LIMIT_S:.0f} s allowed ({cpu:.1f} s of processor time)",
        f"memory  {peak_mib:8.0f} MiB of {LIMIT_MIB:.0f} MiB allowed (peak of all processes together)",
        f"{'rule':<18} {'planted':>8} {'found':>8} {'others dropped':>15}",
        *(f"{rule:<18} {each['planted']:>8} {each['found']:>8} {each['others']:>15}" for rule, each in rules.items()),
        *(
            f"templated, {NUM_TEMPLATED:,} problems, {arm['num_answers']:,} answers: {arm['found']} of {arm['planted']} near"
            f" copies found, {arm['compared_per_problem']:,} comparisons a problem, {arm['cpu_s']} s"
            for arm in arms
        ),
    ]
    lines += [
        f"{name}: {bar['value']}, must be {bar['bar']}: {'holds' if bar['holds'] else 'DOES NOT HOLD'}"
        for name, bar in bars.items()
    ]
    print("\n".join(lines))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "curation.json").write_text(json.dumps(result, indent=2) + "\n")
    (directory / "curation.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
