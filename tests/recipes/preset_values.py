"""What the papers, the hand-out and the released code give, by the path of the key: written down from them."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
_METHOD, _ADAMW, _BRANCH = "stages.rl.method.", "stages.rl.trainer.optimizer.", "stages.rl.branching."


def _under(prefix: str, **values: Any) -> Values:
    return {prefix + key: value for key, value in values.items()}


# rStar2-Agent (arXiv 2508.20722): 512 questions, 16 of 32 rollouts, lr 1e-6 with a warm-up of 20 steps, clip 0.2 and 0.28,
# no KL, no entropy, temperature 1.
_RSTAR2 = {
    **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=1, prompt="rstar2"),
    **_under("stages.rl.", **{"sampling.temperature": 1.0, "reward.kind": "math", "reward.weights": {"accuracy": 1.0}}),
    **_under(_ADAMW, lr=1e-6, warmup_updates=20, schedule="constant"),
    **_under(_METHOD, clip_low=0.2, clip_high=0.28, kl_coefficient=0.0, entropy_coefficient=0.0, dual_clip=None),
    **_under(_METHOD, drop_tied=True, advantage="group_normalized"),
}
_ROC = {
    **_under(_METHOD, name="grpo_roc", oversample=2.0, selection="sampled", min_positives=0, min_negatives=0),
    **_under(_METHOD, quota_rounding="floor", aggregation="group_token_mean", overlong_filter=False, repetition_weight=0.0),
}
_STAGE_1 = {"stages.rl.sampling.max_tokens": 8192, "stages.rl.limits.max_turns": 10}

# ARPO (arXiv 2507.19849) and its scripts.
_ARPO = {
    **_under(_ADAMW, lr=1e-6, schedule="constant", warmup_updates=0),
    **_under(_METHOD, name="arpo", credit="soft", clip_low=0.2, clip_high=0.2, kl_coefficient=0.0, aggregation="token_mean"),
    **_under(_METHOD, drop_tied=False, advantage="group_normalized"),
    **_under(_BRANCH, beam_size=2, probe_tokens=20, base_probability=0.5, entropy_weight=0.2, scale="sum", rule="coin"),
    **_under("stages.rl.", prompt="arpo", **{"sampling.temperature": 1.0, "reward.parts.arpo.bonus": 0.1}),
    **_under("tools.", **{"python.wall_s": 120.0, "python.max_running": 64, "search.backend.retries": 3}),
}

# DeepSeek-R1 (arXiv 2501.12948): 8192 outputs a rollout, 16 mini-batches, one inner epoch, a new reference every 400 updates.
_R1 = {
    **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=16, epochs=1),
    **_under("stages.rl.", **{"sampling.max_tokens": 32768, "trainer.optimizer.lr": 3e-6}),
    **_under(_METHOD, kl_coefficient=0.001, kl_estimator="k3", advantage="group_normalized", drop_tied=False),
    **_under("stages.rl.reward.parts.", **{"accuracy.weight": 1.0, "format.weight": 1.0}),
}
_R1_REFRESH = {"every_updates": 400, "refresh_reference": True}

# CS336 assignment 5.
_CS336_RL = {
    **_under("stages.rl.", steps=200, tasks_per_step=32, group_size=8, epochs=1, prompt="r1_zero"),
    **_under("stages.rl.", **{"sampling.temperature": 1.0, "sampling.max_tokens": 1024, "sampling.min_tokens": 4}),
    **_under(_ADAMW, betas=[0.9, 0.95], weight_decay=0.0, grad_clip=1.0, schedule="constant"),
    **_under(_METHOD, name="grpo", kl_coefficient=0.0, drop_tied=False),
    "stages.rl.validation.num_tasks": 1024,
    "stages.after.num_tasks": 5000,
}
_CS336_GRPO = {**_under(_METHOD, advantage="group_normalized", eps=1e-6, aggregation="sequence_mean"), _ADAMW + "lr": 1e-5}

# Dr. GRPO (arXiv 2503.20783): no std, masked sum / 3000, beta 0.
_DRGRPO = {
    **_under("stages.rl.", tasks_per_step=128, group_size=8, epochs=1, updates_per_step=8),
    **_under("stages.rl.", **{"sampling.temperature": 1.0, "sampling.max_tokens": 3000}),
    **_under(_METHOD, advantage="mean_centered", aggregation="constant", constant=3000, kl_coefficient=0.0),
    **_under(_ADAMW, lr=1e-6, schedule="constant"),
}


def _arpo_sizes(*, rollouts: int, initial: int, calls: int, tasks: int, mini: int, prompt: int, response: int) -> Values:
    return {
        **_under("stages.rl.", group_size=rollouts, tasks_per_step=tasks, updates_per_step=tasks // mini),
        **_under("stages.rl.", **{"limits.max_calls": calls, "sampling.max_tokens": response}),
        _BRANCH + "initial_rollouts": initial,
        "engine.max_length": prompt + response,
    }


def _sft_sizes() -> Values:
    sizes = {"128": 128, "256": 256, "512": 512, "1024": 1024}
    clips = {f"stages.sft_{size}.trainer.optimizer.grad_clip": 1.0 for size in [*sizes, "full"]}
    return {**{f"stages.sft_{label}.num_demonstrations": size for label, size in sizes.items()}, **clips}


PUBLISHED: dict[str, Values] = {
    "rstar2-sft": {
        **_under("stages.sft.", batch_size=128, steps=-(-3 * (165_000 + 30_000 + 27_000) // 128) - 1),
        **{f"stages.{name}.limit": num for name, num in (("magicoder", 48_000), ("tulu3", 30_000), ("nemotron", 27_000))},
        **_under("stages.sft.trainer.optimizer.", lr=5e-6, schedule="cosine", warmup_updates=round(0.04 * 5203)),
    },
    "arpo-sft": {
        **_under("stages.sft.", batch_size=16, steps=3 * 54_000 // 16, prompt="arpo"),
        **_under("stages.sft.trainer.optimizer.", lr=7e-6, schedule="cosine", warmup_updates=3 * 54_000 // 16 // 10),
    },
    "rstar2-stage1": {**_RSTAR2, **_ROC, **_STAGE_1, "stages.rl.steps": 300, "stages.rl.schedule": []},
    "rstar2-paper": {
        **_RSTAR2,
        **_ROC,
        **_STAGE_1,
        "stages.rl.steps": 300 + 85,
        "stages.rl.schedule[0].at_step": 301,
        "stages.rl.schedule[0].sampling.max_tokens": 12288,
        "stages.rl.schedule[0].reset_optimizer": False,
    },
    "rstar2-stage3": {
        **_RSTAR2,
        **_ROC,
        **_under("stages.rl.", steps=125, **{"sampling.max_tokens": 12288, "limits.max_turns": 15}),
        **_under("stages.aime24.", k=16, num_tasks=30, **{"sampling.temperature": 0.6, "limits.max_turns": 30}),
        "stages.aime24.sampling.max_tokens": 30720,
    },
    "rstar2-qwen2.5-32b": {
        **_RSTAR2,
        **_ROC,
        **_STAGE_1,
        "stages.rl.steps": 700,
        "stages.base.path": "Qwen/Qwen2.5-32B-Instruct",
        "stages.rl.schedule[0].sampling.max_tokens": 12288,
    },
    "rstar2-grpo-tool": {
        **_RSTAR2,
        **_STAGE_1,
        "stages.rl.steps": 300,
        **_under(_METHOD, name="grpo", aggregation="group_token_mean"),
    },
    "rstar2-released": {
        **_RSTAR2,
        **_under("stages.rl.", tasks_per_step=128, steps=200),
        **_under("stages.rl.limits.", max_turns=5, max_calls_per_turn=1),
        **_under(_METHOD, name="grpo_roc", oversample=2.0, selection="greedy", min_positives=2, min_negatives=2),
        **_under(_METHOD, dual_clip=3.0, aggregation="token_mean", quota_rounding="half_even"),
        **_under(_ADAMW, weight_decay=0.01, grad_clip=1.0),
        **_under("tools.python.", name="python_code_with_standard_io", wall_s=4.0, max_chars=256),
        "stages.rl.sampling.max_tokens": 8192,
    },
    "arpo-reasoning": {
        **_ARPO,
        **_arpo_sizes(rollouts=16, initial=8, calls=3, tasks=128, mini=16, prompt=1536, response=4096),
    },
    "arpo-deepsearch-8b": {
        **_ARPO,
        **_arpo_sizes(rollouts=16, initial=8, calls=6, tasks=128, mini=16, prompt=2000, response=10000),
    },
    "arpo-deepsearch-14b": {
        **_ARPO,
        **_arpo_sizes(rollouts=12, initial=6, calls=6, tasks=64, mini=8, prompt=2000, response=6192),
    },
    "r1-zero": {
        **_R1,
        "stages.rl.steps": 10_400 // 16,
        "stages.rl.sampling.temperature": 1.0,
        "stages.rl.schedule[0].at_update": 8200,
        "stages.rl.schedule[0].sampling.max_tokens": 65536,
        **_under("stages.rl.schedule[1].", **_R1_REFRESH),
        "stages.rl.reward.parts.language": None,
    },
    "r1-rl1": {
        **_R1,
        **_under(_METHOD, clip_low=10.0, clip_high=10.0),
        "stages.rl.sampling.temperature": 1.0,
        "stages.rl.reward.parts.language.weight": 1.0,
        **_under("stages.rl.schedule[0].", **_R1_REFRESH),
    },
    "r1-rl2": {
        **_R1,
        **{path.replace("stages.rl.", "stages.general."): value for path, value in _R1.items()},
        "stages.rl.steps": -(-1300 // 16),
        "stages.general.steps": 400 // 16,
        "stages.rl.sampling.temperature": 0.7,
        "stages.general.sampling.temperature": 0.7,
        "stages.rl.reward.parts.language.weight": 1.0,
        "stages.rl.reward.parts.helpful": None,
        **_under("stages.general.reward.parts.", **{"language.weight": 1.0, "helpful.weight": 1.0, "safety.weight": 1.0}),
        **_under("stages.general.reward.parts.", **{"helpful.judged_on": "summary", "safety.judged_on": "response"}),
        **_under("stages.rl.schedule[0].", **_R1_REFRESH),
    },
    "cs336-zero-shot": {
        **_under("stages.zero_shot.", num_tasks=5000, k=1, prompt="r1_zero"),
        **_under("stages.zero_shot.sampling.", temperature=1.0, max_tokens=1024),
        "stages.base.path": "Qwen/Qwen2.5-Math-1.5B",
    },
    "cs336-sft": _sft_sizes(),
    "cs336-expert-iteration": {
        **_under("stages.expert.", steps=5, tasks_per_step=512, drop_repeats=False),
        **_under("stages.expert.", **{"sampling.min_tokens": 4, "sampling.max_tokens": 1024, "sampling.temperature": 1.0}),
        "stages.expert.trainer.optimizer.grad_clip": 1.0,
    },
    "cs336-grpo": {**_CS336_RL, **_CS336_GRPO, "stages.rl.updates_per_step": 1, _METHOD + "loss": "policy_gradient"},
    "cs336-grpo-off-policy": {**_CS336_RL, **_CS336_GRPO, **_under(_METHOD, loss="clip", clip_low=0.2, clip_high=0.2)},
    "cs336-leaderboard": {
        **_CS336_RL,
        "stages.rl.steps": 2000,
        "stages.rl.budget_s": 4 * 3600,
        "stages.after.sampling.max_tokens": 1024,
        "stages.after.sampling.temperature": 1.0,
    },
    "drgrpo-1.5b": {**_DRGRPO, "stages.base.path": "Qwen/Qwen2.5-Math-1.5B", "stages.rl.prompt": "r1_zero"},
    "drgrpo-7b": {**_DRGRPO, "stages.base.path": "Qwen/Qwen2.5-Math-7B", "stages.rl.prompt": "qwen_math"},
    "dapo": {  # arXiv 2503.14476
        **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=16),
        **_under("stages.rl.", **{"sampling.max_tokens": 16384 + 4096, "sampling.temperature": 1.0}),
        **_under("stages.rl.reward.parts.overlong.", max_tokens=20480, cache_tokens=4096, weight=1.0),
        **_under(_METHOD, clip_low=0.2, clip_high=0.28, kl_coefficient=0.0, drop_tied=True, aggregation="group_token_mean"),
        **_under(_ADAMW, lr=1e-6, warmup_updates=20 * 16, schedule="constant"),
        "stages.aime24.k": 32,
    },
}
