"""A run directory as the pipelines leave it, made up from one seed: what the page is looked at and tested with.

`python tests/reports/fake_run.py DIRECTORY` writes one and its report.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from strop.run_directory import LineWriter, RunDirectory, write_json
from strop.types import (
    Completion,
    FinishReason,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)

STAGES = {
    "model": {"kind": "model", "init": ""},
    "before": {"kind": "eval", "init": "model"},
    "sft": {"kind": "sft", "init": "model"},
    "cold": {"kind": "eval", "init": "sft"},
    "rl": {"kind": "rl", "init": "sft"},
    "after": {"kind": "eval", "init": "rl"},
}
RESULTS = {
    "before": (0.031, 0.012, 0.055, 0.620, 0.500, 1.9, 142.0, 0.118),
    "cold": (0.348, 0.281, 0.416, 0.284, 0.171, 1.6, 96.0, 0.031),
    "after": (0.842, 0.787, 0.893, 0.062, 0.038, 1.2, 71.0, 0.004),
}
_SCORED = TypeAdapter(ScoredTrajectory)
_TASK = TypeAdapter(Task)
_KEY = TypeAdapter(RolloutKey)


def write_run(path: Path, *, num_steps: int = 60, seed: int = 7, question: str = "What is {a} * {b} + {c}?") -> RunDirectory:
    """A finished run with a cold start and one RL stage of `num_steps` steps."""
    run = RunDirectory(path)
    chance = random.Random(seed)
    write_json(run.manifest, _manifest(num_steps, seed))
    for name in STAGES:
        write_json(run.stage(name).done, {})
    for name, values in RESULTS.items():
        keys = ("accuracy", "accuracy_low", "accuracy_high", "tool_error_rate", "tool_error_rate_correct")
        keys += ("tool_calls_mean", "length_tokens_mean", "truncated_fraction")
        write_json(run.stage(name).evaluation, {"stage": name, "num_tasks": 128, "k": 4} | dict(zip(keys, values, strict=True)))
    writer = LineWriter(run.metrics)
    for step in range(1, 41):
        writer.append({"stage": "sft", "step": step} | _sft_metrics(step, chance))
    for step in range(1, num_steps + 1):
        writer.append({"stage": "rl", "step": step} | _rl_metrics(step / num_steps, chance))
    writer.close()
    events = LineWriter(run.events)
    warning = "step 4: 11 of 16 groups are tied, so most of the batch teaches nothing. Raise tasks.difficulty."
    for event in (
        *[{"event": "stage_started", "stage": name, "cores": 2, "gpus": 1} for name in STAGES],
        *[{"event": "warning", "stage": "rl", "text": warning}] * 3,
        {"event": "warning", "stage": "sft", "text": warning},
    ):
        events.append({"time": 0.0, **event})
    events.close()
    pen = _Pen(tokenizer=_train_tokenizer(), chance=chance, question=question)
    run.stage("sft").model.mkdir(parents=True)
    pen.tokenizer.save(str(run.stage("sft").model / "tokenizer.json"))
    for step in range(1, num_steps + 1):
        if step == 1 or step % 10 == 0:
            pen.write_step(run, step, skill=step / num_steps)
            write_json(run.stage("rl").timeline(step), _timeline(step, 3.4 - step / num_steps, chance))
    return run


def _manifest(num_steps: int, seed: int) -> dict[str, object]:
    recipe = {"name": "demo", "seed": seed, "stages": {"rl": {"steps": num_steps, "method": {"kind": "grpo-roc", "keep": 8}}}}
    return {
        "format": 1,
        "name": "demo",
        "seed": seed,
        "recipe": recipe,
        "versions": {"strop": "0.1.0", "torch": "2.8.0", "transformers": "5.0.0"},
        "command": "strop train recipes/demo.toml",
        "stages": STAGES,
    }


def _sft_metrics(step: int, chance: random.Random) -> dict[str, float]:
    return {
        "sft/loss": 0.4 + 2.2 * math.exp(-step / 9) + chance.gauss(0, 0.03),
        "sft/tokens_per_s": chance.gauss(5200, 140),
        "update/grad_norm": 0.5 + 2 * math.exp(-step / 8) + abs(chance.gauss(0, 0.1)),
        "update/learning_rate": 1e-3 * min(1, (step + 1) / 5) * (1 - step / 44),
        "time/step_s": chance.gauss(0.8, 0.05),
    }


def _rl_metrics(progress: float, chance: random.Random) -> dict[str, float]:
    accuracy = min(0.98, max(0.02, 0.33 + 0.52 / (1 + math.exp(-9 * (progress - 0.42))) + chance.gauss(0, 0.035)))
    errors = max(0.01, 0.3 * math.exp(-2.2 * progress) + chance.gauss(0, 0.015))
    all_right, all_wrong = round(16 * accuracy**4), round(16 * (1 - accuracy) ** 4)
    rollout_s = chance.gauss(2.6, 0.2) * (1.4 - 0.5 * progress)
    latency_s = chance.gauss(0.045, 0.003) * (1.2 - 0.3 * progress)
    return {
        "rollout/reward_mean": accuracy,
        "rollout/accuracy": accuracy,
        "rollout/tool_error_rate": errors,
        "rollout/tool_error_rate_correct": max(0.0, errors * 0.6 + chance.gauss(0, 0.008)),
        "rollout/tool_calls_mean": 1.7 - 0.5 * progress + chance.gauss(0, 0.05),
        "rollout/length_tokens_mean": 98 - 28 * progress + chance.gauss(0, 2.5),
        "rollout/length_tokens_mean_correct": 90 - 28 * progress + chance.gauss(0, 2.5),
        "rollout/length_tokens_mean_wrong": 106 - 28 * progress + chance.gauss(0, 2.5),
        "rollout/turns_mean": 2.5 - 0.4 * progress + chance.gauss(0, 0.05),
        "rollout/truncated_fraction": max(0.0, 0.05 * math.exp(-4 * progress) + chance.gauss(0, 0.004)),
        "rollout/reflection_words_per_1000_tokens": 4.0,
        "rollout/void_fraction": 0.0,
        "rollout/tokens_per_s": chance.gauss(1900, 90),
        "groups/all_right": all_right,
        "groups/all_wrong": all_wrong,
        "groups/used": 16 - all_right - all_wrong,
        "policy/entropy_nats": 0.62 * math.exp(-1.4 * progress) + chance.gauss(0, 0.012),
        "policy/clip_fraction_low": abs(chance.gauss(0.004, 0.002)),
        "policy/clip_fraction_high": abs(chance.gauss(0.009, 0.003)),
        "policy/ratio": chance.gauss(1.0, 0.002),
        "policy/ratio_max": 1.3 + abs(chance.gauss(0, 0.3)),
        "policy/logprob_gap_mean": abs(chance.gauss(4e-7, 1e-7)),
        "policy/logprob_gap_max": abs(chance.gauss(4e-6, 1e-6)),
        "update/loss": chance.gauss(-0.01, 0.02),
        "update/grad_norm": abs(chance.gauss(0.6, 0.15)),
        "update/learning_rate": 2e-5,
        "time/rollout_s": rollout_s,
        "time/score_s": 0.3,
        "time/update_s": 1.1,
        "time/publish_s": 0.05,
        "time/checkpoint_s": 0.12,
        "time/step_s": rollout_s + 1.6,
        "rollout/tool_calls_dispatched": round(512 * (1.7 - 0.5 * progress) + chance.gauss(0, 20)),
        "time/tool_latency_mean_s": latency_s,
        "time/tool_latency_p50_s": 0.7 * latency_s,
        "time/tool_latency_p95_s": latency_s * (2.6 + abs(chance.gauss(0, 0.4))),
        "time/tool_calls/python/0.03-0.1s": 400,
        "time/tool_calls/python/0.1-0.3s": 90 + chance.randint(0, 9),
        **_scheduler_metrics(rollout_s, latency_s, chance),
    }


def _scheduler_metrics(rollout_s: float, latency_s: float, chance: random.Random) -> dict[str, float]:
    share = chance.uniform(0.7, 0.9)
    return {
        "scheduler/engines": 4,
        "scheduler/engines_lost": 0,
        "scheduler/restarts": 0,
        "scheduler/lost_turns": 0,
        "scheduler/evictions": 0,
        "scheduler/recomputed_tokens": 0,
        "scheduler/moved_tokens": 0,
        "scheduler/branches_queued": 0,
        "scheduler/branch_cached_token_share": 0.99,
        "scheduler/queue_max": chance.randint(120, 160),
        "scheduler/queue_mean": chance.uniform(30, 50),
        "scheduler/queue_wait_mean_s": 0.3 * rollout_s,
        "scheduler/tool_wait_mean_s": 0.001,
        "scheduler/tool_run_mean_s": latency_s,
        "scheduler/longest_rollout_s": 0.7 * rollout_s,
        "scheduler/longest_rollout_tokens": chance.randint(180, 256),
        "scheduler/drafted_tokens": chance.randint(0, 400),
        "scheduler/cached_token_share": chance.uniform(0.9, 0.95),
        "scheduler/row_share": share,
        "scheduler/row_share/engine-0": share,
        "scheduler/busy_share": min(1.0, share + 0.08),
        "scheduler/tail_idle_share": chance.uniform(0.03, 0.08),
        "scheduler/kv_share_mean": chance.uniform(0.75, 0.9),
        "scheduler/kv_share_max": 1.0,
    }


def _timeline(step: int, rollout_s: float, chance: random.Random) -> dict[str, object]:
    """Four engines that are full until the queue is empty; in the first step one of them is lost and replaced."""
    engines = []
    for index in range(5 if step == 1 else 4):
        begin = 0.55 if index == 4 else 0.0
        end = 0.4 if step == 1 and index == 1 else 1.0
        last = min(end, chance.uniform(0.85, 1.0))
        at = [span / 240 for span in range(240)]
        rows = [64 * max(0.0, min(1.0, 6 * (last - t))) * chance.uniform(0.85, 1) if begin <= t < last else 0.0 for t in at]
        engines.append(
            {
                "name": f"engine-{index}",
                "max_rows": 64,
                "kv_tokens": 65536,
                "joined_s": begin * rollout_s,
                "left_s": end * rollout_s,
                "loss": "process 4711 has ended: SIGKILL" if end == 0.4 else "",
                "rows": [round(mean, 3) for mean in rows],
                "kv_shares": [round(mean / 64, 4) for mean in rows],
            }
        )
    queue = [max(0.0, 140 - 200 * span / 240) for span in range(240)]
    return {"step": step, "policy": "scheduler", "duration_s": rollout_s, "engines": engines, "queue": queue}


_THOUGHT = (
    'I should work this out with the tool.\n<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'
)
_ANSWER = "The result is {value}, so \\boxed{{{value}}} naïve ✓"


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = [
        _THOUGHT.format(code="print(12*34+5)"),
        _ANSWER.format(value=413),
        "What is 12 * 34 + 5?",
        "NameError: name is not defined",
    ]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pen:
    """Writes rollouts that look like those of a policy of some skill."""

    tokenizer: Tokenizer
    chance: random.Random
    question: str

    def write_step(self, run: RunDirectory, step: int, *, skill: float) -> None:
        writer = LineWriter(run.stage("rl").rollouts(step))
        groups = []
        for task_index in range(step * 4, step * 4 + 4):
            a, b, c = (self.chance.randint(11, 99) for _ in range(3))
            task = Task(
                id=f"arithmetic-{task_index}",
                question=self.question.format(a=a, b=b, c=c),
                answer=str(a * b + c),
                source="generator arithmetic",
            )
            rollouts = [self._rollout(task, (a, b, c), RolloutKey(task_index=task_index, attempt=n), skill) for n in range(6)]
            for scored in rollouts:
                writer.append({"rollout": _SCORED.dump_python(scored, mode="json"), "weights": {str(step): "c0ffee"}})
            groups.append(
                {"task": _TASK.dump_python(task, mode="json"), "task_index": task_index, "rollouts": _judge(rollouts)}
            )
        writer.close()
        write_json(run.stage("rl").selection(step), {"groups": groups})

    def _rollout(self, task: Task, numbers: tuple[int, int, int], key: RolloutKey, skill: float) -> ScoredTrajectory:
        a, b, c = numbers
        turns = []
        if self.chance.random() > 0.3 + 0.6 * skill:
            wrong = ToolCall(
                name="python",
                arguments=f'{{"code": "print({a}*{b}+x)"}}',
                outcome=ToolOutcome.ERROR,
                text="NameError: name 'x' is not defined",
                duration_s=0.061,
            )
            turns.append(self._turn(_THOUGHT.format(code=f"print({a}*{b}+x)"), wrong))
        is_right = self.chance.random() < 0.3 + 0.6 * skill
        value = a * b + c if is_right else a * b - c
        right = ToolCall(
            name="python",
            arguments=f'{{"code": "print({a}*{b}+{c})"}}',
            outcome=ToolOutcome.STDOUT,
            text=str(value),
            duration_s=0.034,
        )
        turns.append(self._turn(_THOUGHT.format(code=f"print({a}*{b}+{c})"), right))
        turns.append(self._turn(_ANSWER.format(value=value), None))
        trajectory = Trajectory(
            key=key,
            task_id=task.id,
            prompt_ids=tuple(self.tokenizer.encode(task.question + "\n").ids),
            turns=tuple(turns),
            stop_reason=StopReason.ANSWERED,
        )
        parts = {"answer": float(is_right), "format": 1.0}
        return ScoredTrajectory(trajectory=trajectory, reward=float(is_right), reward_parts=parts)

    def _turn(self, text: str, call: ToolCall | None) -> Turn:
        ids = tuple(self.tokenizer.encode(text).ids)
        observation = f"\n<tool_response>{call.text}</tool_response>\n" if call else ""
        entropies = tuple(round(abs(self.chance.gauss(0.3, 0.5)), 4) for _ in ids)
        return Turn(
            completion=Completion(
                ids=ids,
                logprobs=tuple(round(-abs(self.chance.gauss(0, 1)) * entropy, 4) for entropy in entropies),
                entropies=entropies,
                is_forced=tuple(place < 3 for place in range(len(ids))),
                spans=((0, len(ids)),),
                finish_reason=FinishReason.STOP,
                cached_tokens=0,
            ),
            calls=(call,) if call else (),
            observation_ids=tuple(self.tokenizer.encode(observation).ids),
            completion_text=text,
            observation_text=observation,
        )


def _judge(rollouts: list[ScoredTrajectory]) -> list[dict[str, object]]:
    rewards = [scored.reward for scored in rollouts]
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    entries: list[dict[str, object]] = []
    for scored in rollouts:
        errors = scored.trajectory.num_errors / max(1, len(scored.trajectory.calls))
        is_kept = spread > 0 and not (scored.reward == 1 and errors > 0)
        reason = "drawn among the wrong ones" if scored.reward < 1 else "right, few tool errors"
        if not is_kept:
            reason = "right, but with more tool errors than others" if spread else "all rewards of the group are equal"
        entries.append(
            {
                "key": _KEY.dump_python(scored.trajectory.key, mode="json"),
                "is_kept": is_kept,
                "reason": reason,
                "figures": {"p_err": errors, "p_format": 0.0, "weight": 1 / (1 + errors)},
                "advantage": (scored.reward - mean) / spread if is_kept else 0.0,
                "reward": scored.reward,
            }
        )
    return entries


if __name__ == "__main__":
    from strop.reports.page import write_report

    write_report(write_run(Path(sys.argv[1])))
