"""Values of the presets that the papers, the hand-out and the released code give, by the path of the key.

Where these are silent the value is a choice of strop, which the preset says next to its key.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]
_METHOD, _ADAMW, _BRANCH = "stages.rl.method.", "stages.rl.trainer.optimizer.", "stages.rl.branching."


DEVIATIONS = {
    ("r1-rl2", "rl", "updates"): (1700, 1712, "a rollout is 16 updates, and 1700 is no multiple of 16"),
    ("r1-rl2", "rl", "switch"): (1300, 1312, "nor is 1300; so the last 400 updates are 400"),
    ("r1-zero", "rl", "switch"): (8200, 8208, "nor is 8200"),
    ("r1-pipeline", "rl2", "updates"): (1700, 1712, "as r1-rl2"),
    ("r1-pipeline", "rl2", "switch"): (1300, 1312, "as r1-rl2"),
}
"""What a stage does otherwise than the source although the source gives it: (the source's number, the stage's, why)."""
UPDATES = {("r1-zero", "rl"): 10_400, ("r1-rl2", "rl"): 1700, ("r1-pipeline", "rl2"): 1700}
"""Of the whole stage, as published; how far a preset may be off says DEVIATIONS."""
SWITCHES = {("r1-zero", "rl"): (0, 8200), ("r1-rl2", "rl"): (0, 1300), ("r1-pipeline", "rl2"): (0, 1300)}
"""The schedule's entry, and the number of updates that its source gives for it."""


def _under(prefix: str, **values: Any) -> Values:
    return {prefix + key: value for key, value in values.items()}


def _keys(prefix: str, values: Values) -> Values:
    return {prefix + key: value for key, value in values.items()}


# What a method is that only clips; each takes its own over it.
_PLAIN = {
    **_under(_METHOD, kind="grpo", loss="clip", ratio="token", dual_clip=None, constant=None, refill_rounds=0, mismatch="off"),
    **_under(_METHOD, kl_coefficient=0.0, entropy_coefficient=0.0, high_entropy_share=1.0, overlong_filter=False, eps=1e-6),
    **_under(_METHOD, tied_by="reward"),
}
_BFLOAT16 = {"engine.dtype": "bfloat16", "stages.rl.trainer.precision": "bfloat16"}
_VERL = {**_BFLOAT16, **_under(_ADAMW, betas=[0.9, 0.999], weight_decay=0.01, grad_clip=1.0)}  # the defaults of its optimizer


def _of_stage(values: Values, stage: str, name: str) -> Values:
    """The rows of `values` that are about `stage`, for a stage of another preset that is called `name`."""
    prefix = f"stages.{stage}."
    return {f"stages.{name}.{key.removeprefix(prefix)}": value for key, value in values.items() if key.startswith(prefix)}


def _hub(stage: str, dataset: str) -> Values:
    return _under(f"stages.{stage}.tasks.", kind="hub", dataset=dataset)


# rStar2-Agent (arXiv 2508.20722): 512 questions, 16 of 32 rollouts, lr 1e-6 with a warm-up of 20 steps, clip 0.2 and 0.28,
# no KL, no entropy, temperature 1.
_RSTAR2 = {
    **_PLAIN,
    **_VERL,
    **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=4, epochs=1, prompt="rstar2"),
    **_under("stages.rl.", **{"sampling.temperature": 1.0, "reward.kind": "math", "reward.weights": {"accuracy": 1.0}}),
    "stages.rl.reward.weights.accuracy": 1.0,
    **_under(_ADAMW, lr=1e-6, warmup_updates=80, schedule="constant"),
    **_under(_METHOD, clip_low=0.2, clip_high=0.28, drop_tied=True, advantage="group_normalized"),
    **_under("stages.rl.limits.", max_calls=None, max_calls_per_turn=4, max_response_tokens=512),
    **_under("tools.python.", name="execute_python_code_with_standard_io", wall_s=4.0),
}
_RSTAR2_DATA = _under("stages.rl.tasks.", kind="jsonl", dataset="strop", path="data/rstar2-problems/kept.jsonl")
_AIME = {
    **_under("stages.rl.validation.", num_tasks=30, k=16, temperature=0.6, split="test"),
    **_under("stages.rl.validation.tasks.", **{"aime24.dataset": "aime24", "aime25.dataset": "aime25"}),
}
_ROC = {
    **_under(_METHOD, kind="grpo_roc", oversample=2.0, selection="sampled", min_positives=0, min_negatives=0, eps_roc=1e-2),
    **_under(_METHOD, quota_rounding="floor", aggregation="group_token_mean", repetition_weight=0.0),
}
_STAGE_1 = {"stages.rl.sampling.max_tokens": 8192, "stages.rl.limits.max_turns": 10, "engine.max_length": 2048 + 8192}
_STAGES_1_AND_2 = {**_STAGE_1, "engine.max_length": 2048 + 12288, "stages.rl.schedule[0].sampling.max_tokens": 12288}

