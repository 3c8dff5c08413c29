"""A trainer over two processes: what its ranks hash and hold, and how weights leave it.

    make bench-cluster

Compares, in one run, the ways of before and after: each rank loads the whole model or its own rows, for a policy, for a model
under an adapter and for a critic; each rank hashes the whole model or the tensors that it owns; the controlling process passes
every tensor on or none. Takes SmolLM2-135M, from models/smollm2-135m, stored and published in bfloat16. Writes
results/cluster.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from result_file import write_result

from strop.engine.protocol import Capabilities, digests_of, weights_checksum
from strop.engine.publication import Publication
from strop.engine.published_files import write_files
from strop.training import TrainerConfig
from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import World
from strop.training.config import LoraConfig
from strop.training.logprobs import LogprobModule
from strop.training.lora import Adapter
from strop.training.models import load_model
from strop.training.roles import ValueModule
from strop.training.sharded import ShardedWeights, model_without_weights, world_of
from strop.training.trainer import Trainer
from strop.training.workers import LearnerGroup

ROOT = Path(__file__).parents[1]
COMMAND = "make bench-cluster"
NUM_RANKS, NUM_ROUNDS, DTYPE = 2, 3, torch.bfloat16
ROLES = ("policy", "adapter", "critic")
ENGINE = Capabilities(is_deterministic=False, can_fork=False, entropies="estimated", dtype=DTYPE)
MIB = 1 << 20


def options_of(model: Path) -> LearnerOptions:
    config = TrainerConfig(workers=NUM_RANKS, device="cpu", precision="bfloat16")
    return LearnerOptions(
        directory=model, config=config, reference=None, critic=None, total_updates=None, total_critic_updates=None
    )


class PeakMemory:
    """The most memory of this process that no file backs, in MiB above what it was at first."""

    def __enter__(self) -> PeakMemory:
        self.peak_mib = self._before = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.peak_mib -= self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak_mib = max(self.peak_mib, self._now())

    @staticmethod
    def _now() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def seconds(work: Callable[[], object]) -> float:
    """The time from when all ranks begin until all have ended."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def load(role: str, model: Path, world: World, *, is_whole: bool) -> ShardedWeights:
    shell = load_model(model) if is_whole else model_without_weights(model)
    root: torch.nn.Module
    if role == "critic":
        root = ValueModule(shell.base_model, is_packed=True)
    else:
        root = LogprobModule(shell, max_logits=2**25, is_packed=True)
    if role == "adapter":
        Adapter(shell, LoraConfig())
    return ShardedWeights(root, root, model, DTYPE, torch.device("cpu"), world)


