"""The commands `strop search ...`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from strop.tools.search.bm25 import Bm25Index

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Search your own corpus as the search tool does, and measure the recall.

- `strop search ask corpus.jsonl "height of Mont Blanc"` shows the text that a policy would read.
- `strop search recall corpus.jsonl questions.jsonl` prints recall@k.
""",
)

Corpus = Annotated[Path, typer.Argument(help="A .jsonl with a `text` on each line, a directory of texts, or cached results.")]
Language = Annotated[str, typer.Option(help="Language of the Snowball stemmer; none does not stem.")]
IndexPlace = Annotated[Path | None, typer.Option(help="Directory of the built index; by default your cache directory.")]


@app.command()
def ask(
    corpus: Corpus,
    query: Annotated[str, typer.Argument(help="What to search for.")],
    k: Annotated[int, typer.Option(min=1, help="How many passages.")] = 5,
    language: Language = "english",
    index: IndexPlace = None,
) -> None:
    """Show the best passages for a query."""
    from strop.reports.terminal import printable
    from strop.tools.search import as_pages

    opened = _open(corpus, language, index)
    started_at = time.perf_counter()
    found = opened.search(query, k)
    elapsed_s = time.perf_counter() - started_at
    typer.echo(printable(as_pages(found)) or "nothing found")
    typer.echo(f"{len(found)} of {len(opened.passages):,} passages, {1000 * elapsed_s:.1f} ms", err=True)


@app.command()
def recall(
    corpus: Corpus,
    questions: Annotated[
        Path, typer.Argument(help="A .jsonl: `question`, and `passages` (ids of the right ones) or `answer` on each line.")
    ],
    k: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable; 1, 5 and 20 by default.")] = None,
    language: Language = "english",
    index: IndexPlace = None,
) -> None:
    """Measure how often the first k results hold what a question needs (recall@k)."""
    from strop.tools.search.bm25 import measure_recall, read_questions

    asked = read_questions(questions)
    opened = _open(corpus, language, index)
    started_at = time.perf_counter()
    measured = measure_recall(opened, asked, ks=sorted(set(k or (1, 5, 20))))
    elapsed_s = time.perf_counter() - started_at
    for size, share in measured.at.items():
        typer.echo(f"recall@{size:<4} {share:.3f}")
    typer.echo(
        f"{measured.num_questions:,} questions, {measured.num_passages:,} passages,"
        f" {1000 * elapsed_s / measured.num_questions:.1f} ms a question",
        err=True,
    )


def _open(corpus: Path, language: str, index: Path | None) -> Bm25Index:
    from strop.tools.search.bm25 import Bm25Config, Bm25Index

    return Bm25Index(Bm25Config(kind="bm25", path=str(corpus), language=language, index=None if index is None else str(index)))
