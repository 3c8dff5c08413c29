"""A copy of the finished scripted run for each test that changes something there."""

import shutil

import pytest

from strop.run_directory import RunDirectory


@pytest.fixture
def run(scripted_run, tmp_path):
    return RunDirectory(shutil.copytree(scripted_run.run.path, tmp_path / "run"))
