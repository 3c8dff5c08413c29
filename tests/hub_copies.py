"""Copies of data sets of the hub on this machine, as the `datasets` package keeps them and reads them without network."""

import json
import os
import shutil
from pathlib import Path


def offline(monkeypatch, directory):
    """The `datasets` package reaches no hub, and keeps its copies in `directory`; none is there."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(directory))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def keep_copy(directory, name, commit, rows):
    """As if `rows` had been read of the data set `org/name` at `commit`, later than any copy that is there."""
    import datasets

    there = directory / f"org___{name}" / "default" / "0.0.0" / commit
    source = directory / commit / name / "train.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made,) = datasets.load_dataset(str(source.parent), split="train").cache_files
    shutil.copytree(Path(made["filename"]).parent, there)


def reach_hub(monkeypatch, directory):
    """As if a hub were reached that has what `directory` has copies of: the commit that is asked for is read, else the last."""
    import datasets

    load = datasets.load_dataset

    def reaching(*where, revision=None, **words):
        asked_for = list(directory.glob(f"*/*/*/{revision}"))
        before = [each.stat() for each in asked_for]
        for each in asked_for:
            os.utime(each, (2**32, 2**32))  # the package reads the copy that changed last
        try:
            return load(*where, revision=revision, **words)
        finally:
            for each, stat in zip(asked_for, before, strict=True):
                os.utime(each, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    monkeypatch.setattr(datasets, "load_dataset", reaching)