def be_rank(rank: int, role: str, model: Path, is_whole: bool, rendezvous: str, answers: Any) -> None:
    """Load the model in one of two ways; then, as a policy by rows, time digests."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS)
    world = world_of(options_of(model).config, rank)
    import peft  # noqa: F401 - so that what is imported is no part of the difference

    model_without_weights(model)
    with PeakMemory() as memory:
        weights = load(role, model, world, is_whole=is_whole)
    found: dict[str, Any] = {"peak_mib": memory.peak_mib}
    if role == "policy" and not is_whole:
        learner = open_learner(options_of(model), world)
        own = list(learner.owned(DTYPE))
        whole_model = [(name, learner.tensor(name).to(DTYPE)) for name in learner.names()]
        found["hashed_mib"] = sum(tensor.nbytes for _, tensor in own) / MIB
        found["model_mib"] = sum(tensor.nbytes for _, tensor in whole_model) / MIB
        found["largest_mib"] = max(tensor.nbytes for _, tensor in whole_model) / MIB
        found["digest_whole_s"] = [seconds(lambda: weights_checksum(whole_model)) for _ in range(NUM_ROUNDS)]
        found["digest_own_s"] = [seconds(lambda: list(digests_of(own))) for _ in range(NUM_ROUNDS)]
    answers.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
    del weights


def of_ranks(role: str, model: Path, *, is_whole: bool) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (role, model, is_whole, f"file://{directory}/rendezvous", answers)
        processes = [context.Process(target=be_rank, args=(rank, *arguments)) for rank in range(NUM_RANKS)]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(NUM_RANKS)]


def publish_as_before(group: LearnerGroup, directory: Path) -> tuple[float, int]:
    """Seconds, and bytes through this process: the ranks hash the whole model, then each tensor comes here and is written."""
    started = time.perf_counter()
    checksum = group.checksum(DTYPE)
    tensors = [(name, group.published(name, DTYPE)) for name in group.names()]
    write_files(tensors, directory, part="before")
    assert checksum == weights_checksum(tensors)
    return time.perf_counter() - started, sum(tensor.nbytes for _, tensor in tensors)


async def publish(trainer: Trainer) -> tuple[float, int]:
    """Seconds, and bytes through this process: the answer of the ranks."""
    started = time.perf_counter()
    publication: Publication = await trainer.publication(ENGINE, version=1)
    took = time.perf_counter() - started
    num_bytes = len(pickle.dumps(await publication.checksum()))
    await publication.close()
    return took, num_bytes


async def of_publication(model: Path) -> dict[str, Any]:
    group = LearnerGroup(options_of(model))
    trainer = Trainer(group)
    before, after = [], []
    try:
        for _ in range(NUM_ROUNDS):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                before.append(await asyncio.to_thread(publish_as_before, group, Path(directory)))
            after.append(await publish(trainer))
    finally:
        await trainer.close()
    return {
        "seconds_before": [round(each, 3) for each, _ in before],
        "seconds": [round(each, 3) for each, _ in after],
        "bytes_through_controller_before": before[0][1],
        "bytes_through_controller": after[0][1],
        "ratio": round(median(new / old for (new, _), (old, _) in zip(after, before, strict=True)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as directory:
        stored = Path(directory)  # in bfloat16, as models are published: what is trained is float32
        load_model(model).bfloat16().save_pretrained(stored)
        whole, rows = ({role: of_ranks(role, stored, is_whole=is_whole) for role in ROLES} for is_whole in (True, False))
        published = asyncio.run(of_publication(stored))
    parts = rows["policy"]
    digest = median(own / whole for own, whole in zip(parts[0]["digest_own_s"], parts[0]["digest_whole_s"], strict=True))
    model_mib, largest_mib = (2 * parts[0][key] for key in ("model_mib", "largest_mib"))  # in float32
    allowed_mib = model_mib / NUM_RANKS + largest_mib
    largest_ratio = 0.0
    for role in ROLES:
        before, after = (max(each["peak_mib"] for each in ranks[role]) for ranks in (whole, rows))
        print(f"loading a rank's {role}: {before:.0f} -> {after:.0f} MiB at most (share + largest: {allowed_mib:.0f})")
        largest_ratio = max(largest_ratio, after / allowed_mib)
    hashed = max(each["hashed_mib"] for each in parts) / parts[0]["model_mib"]
    print(f"digest of own tensors / of the whole model: {digest:.2f}; share of the bytes: {hashed:.2f}")
    print(f"publication: {published['seconds_before']} -> {published['seconds']} s, ratio {published['ratio']}")
    bars = {
        "loading: most memory of a rank / (its share + the largest tensor)": {
            "value": round(largest_ratio, 3),
            "bar": 1.0,
            "holds": largest_ratio <= 1.0,
        },
        "digest: seconds with owned tensors / with the whole model on each rank": {
            "value": round(digest, 3),
            "bar": 0.6,
            "holds": digest <= 0.6,
        },
        "publication: weights through the controlling process, bytes": {
            "value": published["bytes_through_controller"],
            "bar": 1000,
            "holds": published["bytes_through_controller"] <= 1000,
        },
    }
    ranks = {"whole": whole, "rows": rows}
    return write_result("cluster", command=COMMAND, bars=bars, model=model.name, ranks=ranks, publication=published)


if __name__ == "__main__":
    raise SystemExit(main())