# ARPO (arXiv 2507.19849) and its scripts.
_ARPO = {
    **_PLAIN,
    **_VERL,
    **_under(_ADAMW, lr=1e-6, schedule="constant", warmup_updates=0),
    **_under(_METHOD, kind="arpo", credit="soft", clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    **_under(_METHOD, drop_tied=False, advantage="group_normalized", shared_token_weight="per_descendant"),
    **_under(_BRANCH, beam_size=2, probe_tokens=20, base_probability=0.5, entropy_weight=0.2, scale="sum", rule="coin"),
    **_under(_BRANCH, probe="after_observation", threshold=None),
    **_under("stages.rl.", prompt="arpo", epochs=1, **{"sampling.temperature": 1.0, "reward.kind": "sum"}),
    **_under("stages.rl.reward.parts.arpo.", kind="arpo", weight=1.0, bonus=0.1, multi_tool=["search", "python"]),
    **_under("stages.rl.limits.", max_turns=16, max_calls_per_turn=1),
    **_under("tools.python.", kind="python", name="python", wall_s=120.0, max_running=64),
    **_under("tools.search.", kind="search", top_k=10, **{"backend.kind": "brightdata", "backend.retries": 3}),
    **_under("tools.search.backend.", country="cn"),
    **_under("stages.rl.tasks.", kind="hub", dataset="arpo-mix"),
    **_under("stages.rl.validation.", split="test", k=1, every_steps=5, temperature=0.0),
    "engine.kind": "torch",
}
_ARPO_RELEASED = {
    **_under(_BRANCH, scale="top10", probe="segment_before_call"),
    _METHOD + "dual_clip": 3.0,
    "engine.kind": "vllm",
    "stages.rl.limits.forced_eos": True,
}


def _arpo_eval(stage: str, **values: Any) -> Values:
    """The terms of the released evaluation scripts."""
    sampling = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_turn_tokens": 4096,
    }
    return {
        **_under(f"stages.{stage}.", kind="eval", init="rl", prompt="arpo", k=5, split="test", tools="real", **values),
        **_under(f"stages.{stage}.sampling.", **sampling),
        f"stages.{stage}.sampling.max_turn_tokens": 4096,
        f"stages.{stage}.limits.max_calls_per_tool": {"python": 5, "search": 10},
        f"stages.{stage}.limits.max_calls": None,
        "tools.search.max_result_chars": 1000,
    }


_JUDGED = _keys(
    "stages.gaia.reward.parts.accuracy.",
    {"kind": "judge", "judged_on": "answer", "judge.service.model": "Qwen2.5-72B-Instruct", "judge.words.Correct": 1.0},
)
_AIME24 = _arpo_eval("aime24", num_tasks=30, **{"tasks.dataset": "aime24", "reward.parts.accuracy.kind": "math"})
_GAIA = {**_arpo_eval("gaia", num_tasks=103, **{"tasks.dataset": "gaia"}), **_JUDGED}

# DeepSeek-R1 (arXiv 2501.12948): 8192 outputs a rollout, 16 mini-batches, one inner epoch, a new reference every 400 updates.
_R1 = {
    **_PLAIN,
    **_BFLOAT16,
    **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=16, epochs=1, prompt="deepseek_r1_zero"),
    **_under("stages.rl.", **{"sampling.max_tokens": 32768, "trainer.optimizer.lr": 3e-6, "reward.kind": "sum"}),
    **_under(_METHOD, kl_coefficient=0.001, kl_estimator="k3", advantage="group_normalized", drop_tied=False),
    **_under(_METHOD, aggregation="sequence_mean"),
    **_under(_ADAMW, schedule="constant", warmup_updates=0),
    **_under("stages.rl.reward.parts.accuracy.", kind="math", needs_box=False, weight=1.0),
    **_under("stages.rl.reward.parts.format.", kind="format", is_prefilled=False, newlines=False, weight=1.0),
    **_under("stages.rl.tasks.", kind="mixture", **{"parts.math.dataset": "dapo-math-17k-processed"}),
    **_under("stages.rl.tasks.", **{"parts.code.dataset": "apps", "parts.logic.kind": "knights"}),
    **_under("stages.rl.tasks.weights.", math=26, code=17, logic=15),
    **_under("stages.rl.reward.parts.code.", kind="code", weight=1.0, **{"where.domain": ["code"]}),
    **_under("stages.rl.reward.parts.logic.", kind="function", weight=1.0, right_above=0.0, **{"where.domain": ["logic"]}),
    "engine.max_length": 2048 + 32768,
}
_R1_CLIP = _under(_METHOD, clip_low=10.0, clip_high=10.0)
_R1_LANGUAGE = _under("stages.rl.reward.parts.language.", kind="language", language_fact="language", weight=1.0)
_R1_REFRESH = {"every_updates": 400, "refresh_reference": True}

