"""The BM25 backend: what it finds among more than ten thousand passages, and that it builds its index once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import bm25s
import pytest
from typer.testing import CliRunner

from strop.cli import app
from strop.errors import UserError
from strop.tools.search import Passage
from strop.tools.search.bm25 import Bm25Config, Bm25Index, read_corpus

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from search_corpora import facts, write_corpus

ARPO_RESULTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "arpo" / "search_cache.json"


@pytest.fixture(scope="module")
def towns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 000 passages."""
    place = tmp_path_factory.mktemp("towns")
    write_corpus(place / "corpus.jsonl", list(facts(2_000)))
    return place


def index_of(place: Path, corpus: str = "corpus.jsonl", **config: object) -> Bm25Index:
    settings = {"kind": "bm25", "path": str(place / corpus), "index": str(place / "index"), **config}
    return Bm25Index(Bm25Config.model_validate(settings))


def test_recall_at_5_over_fourteen_thousand_passages_is_nearly_whole(towns: Path) -> None:
    index = index_of(towns)
    asked = [(question, passage_id) for passage_id, _, question in list(facts(2_000))[::5][:2000]]  # 5 and 7: every kind
    found = [[passage.id for passage in index.search(question, 5)] for question, _ in asked]
    recall = {k: sum(id in each[:k] for each, (_, id) in zip(found, asked, strict=True)) / len(asked) for k in (1, 5)}
    assert (len(asked), len(index.passages)) == (2_000, 14_000)
    assert recall[5] > 0.99
    assert 0.5 < recall[1] < recall[5]  # 0.57: other facts of the same town come first where the words differ


def test_a_corpus_can_be_asked_from_the_command_line(towns: Path) -> None:
    _, text, question = next(row for row in facts(2_000) if row[0].endswith("/bridge"))
    words = ["search", "ask", f"{towns / 'corpus.jsonl'}", question, "--index", f"{towns / 'index'}"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert f"Page 1: {text}\n" in shown.output
    assert "of 14,000 passages" in shown.output


def test_a_question_is_answered_by_the_passage_that_holds_it(towns: Path) -> None:
    passage_id, text, question = next(row for row in facts(2_000) if row[0].endswith("/bridge"))
    [first, *_] = index_of(towns).search(question, 5)
    assert first == Passage(id=passage_id, title="", text=text)
    shown = asyncio.run(index_of(towns).results(question, top_k=2))
    assert shown.split("\n")[0] == f"Page 1: {text}"
    assert len(shown.split("\n")) == 2


def test_the_index_is_built_once_and_anew_for_another_corpus_or_other_settings(
    towns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_of(towns)
    built = []
    index = bm25s.BM25.index
    monkeypatch.setattr(bm25s.BM25, "index", lambda *args, **rest: (built.append(1), index(*args, **rest))[1])
    index_of(towns)
    assert built == []
    small = towns / "small.jsonl"
    write_corpus(small, list(facts(10)))
    for num_built, language in ((1, "english"), (1, "english"), (2, "none")):
        index_of(towns, "small.jsonl", language=language)
        assert len(built) == num_built
    write_corpus(small, list(facts(11)))
    index_of(towns, "small.jsonl")
    assert len(built) == 3
    assert not [each for each in (towns / "index").iterdir() if each.name.startswith(".")]


def test_an_index_that_was_cut_off_while_it_was_built_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus.jsonl", list(facts(10)))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(bm25s.BM25, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            index_of(tmp_path)
    assert not list((tmp_path / "index").glob("bm25-*"))
    assert index_of(tmp_path).search("town", 1) is not None


def test_words_are_stemmed_unless_told_otherwise_and_nothing_is_found_without_a_common_word(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "The cat was running."}\n{"text": "A dog."}\n')
    assert [passage.text for passage in index_of(tmp_path).search("runs", 5)] == ["The cat was running."]
    assert index_of(tmp_path, language="none").search("runs", 5) == []
    assert index_of(tmp_path).search("??", 5) == []
    with pytest.raises(UserError, match="'klingon', which Snowball does not have"):
        index_of(tmp_path, language="klingon")


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"id": "{i}", "text": "same words"}}\n' for i in range(30)))
    assert [passage.id for passage in index_of(tmp_path).search("words", 30)] == [str(i) for i in range(30)]


def test_a_corpus_is_read_from_lines_texts_and_kept_results(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"id": 7, "contents": "\\"Oslo\\"\\nA city."}\n\n{"title": "Rome", "text": "Old."}\n')
    (folder / "deep" / "b.txt").write_text(" ".join(f"w{number}" for number in range(150)))
    (folder / "ignored.csv").write_text("x")
    passages = read_corpus(folder)
    assert [(each.id, each.title) for each in passages] == [
        ("7", "Oslo"), ("a.jsonl#3", "Rome"), ("deep/b.txt#1", "b"), ("deep/b.txt#2", "b"),
    ]  # fmt: skip
    assert (passages[0].text, len(passages[2].text.split()), len(passages[3].text.split())) == ("A city.", 100, 50)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"q": "Page 1: one\nPage 2: two\nmore", "none": "No search results found."}))
    assert [(each.id, each.text) for each in read_corpus(kept)] == [("q#1", "one"), ("q#2", "two more")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no passage in it"),
        ('{"text": "a"}\n{"body": 1}\n', "line 2: none of text, contents, body, passage holds text; its keys are body"),
        ("[1]", "line 1: list instead of an object"),
        ("{", "line 1: not valid JSON"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(UserError, match=told):
        read_corpus(tmp_path / "corpus.jsonl")
    with pytest.raises(UserError, match="no such corpus"):
        read_corpus(tmp_path / "nowhere.jsonl")


def arpo_queries() -> Iterator[tuple[str, str]]:
    """ARPO's real queries, and the start of the ids of the pages that a web search found for each."""
    have = {passage.id.rpartition("#")[0] for passage in read_corpus(ARPO_RESULTS)}
    for query in json.loads(ARPO_RESULTS.read_text(encoding="utf-8")):
        if query in have:
            yield query.removeprefix("search query: "), f"{query}#"


@pytest.mark.skipif(not ARPO_RESULTS.exists(), reason="the real search results are not here")
def test_real_queries_find_pages_that_a_web_search_found_for_them(tmp_path: Path) -> None:
    index = Bm25Index(Bm25Config(kind="bm25", path=str(ARPO_RESULTS), index=str(tmp_path)))
    assert len(index.passages) > 8_000
    hits = [any(passage.id.startswith(prefix) for passage in index.search(query, 5)) for query, prefix in arpo_queries()]
    assert sum(hits) / len(hits) > 0.96  # 0.973 of 996
