"""A finished run of the scripted recipe, and a copy of it for each test that changes something there."""

import shutil

import pytest

from scripted_runs import run_recipe
from strop.run_directory import RunDirectory


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("done") / "run").run


@pytest.fixture
def run(done, tmp_path):
    return RunDirectory(shutil.copytree(done.path, tmp_path / "run"))
