"""How often BM25 search finds what a question needs among its first results, and what a query costs.

    make bench-search DATA=data       (a directory with arpo/search_cache.json)

Two corpora, on neither of which anything was tuned. Generated: 14 000 passages, seven facts about each of 2000 towns whose
names share their words, and 2000 questions that ask in other words for one of them. ARPO's: the pages that a web search found
for its real queries, and those queries; one is found where any of its own pages is. `--generated` leaves ARPO's out.
Writes benchmarks/results/search_recall.{json,txt}. Times are of the processor, so that a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from search_corpora import facts, write_corpus

from strop.run_directory import write_json, write_text
from strop.tools.search import Passage
from strop.tools.search.bm25 import Bm25Config, Bm25Index, read_corpus

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "make bench-search DATA=data"
NUM_TOWNS, NUM_QUESTIONS = 2000, 2000
KS = (1, 5, 20)
BARS = {"generated": 0.99, "arpo": 0.96}  # recall@5

Asked = tuple[str, Callable[[Passage], bool]]
"""A query, and whether a passage is what it needs."""


def generated(place: Path) -> tuple[Path, list[Asked]]:
    rows = list(facts(NUM_TOWNS))
    path = write_corpus(place / "towns.jsonl", rows)
    return path, [(question, _has_id(id)) for id, _, question in rows[::5][:NUM_QUESTIONS]]  # 5 and 7: every kind of fact


def _has_id(id: str) -> Callable[[Passage], bool]:
    return lambda passage: passage.id == id


def arpo(path: Path) -> tuple[Path, list[Asked]]:
    """Of the queries that a web search found anything for."""
    have = {passage.id.rpartition("#")[0] for passage in read_corpus(path)}
    queries = [query for query in json.loads(path.read_text(encoding="utf-8")) if query in have]
    return path, [(query.removeprefix("search query: "), _is_page_of(query)) for query in queries]


def _is_page_of(query: str) -> Callable[[Passage], bool]:
    return lambda passage: passage.id.rpartition("#")[0] == query


def measure(corpus: Path, asked: Sequence[Asked], index: Path) -> dict[str, Any]:
    """Recall at each k, and the processor's time a query."""
    opened = Bm25Index(Bm25Config(kind="bm25", path=str(corpus), index=str(index)))
    found_at: dict[int, int] = dict.fromkeys(KS, 0)
    times: list[float] = []
    for query, is_right in asked:
        started = time.process_time()
        passages = opened.search(query, max(KS))
        times.append(time.process_time() - started)
        for k in KS:
            found_at[k] += any(map(is_right, passages[:k]))
    times.sort()
    return {
        "num_passages": len(opened.passages),
        "num_questions": len(asked),
        "recall_at": {str(k): {"found": num, "recall": round(num / len(asked), 4)} for k, num in found_at.items()},
        "query_ms": {"median": round(1000 * times[len(times) // 2], 2), "p95": round(1000 * times[len(times) * 95 // 100], 2)},
    }


def table(results: dict[str, Any]) -> str:
    lines = [results["command"], ""]
    for name, each in results["corpora"].items():
        lines.append(f"{name}: {each['num_questions']:,} questions over {each['num_passages']:,} passages")
        for k, of_k in each["recall_at"].items():
            lines.append(f"  recall@{k:<3} {of_k['recall']:.4f}  {of_k['found']:,} found")
        ms = each["query_ms"]
        lines.append(f"  a query: {ms['median']:.2f} ms (median), {ms['p95']:.2f} ms (95th percentile) of the processor")
    for name, bar in results["bars"].items():
        lines.append(f"{name}: {bar['value']}, must be {bar['bar']}: {'holds' if bar['holds'] else 'DOES NOT HOLD'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="directory with arpo/search_cache.json")
    parser.add_argument("--generated", action="store_true", help="the generated corpus alone, which needs no data")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    cache = arguments.data / "arpo" / "search_cache.json"
    if not arguments.generated and not cache.exists():
        print(f"error: {cache} is not there. Give --data its directory, or --generated to go without.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        corpora = {"generated": generated(place)} | ({} if arguments.generated else {"arpo": arpo(cache)})
        measured = {name: measure(corpus, asked, place / "index") for name, (corpus, asked) in corpora.items()}
    bars = {}
    for name, each in measured.items():
        recall = each["recall_at"]["5"]["recall"]
        bars[f"{name}, recall at 5"] = {"value": recall, "bar": f">= {BARS[name]}", "holds": recall >= BARS[name]}
    results = {"command": COMMAND, "bars": bars, "corpora": measured}
    write_json(arguments.results / "search_recall.json", results)
    text = table(results)
    write_text(arguments.results / "search_recall.txt", text + "\n")
    print(text)
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
