"""The commands `strop search ...`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def _group() -> None:
    """Search your own corpus as the search tool does.

    - `strop search ask corpus.jsonl "height of Mont Blanc"` shows the text that a policy would read.
    """


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
    from strop.tools.search.bm25 import Bm25Config, Bm25Index

    opened = Bm25Index(
        Bm25Config(kind="bm25", path=str(corpus), language=language, index=None if index is None else str(index))
    )
    started_at = time.perf_counter()
    found = opened.search(query, k)
    elapsed_s = time.perf_counter() - started_at
    typer.echo(printable(as_pages(found)) or "nothing found")
    typer.echo(f"{len(found)} of {len(opened.passages):,} passages, {1000 * elapsed_s:.1f} ms", err=True)
