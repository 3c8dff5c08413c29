"""A run on four machines whose processes are killed and stopped, whose links are cut and slow, whose disks are full.

The head of the Ray cluster is on the first machine, which nothing happens to: a cluster without its head is at its end.
CHAOS_EVENTS sets the number of events, CHAOS_SEED their order, CHAOS_RESULT a file for what was measured.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from networks import Machines
from strop.cluster.ray_setup import RAY_ENVIRONMENT
from strop.cluster.start import LocalCluster
from strop.errors import MachineError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
NUM_EVENTS = int(os.environ.get("CHAOS_EVENTS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
TINY = ROOT / "tests" / "pipelines" / "tiny.toml"
NUM_MACHINES, NUM_TASKS, NUM_ROLLOUTS = 4, 4, 4
LAYOUT = [
    "sandbox.level=confined",
    "engine.replicas=2",
    "stages.rl.trainer.workers=3",  # one of them on a machine that may be cut off
    "stages.rl.trainer.optimizer.lr=1e-5",
    "stages.rl.steps=1000000",
    f"stages.rl.tasks_per_step={NUM_TASKS}",
    f"stages.rl.group_size={NUM_ROLLOUTS}",
    "stages.rl.keep_rollouts=100000",
    "stages.rl.checkpoint_every=2",  # a stage may start three times without a new one
]
ROLES = {"rank-": "rank", "engine-": "engine", "code-service-": "service"}
WHOLE = Counter(rank=3, engine=2, service=2)
DECK = [
    *[("engine", "kill"), ("engine", "stop"), ("service", "kill"), ("service", "stop"), ("rank", "kill"), ("rank", "stop")],
    *[("service", "kill"), ("engine", "kill"), ("controller", "kill"), ("node", "cut"), ("node", "slow"), ("node", "full")],
    *[("agent", "kill"), ("trainer", "twice")],
]
NAMED_S = {"service": 2.0, "engine": 5.0, "rank": 5.0, "trainer": 5.0, "node": 5.0}
SLOW_S, FULL_S = 8.0, 6.0
ON_S = 300.0  # until training goes on
SMALL_DISK = 'mount -t tmpfs -o size=16m,mode=1777 none "$TMPDIR" && exec "$@"'
# Ray looks for the node that it is on among all processes that it sees.
OWN_PROCESSES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SMALL_DISK, "sh")


class PatientCluster(LocalCluster):
    """Ray gives a node 30 s to start, which it exceeds on a busy machine."""

    def start(self, number):
        for is_last in (False, False, True):
            try:
                super().start(number)
                break
            except MachineError:
                if is_last:
                    raise


def train(runs, stage, address=""):
    words = ["train", TINY, "--runs", runs, "--name", "chaos", "--only", stage]
    words += [word for key in LAYOUT for word in ("--set", key)]
    if address:
        words += ["--cluster", address, "--set", "cluster.trainer_nodes=3", "--set", "cluster.sandbox_nodes=2"]
    return [sys.executable, "-m", "strop.cli", *map(str, words)]


class Chaos:
    """The machines, the command that trains, and what its directory says."""

    def __init__(self, machines, ray, runs):
        self.machines, self.ray, self.runs = machines, ray, runs
        self.run = runs / "chaos"
        self.random = random.Random(SEED)
        self.place, self.controller = 1, None
        self.acts, self._read, self._events = [], 0, []

    def start(self):
        words = train(self.runs, "rl", self.ray.address)
        environment = {"COLUMNS": "200", "TMPDIR": self.machines.nodes[self.place].environment["TMPDIR"]}
        with (self.runs / "said.txt").open("ab") as said:
            self.controller = subprocess.Popen(
                [*self.into(self.place), *words],
                stdout=said,
                stderr=said,
                env={**os.environ, **RAY_ENVIRONMENT, **environment},
            )

    def first(self, machine):
        """The first process of a machine, which Ray runs in."""
        return _child(self.ray.processes[machine])

    def into(self, machine):
        return ["nsenter", f"--target={self.first(machine)}", "--mount", "--pid", "--net", f"--wd={ROOT}"]

    def signal_controller(self, number):
        if self.controller.poll() is None:
            os.kill(_child(self.controller), number)

    def said(self):
        return (self.runs / "said.txt").read_text()[-5000:]

    def events(self, since=0.0):
        if (path := self.run / "events.jsonl").exists():
            with path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._events.append(json.loads(line))
        return [event for event in reversed(self._events) if event["time"] >= since]

    def processes(self):
        """What Ray runs for strop: (role, process, machine)."""
        found = []
        for machine in range(NUM_MACHINES):
            for pid in self.machines.pids(machine):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                        log = Path(os.readlink(f"/proc/{pid}/fd/1")).name
                        found += [(role, pid, machine) for start, role in ROLES.items() if log.startswith(start)]
        return found

    def children(self, machine):
        """Processes of a machine that Ray's own processes have not started for themselves."""
        return [pid for pid in self.machines.pids(machine) if "strop" in _command(pid)]

    def wait(self, what, is_so, within_s, *, ended=False):
        deadline = time.monotonic() + within_s
        while not (found := is_so()):
            if not ended and self.controller.poll() is not None:
                raise AssertionError(f"the run ended before {what}: {self.acts[-1:]}\n{self.said()}")
            if time.monotonic() > deadline:
                seen = [(event["event"], event) for event in self.events()[:8]]
                raise AssertionError(f"not within {within_s:g} s: {what}: {self.acts[-1:]} {seen}\n{self.said()}")
            time.sleep(0.05)
        return found

    def step_after(self, since):
        return any(event["event"] == "step_finished" and event["stage"] == "rl" for event in self.events(since))

    def is_whole(self):
        return Counter(role for role, _, _ in self.processes()) == WHOLE

    def act(self, what, how):
        """One event, until training goes on. Notes when the loss was named, and when a step had ended after it."""
        self.wait("all processes were there", self.is_whole, ON_S)
        began = time.time()
        self.wait("a step ended", lambda: self.step_after(began), ON_S)
        began = time.time()
        act = {"what": what, "how": how, "time": began}
        self.acts.append(act)
        named = getattr(self, "_signal" if what in ROLES.values() else f"_{how}_{what}")(what, how, act)
        if named:
            event = self.wait("the loss was named", lambda: _first(named, self.events(began)), 60.0)
            act["named_s"] = event["time"] - began
        since = time.time()
        self.wait("training went on", lambda: self.step_after(since), ON_S)
        act["on_s"] = time.time() - began
        if how == "cut":
            self._heal(act["machine"])
        sys.stdout.write(f"{act}\n")
        sys.stdout.flush()

    def _signal(self, what, how, act):
        _, pid, machine = self.random.choice([each for each in self.processes() if each[0] == what])
        act |= {"machine": machine, "pid": pid}
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return lambda event: _names(event, what, self.machines.nodes[machine].address)

    def _twice_trainer(self, what, how, act):
        """A rank, and one of those that start in its place."""
        before = {pid for _, pid, _ in self._ranks_other_than(())}
        named = self._signal("rank", "kill", act)
        self.wait("the trainer was lost", lambda: _first(named, self.events(act["time"])), 60.0)
        new = self.wait("it started again", lambda: self._ranks_other_than(before), ON_S)
        _, act["pid_of_second"], act["machine"] = self.random.choice(new)
        os.kill(act["pid_of_second"], signal.SIGKILL)
        return named

    def _ranks_other_than(self, pids):
        return [each for each in self.processes() if each[0] == "rank" and each[1] not in pids]

    def _cut_node(self, what, how, act):
        used = sorted({machine for _, _, machine in self.processes()} - {0, self.place})
        machine = act["machine"] = self.random.choice(used)
        act["roles"] = sorted(role for role, _, at in self.processes() if at == machine)
        self.machines.cut(machine)
        address = self.machines.nodes[machine].address
        return lambda event: event["event"] == "node_lost" and event["node"] == address

    def _slow_node(self, what, how, act):
        machine = act["machine"] = self.random.choice(range(1, NUM_MACHINES))
        act["link"] = self.machines.slow(machine)
        time.sleep(SLOW_S)
        self.machines.hasten(machine)

    def _full_node(self, what, how, act):
        machine = act["machine"] = self.random.choice(range(1, NUM_MACHINES))
        root = Path(f"/proc/{self.first(machine)}/root")
        filler = root / self.machines.nodes[machine].environment["TMPDIR"].lstrip("/") / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(FULL_S)
        filler.unlink()

    def _kill_agent(self, what, how, act):
        """What answers for a node; the node and what runs on it are well."""
        pids = {pid: machine for machine in range(NUM_MACHINES) for pid in self.machines.pids(machine) if _is_agent(pid)}
        pid = self.random.choice(sorted(pids))
        act |= {"machine": pids[pid], "pid": pid}
        os.kill(pid, signal.SIGKILL)

    def _kill_controller(self, what, how, act):
        before = [pid for _, pid, _ in self.processes()]
        act["machine"] = self.place
        self.signal_controller(signal.SIGKILL)
        self.controller.wait()
        self.wait("its processes had ended", lambda: not any(map(_is_alive, before)), 30.0, ended=True)
        act["gone_s"] = time.time() - act["time"]
        self.place = self.place % (NUM_MACHINES - 1) + 1
        self.start()

    def _heal(self, machine):
        """What was cut off ends when it is back; then Ray is started again there."""
        self.machines.mend(machine)
        self.wait("what was cut off had ended", lambda: not self.children(machine), 90.0)
        self.ray.processes[machine].kill()
        self.ray.processes[machine].wait()
        self.ray.start(machine)

    def end(self):
        """As a user does, by Ctrl-C."""
        self.signal_controller(signal.SIGINT)
        self.controller.wait(60)
        self.wait("all processes had ended", lambda: not any(map(self.children, range(NUM_MACHINES))), 30.0, ended=True)

    def check(self):
        """Each task of each step was played once, and nothing was named lost but what was."""
        cut = {self.machines.nodes[act["machine"]].address for act in self.acts if act["how"] == "cut"}
        lost = [event for event in self.events() if event["event"] == "node_lost"]
        assert {event["node"] for event in lost} <= cut, lost
        for event in self.events():
            if event["event"] == "process_lost":
                before = [act for act in self.acts if act["time"] <= event["time"]]
                assert before, event
                assert _is_of(event, before[-1], self.machines), (event, before[-1])
        steps = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        numbers = [line["step"] for line in steps if line["stage"] == "rl"]
        assert numbers == list(range(1, len(numbers) + 1))
        num_void = 0
        for step in numbers:
            played = Counter(_keys(self.run / "stages" / "rl" / "rollouts" / f"step-{step:06d}.jsonl"))
            first = (step - 1) * NUM_TASKS
            expected = set(itertools.product(range(first, first + NUM_TASKS), range(NUM_ROLLOUTS)))
            assert set(played) <= expected, step
            assert max(played.values()) == 1, (step, played)
            num_void += len(expected) - len(played)
        assert num_void <= NUM_ROLLOUTS * NUM_TASKS * sum(act["how"] == "full" for act in self.acts)
        return {"steps": len(numbers), "void": num_void}