# CS336 assignment 5.
_CS336 = {"engine.dtype": "bfloat16", "engine.max_length": 2048, "stages.base.path": "Qwen/Qwen2.5-Math-1.5B"}


def _cs336_stage(stage: str) -> Values:
    """What section 3.2 says of sampling and of judging."""
    return {
        **_hub(stage, "math"),
        **_under(f"stages.{stage}.", prompt="r1_zero", **{"sampling.temperature": 1.0, "sampling.max_tokens": 1024}),
        f"stages.{stage}.reward.kind": "sum",
        **_under(f"stages.{stage}.reward.parts.accuracy.", kind="r1_zero", fast=True, judge="dr_grpo", weight=1.0),
        **_under(f"stages.{stage}.reward.parts.format.", kind="r1_zero_format", weight=0.0),
    }


def _cs336_eval(stage: str) -> Values:
    return {**_cs336_stage(stage), **_under(f"stages.{stage}.", num_tasks=5000, k=1, tools="real", split="test")}


_CS336_RL = {
    **_PLAIN,
    **_BFLOAT16,
    **_CS336,
    **_cs336_stage("rl"),
    **_cs336_eval("after"),
    **_under("stages.rl.", steps=200, tasks_per_step=32, group_size=8, epochs=1, **{"sampling.min_tokens": 4}),
    **_under(_ADAMW, betas=[0.9, 0.95], weight_decay=0.0, grad_clip=1.0, schedule="constant", warmup_updates=0),
    **_under(_METHOD, drop_tied=False),
    **_under("stages.rl.validation.", num_tasks=1024, every_steps=10, k=1),
    "stages.rl.trainer.max_tokens_per_microbatch": 2 * 2048,
}
_CS336_GRPO = {**_under(_METHOD, advantage="group_normalized", aggregation="sequence_mean"), _ADAMW + "lr": 1e-5}

# Dr. GRPO (arXiv 2503.20783): no std, masked sum / 3000, beta 0; its framework's AdamW and clip.
_DRGRPO = {
    **_PLAIN,
    **_BFLOAT16,
    **_under("stages.rl.", tasks_per_step=128, group_size=8, epochs=1, updates_per_step=8),
    **_under("stages.rl.", **{"sampling.temperature": 1.0, "sampling.max_tokens": 3000, "sampling.min_tokens": 0}),
    **_under(_METHOD, advantage="mean_centered", aggregation="constant", constant=3000, clip_low=0.2, clip_high=0.2),
    **_under(_METHOD, drop_tied=False),
    **_under(_ADAMW, lr=1e-6, schedule="constant", betas=[0.9, 0.95], weight_decay=0.0, grad_clip=1.0),
    **_under("stages.rl.tasks.", kind="hub", question="problem", answer="answer"),
    **_under("stages.rl.reward.", kind="sum", **{"parts.accuracy.weight": 1.0}),
    "engine.max_length": 1024 + 3000,
}


