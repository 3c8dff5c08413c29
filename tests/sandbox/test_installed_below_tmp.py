"""A virtual environment below /tmp, where each call has a file system of its own, and one behind links."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path

import pytest

import strop

SCRIPT = """
from strop.sandbox import Sandbox
with Sandbox(min_level="namespaces") as box:
    print(box.run("import my_tiny_library; print(my_tiny_library.ANSWER); open('{mine}', 'w').write('x')").text.strip())
    print(box.run("import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(6 * 7)'])").text.strip())
    print(box.run("import sys; print(sys.executable)").text.strip())
"""


@pytest.mark.parametrize("name", ["venv", "link", "above/venv"])
def test_libraries_and_interpreter_below_tmp_can_be_used_and_tmp_is_still_the_programs_own(name):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        environment = Path(directory) / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = environment / "lib" / version / "site-packages" / "my_tiny_library.py"
        library.write_text("ANSWER = 42\n")
        (Path(directory) / "link").symlink_to(environment)
        (Path(directory) / "above").symlink_to(directory)
        mine = Path(f"/tmp/strop-mine-{uuid.uuid4().hex}")
        paths = [str(Path(strop.__file__).parent.parent), sysconfig.get_path("purelib")]
        run = subprocess.run(
            [str(Path(directory) / name / "bin" / "python"), "-c", SCRIPT.format(mine=mine)],
            env={"PYTHONPATH": ":".join(paths), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["42", "42", "python-prefix/bin/python"]
        assert not mine.exists()
