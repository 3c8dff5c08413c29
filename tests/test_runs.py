import errno
import json
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from strop.errors import RunError, TrainerLost
from strop.run_directory import (
    LineWriter,
    StageDirectory,
    raw_lines,
    read_json,
    read_lines,
    write_directory,
    write_json,
    write_text,
    writing_to,
)
from strop.stages.loop.checkpoints import latest_step


def test_a_line_that_a_kill_cut_short_is_dropped_by_readers_and_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    writer = LineWriter(path)
    writer.append({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_line_that_lost_only_its_newline_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    writer = LineWriter(path)
    writer.append({"step": 3})
    writer.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_a_cut_line_longer_than_a_block_is_dropped_whole(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b'{"a": 1}\n'
    path.write_bytes(b"x" * 200_000)
    LineWriter(path).close()
    assert path.read_bytes() == b""


def test_what_a_run_appends_to_a_line_that_was_read_is_no_line_of_its_own(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": ')
    lines = raw_lines(path)
    assert [next(lines), next(lines)] == [b'{"step": 1}\n', b'{"step": ']
    with path.open("a") as file:
        file.write('2}\n{"step": 3}\n')
    assert list(lines) == []
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: not valid JSON: .* Remove that line"):
        read_lines(path)


def test_no_file_is_no_lines(tmp_path):
    assert read_lines(tmp_path / "nothing.jsonl") == []


def test_json_keeps_the_order_of_its_keys_and_refuses_what_is_no_number(tmp_path):
    path = tmp_path / "deep" / "manifest.json"
    write_json(path, {"stages": {"sft": 1, "base": 2}})
    assert list(read_json(path)["stages"]) == ["sft", "base"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert list(read_json(path)["stages"]) == ["sft", "base"]


def test_a_missing_or_damaged_json_file_is_named(tmp_path):
    with pytest.raises(RunError, match=r"manifest\.json: missing\. Is .* a run directory of strop\?"):
        read_json(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"manifest\.json: not valid JSON"):
        read_json(tmp_path / "manifest.json")


def test_writing_what_cannot_be_written_leaves_the_old_text(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"


def test_a_directory_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    for text in ("one", "two"):
        write_directory(tmp_path / "model", lambda directory, text=text: (directory / text).write_text(text) and None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert [entry.name for entry in (tmp_path / "model").iterdir()] == ["two"]


def test_a_writer_of_an_earlier_try_that_is_still_at_work_changes_nothing(tmp_path):
    """A rank whose machine was cut off, and that still sees the shared directory."""
    has_begun, may_go_on, said = threading.Event(), threading.Event(), []

    def of_earlier_try(directory):
        (directory / "weights").write_text("earlier")
        has_begun.set()
        may_go_on.wait(10)
        try:
            (directory / "state").write_text("earlier")
        except OSError as error:
            said.append(type(error))
        raise TrainerLost

    path = StageDirectory(tmp_path).checkpoint(3)

    def write_earlier():
        with pytest.raises(TrainerLost):
            write_directory(path, of_earlier_try)

    earlier = threading.Thread(target=write_earlier)
    earlier.start()
    assert has_begun.wait(10)

    def of_this_try(directory):
        (directory / "weights").write_text("this")
        (directory / "state").write_text("this")
        may_go_on.set()
        earlier.join(10)

    assert latest_step(StageDirectory(tmp_path)) == 0
    write_directory(path, of_this_try)
    assert {file.name: file.read_text() for file in path.iterdir()} == {"weights": "this", "state": "this"}
    assert latest_step(StageDirectory(tmp_path)) == 3
    assert said == [FileNotFoundError]


def test_what_went_wrong_while_a_directory_was_filled_takes_no_room(tmp_path):
    def fill(directory):
        (directory / "half").write_text("half")
        raise RunError("the disk is full")

    with pytest.raises(RunError):
        write_directory(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []


def from_torch():
    """torch.save raises over the OSError of the file it was given."""
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch does


def from_safetensors():
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def from_python():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_place_that_cannot_exist_is_one_message():
    place = Path("/proc/nowhere/run")
    with pytest.raises(RunError, match=r"^/proc/nowhere/run: cannot be written: No such file"), writing_to(place):
        place.mkdir(parents=True)


@pytest.mark.parametrize("write", [from_python, from_torch, from_safetensors])
def test_a_full_disk_is_one_message_whoever_noticed_it(tmp_path, write):
    with pytest.raises(RunError, match=r"cannot be written: No space left on device\..*Free space there"), writing_to(tmp_path):
        write()


def test_a_fault_that_has_its_own_message_keeps_it(tmp_path):
    def lose_the_trainer():
        try:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        except OSError:
            raise TrainerLost("rank 1 ended") from None

    with pytest.raises(TrainerLost, match="rank 1 ended"), writing_to(tmp_path):
        lose_the_trainer()


@pytest.mark.parametrize("error", [RuntimeError("a bug of ours"), KeyError("key")])
def test_other_errors_keep_their_traceback(tmp_path, error):
    with pytest.raises(type(error)), writing_to(tmp_path):
        raise error


def test_lines_refuse_what_is_no_number_and_stay_whole(tmp_path):
    writer = LineWriter(tmp_path / "metrics.jsonl")
    writer.append({"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.append({"loss": float("nan")})
    writer.append({"loss": 2.0})
    writer.sync()
    writer.close()
    writer.close()
    assert [json.loads(line) for line in writer.path.read_text().splitlines()] == [{"loss": 1.0}, {"loss": 2.0}]