def _child(process):
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() + os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def _is_agent(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_Agent")
    except OSError:
        return False


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _first(named, events):
    return next((event for event in reversed(events) if named(event)), None)


def _names(event, role, address):
    if role == "service" and event["event"] == "warning" and f"code service at http://{address}:" in event["text"]:
        return "silent" in event["text"] or "is lost" in event["text"]
    return event["event"] == "process_lost" and _role(event["process"]) == role and event["node"] == address


def _role(process):
    return "rank" if process == "the trainer" else "service" if process.startswith("code service") else "engine"


def _is_of(event, act, machines):
    if act["how"] in ("cut", "full", "twice"):  # all of the trainer ends with one of its ranks
        return event["node"] == machines.nodes[act["machine"]].address or event["process"] == "the trainer"
    return _role(event["process"]) == act["what"] and event["node"] == machines.nodes[act["machine"]].address


def _keys(path):
    packed = path.with_name(path.name + ".gz")
    lines = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    for line in lines.splitlines():
        key = json.loads(line)["rollout"]["trajectory"]["key"]
        yield key["task_index"], key["attempt"]


@pytest.fixture
def chaos(tmp_path):
    place = Path("/tmp") / f"chaos-{os.getpid()}"  # short, as sockets need it
    place.mkdir()
    with contextlib.ExitStack() as opened:
        opened.callback(shutil.rmtree, place, ignore_errors=True)
        began = opened.enter_context(subprocess.Popen([*train(tmp_path, "sft")], stdout=subprocess.DEVNULL, cwd=ROOT))
        machines = opened.enter_context(Machines(NUM_MACHINES))
        machines.nodes = [
            replace(node, prefix=(*node.prefix, *OWN_PROCESSES), environment={"TMPDIR": str(place)}) for node in machines.nodes
        ]
        ray = opened.enter_context(PatientCluster(machines.nodes, cpus=1))
        assert began.wait() == 0
        found = Chaos(machines, ray, tmp_path)
        found.start()
        opened.callback(lambda: found.signal_controller(signal.SIGKILL))
        yield found


@pytest.mark.timeout(max(600, 60 * NUM_EVENTS))
def test_a_run_goes_on_after_every_loss_and_plays_every_task_once(chaos):
    deck = []
    for _ in range(NUM_EVENTS):
        if not deck:
            deck = chaos.random.sample(DECK, len(DECK))
        chaos.act(*deck.pop())
    chaos.end()
    found = chaos.check()
    late = [act for act in chaos.acts if act.get("named_s", 0.0) > NAMED_S.get(act["what"], 5.0)]
    if path := os.environ.get("CHAOS_RESULT"):
        Path(path).write_text(json.dumps(_result(chaos.acts, found, late), indent=1) + "\n")
    assert not late


def _result(acts, found, late):
    by_kind = {}
    for act in acts:
        by_kind.setdefault(f"{act['what']} {act['how']}", []).append(act)
    return {
        "command": f"make chaos-cluster EVENTS={len(acts)} SEED={SEED}",
        "events": len(acts),
        **found,
        "late": len(late),
        "seconds": sum(act["on_s"] for act in acts),
        "kinds": {
            kind: {
                "events": len(of),
                **{
                    f"{name}_{part}": round(pick([act[f"{name}_s"] for act in of]), 2)
                    for name in ("named", "on", "gone")
                    if f"{name}_s" in of[0]
                    for part, pick in (("median_s", median), ("max_s", max))
                },
            }
            for kind, of in sorted(by_kind.items())
        },
    }
