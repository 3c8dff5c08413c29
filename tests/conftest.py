"""What every test shares: no network, no chatter, one thread, and one whole scripted run that several tests look at."""

import gc
import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage collection does not go through what thousands of tests import: not meanwhile, and not in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With --dist=loadfile, one worker has all files of the doctor's tests, which share a code service."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/doctor" if nodeid.startswith("tests/doctor/") else super()._split_scope(nodeid)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors take longer where threads share them, and a recipe sets the number for the whole process."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """A second before a service is asked again is long for a test."""
    if "strop.http" in sys.modules:
        monkeypatch.setattr(sys.modules["strop.http"], "BACKOFF_S", 0.01)


@pytest.fixture(scope="module")
def one_ray():
    """Ray for all tests of a file, since it takes seconds to start."""
    from strop.cluster import connection

    connection.enter("the tests")
    yield
    connection.leave()


@pytest.fixture(scope="session")
def scripted_run(tmp_path_factory):
    """A whole run on a scripted engine: model, two SFT steps, evaluation, two RL steps, evaluation, report."""
    from scripted_runs import run_recipe

    return run_recipe(tmp_path_factory.mktemp("runs") / "scripted", is_fresh=True)


@pytest.fixture
def strop(monkeypatch, capsys):
    """Type a command, in this process; returns its exit code and what it said on stderr."""
    from strop import cli

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["strop", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return exit_.value.code, said

    return typed
