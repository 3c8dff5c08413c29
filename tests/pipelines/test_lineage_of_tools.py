"""What a tool reads is part of what every stage stands on."""

from __future__ import annotations

from scripted_runs import RECIPE
from strop.config import validate
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory
from strop.runs.lineage import lineages


def digests(path, run):
    tree = resolve(RECIPE | {"tools": {"search": {"kind": "search", "backend": {"kind": "bm25", "path": str(path)}}}})
    return {name: each["files"] for name, each in lineages(validate(Recipe, tree, place="test"), RunDirectory(run)).items()}


def test_a_corpus_whose_contents_change_makes_other_stages_of_a_recipe(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "text": "a"}\n')
    before = digests(corpus, tmp_path / "run")
    assert digests(corpus, tmp_path / "run") == before
    corpus.write_text('{"id": "1", "text": "b"}\n')
    after = digests(corpus, tmp_path / "run")
    assert all(before[name] != after[name] for name in before)


def test_a_file_deep_in_a_directory_of_data_counts(tmp_path):
    deep = tmp_path / "corpus" / "part" / "rows.jsonl"
    deep.parent.mkdir(parents=True)
    deep.write_text('{"id": "1", "text": "a"}\n')
    before = digests(tmp_path / "corpus", tmp_path / "run")
    deep.write_text('{"id": "1", "text": "b"}\n')
    assert digests(tmp_path / "corpus", tmp_path / "run") != before
