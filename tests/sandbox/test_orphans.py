"""A child whose fork server dies around its birth, where no pid namespace takes it along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A fork server of one child, which says that it lives once it is shut in. Where the server is to be killed, the child waits for
# that first: it then asks for a signal at the death of a parent that is dead.
SERVER = """
import os, signal, sys
from strop.sandbox.inside.confine import Confinement

proc = os.open("/proc", os.O_RDONLY)
cage = Confinement("process", proc=proc, is_root=os.geteuid() == 0, readable=[])
is_killed, said = sys.argv[1] == "killed", int(sys.argv[3])
held, holds = os.pipe()
if os.fork() == 0:
    os.close(holds)
    if is_killed:
        os.read(held, 1)
    cage.apply(sys.argv[2])
    os.write(said, b"alive")
    os._exit(0)
os.close(said)
if is_killed:
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death of a parent is reported only on Linux")
@pytest.mark.parametrize(("fate", "said"), [("killed", b""), ("alive", b"alive")])
def test_a_child_does_not_outlive_a_fork_server_that_was_killed_before_it_was_shut_in(fate, said, tmp_path: Path):
    hears, says = os.pipe()
    server = subprocess.Popen([sys.executable, "-c", SERVER, fate, str(tmp_path), str(says)], pass_fds=[says])
    os.close(says)
    with open(hears, "rb") as child:
        heard = child.read()  # until no process is left that could write
    server.wait()
    assert heard == said