def _arpo_sizes(*, rollouts: int, initial: int, calls: int, tasks: int, mini: int, prompt: int, response: int) -> Values:
    return {
        **_under("stages.rl.", group_size=rollouts, tasks_per_step=tasks, updates_per_step=tasks // mini),
        **_under("stages.rl.", **{"limits.max_calls": calls, "sampling.max_tokens": response}),
        _BRANCH + "initial_rollouts": initial,
        "engine.max_length": prompt + response,
    }


def _arpo_data(name: str, *, epochs: int, problems: int, tasks: int) -> Values:
    return {"stages.rl.tasks.name": f"dongguanting/{name}", "stages.rl.steps": epochs * (problems // tasks)}


def _sft_of_size(label: str, num: int, *, only_right: bool = False) -> Values:
    """Two epochs in batches of 32. What is filtered is judged by the answers of MATH's training file."""
    stage = f"stages.sft_{label}."
    return {
        **_under(stage, num_demonstrations=num, epochs=2, batch_size=32, prompt="r1_zero"),
        stage + "only_right": only_right,
        **_keys(stage + "demonstrator.", {"kind": "recorded"}),
        **_keys(stage + "tasks.", {"kind": "jsonl", "question": "prompt", "facts": ["response"]}),
        stage + "tasks.answer": "response",
        **_keys(stage + "truths.", {"question": "problem", "answer": "answer"} if only_right else {}),
        **_keys(stage + "trainer.", {"precision": "bfloat16", "optimizer.lr": 2e-5, "optimizer.schedule": "constant"}),
        stage + "trainer.optimizer.grad_clip": 1.0,
        **_cs336_eval(f"after_{label}"),
    }


_ARPO_REASONING = {
    **_ARPO,
    **_arpo_sizes(rollouts=16, initial=8, calls=3, tasks=128, mini=16, prompt=1536, response=4096),
    **_arpo_data("ARPO-RL-Reasoning-10K", epochs=2, problems=10_000, tasks=128),
    **_AIME24,
    "stages.rl.validation.num_tasks": 180,
}
_ARPO_8B = {
    **_ARPO,
    **_arpo_sizes(rollouts=16, initial=8, calls=6, tasks=128, mini=16, prompt=2000, response=10000),
    **_arpo_data("ARPO-RL-DeepSearch-1K", epochs=5, problems=1000, tasks=128),
}
_ARPO_14B = {
    **_ARPO,
    **_arpo_sizes(rollouts=12, initial=6, calls=6, tasks=64, mini=8, prompt=2000, response=6192),
    **_arpo_data("ARPO-RL-DeepSearch-1K", epochs=5, problems=1000, tasks=64),
}
_ARPO_SIDES = {"": dict[str, Any](), "-released": _ARPO_RELEASED}

# Conversations that are there already: nothing plays the tasks, and the length of a response is for estimates.
_SFT = {**_hub("sft", "math500"), "stages.sft.trainer.precision": "bfloat16"}
_SFT_SIZES = {"128": 128, "256": 256, "512": 512, "1024": 1024, "full": 7500}

_DAPO = {  # arXiv 2503.14476
    **_PLAIN,
    **_BFLOAT16,
    **_hub("rl", "dapo-math-17k-processed"),
    **_hub("aime24", "aime24"),
    **_under("stages.rl.", tasks_per_step=512, group_size=16, updates_per_step=16, epochs=1, prompt="question_only"),
    **_under("stages.rl.", **{"sampling.max_tokens": 16384 + 4096, "sampling.temperature": 1.0, "reward.kind": "sum"}),
    **_under("stages.rl.reward.parts.accuracy.", kind="question_only", fast=True, weight=2.0),  # 1 and -1
    **_under("stages.rl.reward.parts.overlong.", kind="soft_overlong", max_tokens=20480, cache_tokens=4096, weight=1.0),
    **_under(_METHOD, clip_low=0.2, clip_high=0.28, drop_tied=True, aggregation="group_token_mean", refill_rounds=10 - 1),
    **_under(_METHOD, advantage="group_normalized", tied_by="accuracy"),  # Eq. 11: neither all right nor all wrong
    **_under(_ADAMW, lr=1e-6, warmup_updates=20 * 16, schedule="constant", betas=[0.9, 0.999]),
    **_under(_ADAMW, weight_decay=0.1, grad_clip=1.0),
    **_under("stages.aime24.", k=32, num_tasks=30, prompt="question_only"),
    "stages.rl.steps": -(-5000 // 16),
    "engine.max_length": 2048 + 20480,
}

PUBLISHED: dict[str, Values] = {
    "rstar2-sft": {
        **_SFT,
        **_under("stages.sft.", batch_size=128, epochs=3, prompt="plain", **{"sampling.max_tokens": 16384}),
        **{f"stages.{name}.limit": num for name, num in (("magicoder", 48_000), ("tulu3", 30_000), ("nemotron", 27_000))},
        **_under("stages.sft.trainer.optimizer.", lr=5e-6, schedule="cosine", warmup_fraction=0.04),
        **_under("tools.python.", name="execute_python_code_with_standard_io"),
        "stages.base.path": "Qwen/Qwen3-14B-Base",
    },
    "arpo-sft": {
        **_SFT,
        **_under("stages.sft.", batch_size=16, epochs=3, prompt="arpo", **{"sampling.max_tokens": 4096}),
        **_under("stages.sft.trainer.optimizer.", lr=7e-6, schedule="cosine", warmup_fraction=0.1),
        **_under("tools.python.", kind="python", name="python"),
        "stages.base.path": "Qwen/Qwen2.5-7B-Instruct",
    },
    "rstar2-stage1": {**_RSTAR2, **_RSTAR2_DATA, **_AIME, **_ROC, **_STAGE_1, "stages.rl.steps": 300, "stages.rl.schedule": []},
    "rstar2-paper": {
        **_RSTAR2,
        **_RSTAR2_DATA,
        **_AIME,
        **_ROC,
        **_STAGES_1_AND_2,
        "stages.rl.steps": 300 + 85,
        "stages.rl.schedule[0].at_step": 301,
        "stages.rl.schedule[0].reset_optimizer": False,
        "stages.rl.schedule[0].refresh_reference": False,
    },
    "rstar2-stage3": {
        **_RSTAR2,
        **_RSTAR2_DATA,
        **_AIME,
        **_ROC,
        **_under("stages.rl.", steps=125, **{"sampling.max_tokens": 12288, "limits.max_turns": 15}),
        **_under("stages.hard.", k=8, min_right=0, max_right=7, num_tasks=None, prompt="rstar2", **{"limits.max_turns": 10}),
        **_under("stages.hard.", **{"sampling.temperature": 1.0, "sampling.max_tokens": 12288, "reward.kind": "math"}),
        **_under("stages.aime24.", k=16, num_tasks=30, prompt="rstar2", tools="real", split="test"),
        **_under("stages.aime24.", **{"sampling.temperature": 0.6, "sampling.max_tokens": 30720, "limits.max_turns": 30}),
        **_hub("aime24", "aime24"),
        "engine.max_length": 2048 + 12288,
        "stages.aime24.engine.max_length": 2048 + 30720,
    },
    "rstar2-qwen2.5-32b": {
        **_RSTAR2,
        **_RSTAR2_DATA,
        **_AIME,
        **_ROC,
        **_STAGES_1_AND_2,
        "stages.rl.steps": 700,
        "stages.rl.schedule[0].at_step": round(700 * 300 / 385) + 1,
        "stages.base.path": "Qwen/Qwen2.5-32B-Instruct",
    },
    "rstar2-grpo-tool": {
        **_RSTAR2,
        **_RSTAR2_DATA,
        **_AIME,
        **_STAGE_1,
        "stages.rl.steps": 300,
        **_under(_METHOD, kind="grpo", aggregation="group_token_mean"),
    },
    "rstar2-released": {
        **_RSTAR2,
        **_AIME,
        **_under("stages.rl.validation.", k=1, temperature=0.0, every_steps=5),
        **_ROC,
        **_STAGE_1,
        **_hub("rl", "dapo-math-17k-processed"),
        **_under("stages.rl.", tasks_per_step=128, steps=200, updates_per_step=1),
        **_under("stages.rl.limits.", max_turns=5, max_calls_per_turn=1),
        **_under(_ADAMW, warmup_updates=20),
        **_under(_METHOD, selection="greedy", min_positives=2, min_negatives=2, errors="text", turns="later"),
        "stages.rl.prompt": "rstar2_released",
        **_under(_METHOD, dual_clip=3.0, aggregation="token_mean", quota_rounding="half_even"),
        **_under("tools.python.", name="python_code_with_standard_io", max_chars=256),
        **_under("stages.rl.reward.", kind="sum", weights=None),
        **_under("stages.rl.reward.parts.accuracy.", kind="math", judge="fused", answer_in="response", weight=1.0),
        "stages.rl.reward.weights.accuracy": None,
        "stages.base.path": "Qwen/Qwen3-14B-Base",
    },
    **{f"arpo-reasoning{name}": {**_ARPO_REASONING, **more} for name, more in _ARPO_SIDES.items()},
    **{f"arpo-deepsearch-8b{name}": {**_ARPO_8B, **_GAIA, **more} for name, more in _ARPO_SIDES.items()},
    **{f"arpo-deepsearch-14b{name}": {**_ARPO_14B, **_GAIA, **more} for name, more in _ARPO_SIDES.items()},
    "arpo-deepsearch-offline": {
        **{key: value for key, value in _ARPO_8B.items() if ".backend." not in key},
        **{key: value for key, value in _GAIA.items() if key not in _JUDGED},
        "stages.gaia.reward.parts.accuracy.function": "strop.evaluation.short_answers:exact_match",
        **_under("stages.rl.tasks.", kind="parquet", dataset="arpo-mix", name=None),
        "tools.search.backend.kind": "bm25",
    },
    "r1-zero": {
        **_R1,
        **_under("stages.rl.validation.", num_tasks=30, k=16, temperature=0.6, top_p=0.95),
        "stages.rl.validation.tasks.aime24.dataset": "aime24",
        **_under(_METHOD, clip_low=0.2, clip_high=0.2),
        "stages.rl.steps": 10_400 // 16,
        "stages.rl.sampling.temperature": 1.0,
        "stages.rl.schedule[0].at_update": 8200,
        "stages.rl.schedule[0].sampling.max_tokens": 65536,
        **_keys("stages.rl.schedule[1].", _R1_REFRESH),
        "stages.rl.reward.parts.language": None,
        "engine.max_length": 2048 + 65536,
        "stages.base.path": "deepseek-ai/DeepSeek-V3-Base",
    },
    "r1-rl1": {
        **_R1,
        **_R1_CLIP,
        **_R1_LANGUAGE,
        "stages.rl.steps": 10_400 // 16,
        "stages.rl.sampling.temperature": 1.0,
        **_keys("stages.rl.schedule[0].", _R1_REFRESH),
    },
    "r1-rl2": {
        **_R1,
        **_R1_CLIP,
        **_R1_LANGUAGE,
        "stages.rl.steps": -(-1700 // 16),
        "stages.rl.sampling.temperature": 0.7,
        "stages.rl.schedule[0].at_update": 1700 - 400,
        **_under("stages.rl.schedule[0].tasks.", kind="jsonl", dataset="strop"),
        **_keys("stages.rl.schedule[1].", _R1_REFRESH),
        **_under("stages.rl.reward.parts.accuracy.where.", kind=["reasoning", ""]),
        **_under("stages.rl.reward.parts.format.", where={}),
        **_under("stages.rl.reward.parts.language.", where={}),
        **_under("stages.rl.reward.parts.helpful.", kind="scorer", weight=1.0, judged_on="summary", is_prefilled=False),
        **_keys("stages.rl.reward.parts.helpful.", {"where.kind": ["helpful"], "scorer.kind": "embedded"}),
        **_under("stages.rl.reward.parts.safety.", kind="scorer", weight=1.0, judged_on="response"),
        **_keys("stages.rl.reward.parts.safety.", {"where.kind": ["safety"], "scorer.kind": "embedded"}),
    },
    "cs336-zero-shot": {**_CS336, **_cs336_eval("zero_shot")},
    "cs336-sft": {
        **_CS336,
        **{key: value for each in _SFT_SIZES.items() for key, value in _sft_of_size(*each).items()},
        **_sft_of_size("filtered", 7500, only_right=True),
    },
    "cs336-expert-iteration": {
        **_CS336,
        **_cs336_stage("expert"),
        **_cs336_eval("after"),
        **_under("stages.expert.", steps=5, tasks_per_step=512, group_size=4, epochs=2, batch_size=32),
        **_keys("stages.expert.", {"sampling.min_tokens": 4, "trainer.precision": "bfloat16"}),
        **_keys("stages.expert.trainer.optimizer.", {"grad_clip": 1.0, "lr": 2e-5, "schedule": "constant"}),
    },
    "cs336-sft-llama": {
        **_under("stages.sft.", prompt="alpaca_sft", row_length=512, batch_size=32, epochs=1),
        **_under("stages.sft.trainer.optimizer.", lr=2e-5, warmup_fraction=0.03, schedule="cosine"),
        "stages.base.path": "meta-llama/Llama-3.1-8B",
    },
    "cs336-dpo-hh": {
        **_under("stages.dpo.", prompt="alpaca_sft", beta=0.1, batch_size=64, epochs=1),
        **_under("stages.dpo.validation.", num_pairs=200, product="best"),
        **_under("stages.dpo.trainer.optimizer.", lr=1e-6, betas=[0.0, 0.99], schedule="constant", weight_decay=0.0),
    },
    "cs336-grpo": {**_CS336_RL, **_CS336_GRPO, "stages.rl.updates_per_step": 1, _METHOD + "loss": "policy_gradient"},
    "cs336-grpo-off-policy": {
        **_CS336_RL,
        **_CS336_GRPO,
        **_under(_METHOD, clip_low=0.2, clip_high=0.2),
        "stages.rl.updates_per_step": 256 // 64,
    },
    "cs336-leaderboard": {
        **_CS336_RL,
        "stages.rl.steps": 2000,
        "stages.rl.budget_s": 4 * 3600,
        "engine.own_process": True,
        "stages.rl.async_rollouts.max_staleness": 1,
        "stages.rl.updates_per_step": 4,
        **_under(_METHOD, advantage="mean_centered", aggregation="constant", constant=1024, clip_low=0.2, clip_high=0.28),
        _METHOD + "mismatch": "truncate_token",  # the default for rollouts of older weights
        _ADAMW + "lr": 2e-5,
    },
    "drgrpo-1.5b": {
        **_DRGRPO,
        **_keys("stages.rl.", {"prompt": "r1_zero", "tasks.name": "datasets/train/math_12k", "steps": 20 * 12_000 // 128}),
        **_under("stages.rl.reward.parts.accuracy.", kind="r1_zero", fast=True),
        "stages.base.path": "Qwen/Qwen2.5-Math-1.5B",
    },
    "drgrpo-7b": {
        **_DRGRPO,
        **_keys("stages.rl.", {"prompt": "qwen_math", "tasks.name": "datasets/train/math_lvl3to5_8k"}),
        **_under("stages.rl.reward.parts.accuracy.", kind="question_only", fast=False),
        "stages.rl.steps": 20 * 8500 // 128,
        "stages.base.path": "Qwen/Qwen2.5-Math-7B",
    },
    "dapo": {**_DAPO, "stages.base.path": "Qwen/Qwen2.5-32B"},
    "forking-mask": {  # arXiv 2506.01939
        **_DAPO,
        **_under(_METHOD, high_entropy_share=0.2, high_entropy_over="update"),
        "stages.base.path": "Qwen/Qwen3-8B-Base",
    },
}

_SETS = ("toolace", "apigen_mt", "glaive", "magicoder", "tulu3", "nemotron")


def _rstar2_eval(stage: str, dataset: str, num: int) -> Values:
    """Section 5.1: 16 samples of each question, 30K tokens, temperature 0.6, T = 30."""
    return {
        **_hub(stage, dataset),
        **_under(f"stages.{stage}.", k=16, num_tasks=num, prompt="rstar2", tools="real", split="test"),
        **_under(f"stages.{stage}.sampling.", temperature=0.6, max_tokens=30720),
        f"stages.{stage}.engine.max_length": 2048 + 30720,
        f"stages.{stage}.limits.max_turns": 30,
    }


_RSTAR2_MATH = {"math500": 500, "aime24": 30, "aime25": 30, "hmmt25": 30}
PUBLISHED["rstar2-pipeline"] = {
    **{key: value for key, value in PUBLISHED["rstar2-stage3"].items() if not key.startswith("stages.")},
    **{key: value for key, value in PUBLISHED["rstar2-sft"].items() if not key.startswith("stages.sft.tasks.")},
    **{f"stages.{name}.prompt": "plain" for name in _SETS},
    **_of_stage(PUBLISHED["rstar2-paper"], "rl", "stages_1_2"),
    **_of_stage(PUBLISHED["rstar2-stage3"], "hard", "hard"),
    **_of_stage(PUBLISHED["rstar2-stage3"], "rl", "stage_3"),
    **{
        key: value
        for name in ("math500", "aime24", "aime25")
        for key, value in _rstar2_eval(f"sft_{name}", name, _RSTAR2_MATH[name]).items()
    },
    **{key: value for name in ("aime24", "aime25") for key, value in _rstar2_eval(f"stage_2_{name}", name, 30).items()},
    **{key: value for name, num in _RSTAR2_MATH.items() for key, value in _rstar2_eval(name, name, num).items()},
    **_rstar2_eval("gpqa_diamond", "gpqa-diamond", 198),
    **_under("stages.gpqa_diamond.reward.", kind="sum"),
    **_under("stages.gpqa_diamond.reward.parts.accuracy.", kind="function", weight=1.0),
    "stages.gpqa_diamond.reward.parts.accuracy.function": "strop.evaluation.short_answers:right_letter",
}

_REMEDIES = ({"sampling.temperature": 1.2}, {}, {"limits.max_turns": 20}, {}, {"reset_optimizer": True})  # {}: without a number
PUBLISHED["rstar2-remedies"] = {
    **{key: value for key, value in PUBLISHED["rstar2-stage3"].items() if key not in ("stages.rl.steps", "engine.max_length")},
    **{
        key: value
        for place, remedy in enumerate(_REMEDIES)
        for key, value in _keys(f"stages.rl.schedule[{place}].", {"at_step": 510 - 385 + 1, **remedy}).items()
    },
}


def _r1_sft(stage: str, *, batch: int, lr: float) -> Values:
    """B.4.2 and B.4.3: a cosine to a tenth, with no warm-up named."""
    return {
        **_under(f"stages.{stage}.", batch_size=batch, epochs=2, prompt="deepseek_r1_zero", only_right=False),
        **_under(f"stages.{stage}.", **{"sampling.max_tokens": 32768, "trainer.precision": "bfloat16"}),
        **_under(f"stages.{stage}.trainer.optimizer.", lr=lr, schedule="cosine", final_lr_fraction=0.1, warmup_updates=0),
    }


def _r1_recorded(stage: str, num: int) -> Values:
    """Conversations that somebody else has to bring, question by question."""
    return {
        **_under(f"stages.{stage}.", num_demonstrations=num, prompt="deepseek_r1_zero"),
        **_under(f"stages.{stage}.demonstrator.", kind="recorded"),
        **_under(f"stages.{stage}.tasks.", kind="jsonl", facts=["response"]),
    }


def _r1_reward_model(stage: str, judged_on: str) -> Values:
    """Section 3.1: one epoch of batches of 256 at 6e-6, 8192 tokens, for both."""
    return {
        **_under(f"stages.{stage}.", judged_on=judged_on, max_length=8192, batch_size=256, epochs=1, is_prefilled=False),
        **_under(f"stages.{stage}.trainer.optimizer.", lr=6e-6, schedule="constant", warmup_updates=0),
    }


def _r1_eval(stage: str, dataset: str) -> Values:
    """D.1: temperature 0.6, 32 768 tokens, 64 samples of AIME and 16 of MATH; top-p 0.95."""
    num, k = {"aime24": (30, 64), "math500": (500, 16)}[dataset]
    return {
        **_hub(stage, dataset),
        **_under(f"stages.{stage}.", k=k, num_tasks=num, prompt="deepseek_r1_zero", split="test"),
        **_under(f"stages.{stage}.sampling.", temperature=0.6, top_p=0.95, max_tokens=32768),
    }


_R1_AIME = {
    "dev1_aime24": "cold_start",
    "dev2_aime24": "rl1",
    "dev3_aime24": "sft",
    "aime24": "rl2",
    "small_aime24": "small",
    "student_aime24": "student",
}
_R1_MATH = {"math500": "rl2", "small_math500": "small", "student_math500": "student"}
PUBLISHED["r1-pipeline"] = {
    **{key: value for key, value in PUBLISHED["r1-rl1"].items() if not key.startswith("stages.")},
    "stages.base.path": "deepseek-ai/DeepSeek-V3-Base",
    **_r1_recorded("cold_start", 5000),  # "thousands"
    **_r1_sft("cold_start", batch=128, lr=5e-5),
    **_of_stage(PUBLISHED["r1-rl1"], "rl", "rl1"),
    **_under("stages.rejection.", k=16, num_tasks=None, max_per_task=None, drop_repeats=True, prompt="deepseek_r1_zero"),
    **_under("stages.rejection.", max_foreign_share=0.0, max_paragraph_chars=2000, allow_code_blocks=False),
    **_under("stages.rejection.", **{"sampling.temperature": 1.0, "sampling.max_tokens": 32768}),
    **_under("stages.rejection.tasks.", kind="jsonl", dataset="strop"),
    **_r1_recorded("general", 200_000),
    **_under("stages.mixed.counts.", rejection=600_000, general=200_000),
    **_r1_sft("sft", batch=128, lr=5e-5),
    **_r1_reward_model("helpful", "summary"),
    **_r1_reward_model("safety", "response"),
    **_of_stage(PUBLISHED["r1-rl2"], "rl", "rl2"),
    **_under("stages.rl2.reward.parts.", **{"helpful.scorer.stage": "helpful", "safety.scorer.stage": "safety"}),
    "stages.small.path": "Qwen/Qwen2.5-14B",
    **_r1_sft("student", batch=64, lr=7e-5),
    **{key: value for name in _R1_AIME for key, value in _r1_eval(name, "aime24").items()},
    **{key: value for name in _R1_MATH for key, value in _r1_eval(name, "math500").items()},
}
