"""What starts a run on the machines of SLURM or Kubernetes, as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from strop.cluster.connection import RAY_ENVIRONMENT

_PORT = 6379
_SLURM_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "600",  # the first node waits so long for the others, and not 30 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # the others end so long after the first, and not 60 s
}
_RAY_VERSION = "2.60.0"  # the oldest that strop[cluster] installs; KubeRay asks for one where there is a token
_NAME_CHARS = 47  # of a RayJob, at most


def train_command(recipe: Path) -> Sequence[str]:
    """Return what runs on the first node when all have joined."""
    return ["strop", "train", str(recipe), "--cluster", "auto"]


def slurm_script(name: str, recipe: Path, *, num_nodes: int, num_gpus: int) -> str:
    """Return a script for `sbatch`. `ray symmetric-run` starts Ray on each node, the command on the first, and ends both."""
    exports = "\n".join(f"export {key}={value}" for key, value in _SLURM_ENVIRONMENT.items())
    gpus = f"#SBATCH --gpus-per-node={num_gpus}\n" if num_gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --requeue
# Submit it where `strop` is on the PATH and the recipe, the models and runs/ are in a directory that all nodes share.
set -euo pipefail
{exports}
export RAY_AUTH_TOKEN="${{RAY_AUTH_TOKEN:-$(ray get-auth-token --generate)}}"
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
code="$(mktemp)"  # of the command; symmetric-run of Ray 2.60 exits with 1 after it has ended Ray
trap 'rm -f "$code"' EXIT
echo 1 > "$code"
srun ray symmetric-run --address "$head:{_PORT}" --min-nodes {num_nodes} -- \\
    bash -c '"$@"; echo $? > "$0"' "$code" {shlex.join(train_command(recipe))} || true
exit "$(cat "$code")"
"""


def kuberay_manifest(name: str, recipe: Path, *, num_nodes: int, num_gpus: int, image: str, claim: str) -> str:
    """Return the manifest of a RayJob whose nodes share the volume of `claim` at /work.

    With `authOptions` KubeRay makes a token, and gives it to the nodes, to the pod that submits the job, and to itself.
    """
    variables = "\n".join(f'                - {{name: {key}, value: "{value}"}}' for key, value in RAY_ENVIRONMENT.items())
    label = f"strop-{re.sub('[^a-z0-9]+', '-', name.lower())}"[:_NAME_CHARS].rstrip("-")
    limits = f"\n              resources: {{limits: {{nvidia.com/gpu: {num_gpus}}}}}" if num_gpus else ""
    pod = f"""      template:
        spec:
          containers:
            - name: ray
              image: {image}
              workingDir: /work{limits}
              env:
{variables}
              volumeMounts:
                - {{name: work, mountPath: /work}}
                - {{name: shared-memory, mountPath: /dev/shm}}
          volumes:
            - {{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}
            - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
"""
    return f"""# kubectl apply -f THIS_FILE, where KubeRay 1.6 or newer runs. The image has strop[cluster] and ray[default].
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {label}
spec:
  entrypoint: {shlex.join(train_command(recipe))}
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    rayVersion: {_RAY_VERSION}
    authOptions: {{mode: token}}
    headGroupSpec:
      rayStartParams: {{}}
{pod}    workerGroupSpecs:
    - groupName: nodes
      replicas: {num_nodes - 1}
      rayStartParams: {{}}
{pod}"""
