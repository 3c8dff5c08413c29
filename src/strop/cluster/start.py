"""What starts a Ray cluster: processes on this machine, a script for SLURM, a manifest for Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jinja2 import Template

from strop.cluster.ray_setup import RAY_ENVIRONMENT, check_installed, free_port
from strop.errors import MachineError

_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_UP_S = 60.0
_END_S = 10.0
_SLURM_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "600",  # the first node waits so long for the others, and not 30 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # the others end so long after the first, and not 60 s
}
_RAY_VERSION = "2.60.0"  # the oldest that strop[cluster] installs; KubeRay asks for one where there is a token
_NAME_CHARS = 47  # of a RayJob, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """One node that is to be started."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  # of its command, such as `ip netns exec NAME`
    environment: Mapping[str, str] | None = None


class LocalCluster:
    """Ray nodes as processes of this machine; the first is the head. Use as `with`.

    Raises:
        UserError: Ray is not installed.
        MachineError: a node did not start; with the end of what it printed.
    """

    def __init__(self, nodes: Sequence[LocalNode], *, cpus: int) -> None:
        check_installed("strop cluster up")
        self._nodes, self._cpus = nodes, cpus
        self.address = f"{nodes[0].address}:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        # Short: Ray's sockets are in it, and their paths have at most 107 characters.
        self._directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))

    def __enter__(self) -> Self:
        # Without one `ray start` refuses to start.
        subprocess.run([*_RAY, "get-auth-token", "--generate"], check=True, capture_output=True)
        try:
            for number in range(len(self._nodes)):
                self.start(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when a node has ended."""
        while all(process.poll() is None for process in self.processes):
            time.sleep(1.0)

    def close(self) -> None:
        """End all nodes, the head last, and whatever they started."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + _END_S
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self, number: int) -> None:
        """Start a node, or start it again after its end."""
        node = self._nodes[number]
        place = self._directory / str(number)
        log = self._directory / f"{number}.log"
        port = self.address.rpartition(":")[2]
        role = ["--head", "--port", port, "--include-dashboard=false"] if number == 0 else ["--address", self.address]
        options = ["--node-ip-address", node.address, "--num-cpus", str(self._cpus), "--temp-dir", str(place), "--block"]
        command = [*node.prefix, *_RAY, "start", *role, *options]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **RAY_ENVIRONMENT, **(node.environment or {})},
                start_new_session=True,  # with all that it starts
            )
        self.processes[number : number + 1] = [process]
        deadline = time.monotonic() + _UP_S
        while "Ray runtime started" not in (said := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise MachineError(f"node {number} of the cluster at {self.address} did not start:\n{said[-2000:]}")
            time.sleep(0.1)


def slurm_script(name: str, command: str, *, num_nodes: int, num_gpus: int) -> str:
    """Return a script for `sbatch`. `ray symmetric-run` starts Ray on each node, `command` on the first, and ends both."""
    values = {"num_nodes": num_nodes, "num_gpus": num_gpus, "environment": _SLURM_ENVIRONMENT}
    return _rendered("slurm.sh.j2", name=name, command=command, **values)


def kuberay_manifest(name: str, command: str, *, num_nodes: int, num_gpus: int, image: str, claim: str) -> str:
    """Return the manifest of a RayJob that runs `command`, and whose nodes share the volume of `claim` at /work.

    With `authOptions` KubeRay makes a token, and gives it to the nodes, to the pod that submits the job, and to itself.
    """
    label = f"strop-{re.sub('[^a-z0-9]+', '-', name.lower())}"[:_NAME_CHARS].rstrip("-")
    values = {"num_nodes": num_nodes, "num_gpus": num_gpus, "ray_version": _RAY_VERSION, "environment": RAY_ENVIRONMENT}
    values["command"] = json.dumps(command, ensure_ascii=False)  # a string of JSON is one of YAML
    return _rendered("kuberay.yaml.j2", label=label, image=image, claim=claim, **values)


def _rendered(template: str, **values: object) -> str:
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    rendered: str = Template(text, trim_blocks=True, keep_trailing_newline=True).render(values)
    return rendered
