"""What starts a run on the machines of SLURM or Kubernetes, as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from strop.cluster.connection import RAY_ENVIRONMENT

_PORT = 6379


def train_command(recipe: Path) -> Sequence[str]:
    """Return what runs on the first node when all have joined."""
    return ["strop", "train", str(recipe), "--cluster", "auto"]


def slurm_script(name: str, recipe: Path, *, num_nodes: int, num_gpus: int) -> str:
    """Return a script for `sbatch`. `ray symmetric-run` starts Ray on each node, the command on the first, and ends both."""
    exports = "\n".join(f"export {key}={value}" for key, value in RAY_ENVIRONMENT.items())
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
srun ray symmetric-run --address "$head:{_PORT}" --min-nodes {num_nodes} -- {shlex.join(train_command(recipe))}
"""


def kuberay_manifest(name: str, recipe: Path, *, num_nodes: int, num_gpus: int, image: str, claim: str) -> str:
    """Return the manifest of a RayJob whose nodes share the volume of `claim` at /work."""
    variables = "\n".join(f'                - {{name: {key}, value: "{value}"}}' for key, value in RAY_ENVIRONMENT.items())
    limits = f"\n              resources: {{limits: {{nvidia.com/gpu: {num_gpus}}}}}" if num_gpus else ""
    pod = f"""      template:
        spec:
          containers:
            - name: ray
              image: {image}
              workingDir: /work{limits}
              env:
{variables}
                - name: RAY_AUTH_TOKEN
                  valueFrom: {{secretKeyRef: {{name: {name}-ray, key: token}}}}
              volumeMounts:
                - {{name: work, mountPath: /work}}
                - {{name: shared-memory, mountPath: /dev/shm}}
          volumes:
            - {{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}
            - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
"""
    return f"""# kubectl create secret generic {name}-ray --from-literal=token="$(ray get-auth-token --generate)"
# kubectl apply -f THIS_FILE
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {name}
spec:
  entrypoint: {shlex.join(train_command(recipe))}
  shutdownAfterJobFinishes: true
  rayClusterSpec:
    headGroupSpec:
      rayStartParams: {{}}
{pod}    workerGroupSpecs:
    - groupName: nodes
      replicas: {num_nodes - 1}
      rayStartParams: {{}}
{pod}"""
