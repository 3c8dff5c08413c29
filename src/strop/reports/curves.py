"""Which metrics are drawn together in a report, and what a reader should look for in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

from strop.reports.plots import Look
from strop.reports.scales import Unit, unit_of


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot to draw: the metrics that it shows, with the name of each line."""

    title: str
    metrics: Mapping[str, str]
    note: str  # what to look for, in a sentence
    _: KW_ONLY
    interval: tuple[str, str] | None = None  # the metrics of the band around its one line
    look: Look = Look.LINE
    y_low: float | None = 0.0
    needs_tool_calls: bool = False  # its metrics are absent without a tool call
    is_by_time: bool = False  # against the seconds of training, where a stage logs them

    @property
    def unit(self) -> Unit:
        return unit_of(next(iter(self.metrics)))


_OPTIONAL = """
    branching/ budget/ machine/ tokens/ validation/ policy/ratio_max rollout/accuracy rollout/dropped rollout/entropy
    rollout/length_tokens_mean_ rollout/staleness scheduler/branch_cached scheduler/branches_displaced scheduler/displaced
    scheduler/kv_share scheduler/tool_ time/checkpoint time/score time/validation update/tokens_per_s
"""
_OPTIONAL_PREFIXES = tuple(_OPTIONAL.split())


def is_optional(metric: str) -> bool:
    """Whether not every run logs `metric`, so that an absent one is not reported as missing."""
    return metric.startswith(_OPTIONAL_PREFIXES)


_INTERVAL = ("validation/accuracy_low", "validation/accuracy_high")
VALIDATION = Panel(
    "Accuracy on held-out tasks",
    {"validation/accuracy": "accuracy"},
    "Of the policy as it was after the step; the band is the 95% interval over tasks.",
    interval=_INTERVAL,
)
VALIDATION_BY_TIME = replace(
    VALIDATION,
    title="Accuracy on held-out tasks by time",
    note="Against seconds of training, without the time of the validation itself.",
    is_by_time=True,
)
LEARNING = (
    Panel("Reward", {"rollout/reward_mean": "reward"}, "Mean over the step's rollouts, before any is dropped.", y_low=None),
    Panel(
        "Accuracy on training tasks", {"rollout/accuracy": "accuracy"}, "Share of the step's rollouts whose answer is right."
    ),
    VALIDATION,
    VALIDATION_BY_TIME,
    Panel(
        "Tool errors",
        {"rollout/tool_error_rate_correct": "in correct trajectories", "rollout/tool_error_rate": "in all trajectories"},
        "Share of calls that failed by the policy's fault.",
        needs_tool_calls=True,
    ),
    Panel("Response length", {"rollout/length_tokens_mean": "tokens"}, "Tokens after the prompt, tool output included."),
    Panel(
        "Length by outcome",
        {"rollout/length_tokens_mean_correct": "correct", "rollout/length_tokens_mean_wrong": "wrong"},
        "The same, of rollouts that are right and that are not.",
    ),
    Panel(
        "Truncated and void",
        {"rollout/truncated_fraction": "truncated", "rollout/void_fraction": "void"},
        "Truncated: out of tokens. Void: lost by an error of the machine, left out of training.",
    ),
    Panel(
        "Reflection words",
        {"rollout/reflection_words_per_1000_tokens": "words"},
        '"Wait", "check", "wrong" and the like, per thousand sampled tokens.',
    ),
    Panel(
        "Turns and tool calls", {"rollout/turns_mean": "turns", "rollout/tool_calls_mean": "tool calls"}, "Mean of a rollout."
    ),
)
_GRADIENT_NORM = Panel("Gradient norm", {"update/grad_norm": "gradient norm"}, "Before clipping.")
OPTIMISATION = (
    Panel("Entropy", {"policy/entropy_nats": "entropy"}, "Nats a token. A fall to zero ends exploration."),
    Panel(
        "Entropy of marked tokens",
        {"tokens/forking_entropy_nats": "forking", "tokens/reflection_entropy_nats": "in reflection words"},
        "Nats a token, of reasoning. Forking: of the rollout's 20% with the highest entropy.",
    ),
    Panel(
        "Marked tokens",
        {"tokens/forking_fraction": "forking", "tokens/reflection_fraction": "in reflection words"},
        "Share of the tokens of reasoning.",
    ),
    Panel(
        "Groups",
        {"groups/used": "used", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
        "All right, all wrong: of the answers, without other parts of the reward.",
    ),
    _GRADIENT_NORM,
    Panel("Loss", {"update/loss": "loss"}, "Of a policy gradient: its trend matters, its level does not.", y_low=None),
    Panel("Learning rate", {"update/learning_rate": "learning rate"}, "Of the step's last update."),
)
RATIOS = (  # of policies that are reinforced: imitation has none
    Panel(
        "Clip fraction",
        {"policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
        "Share of trained tokens whose ratio left the clip range.",
    ),
    Panel(
        "Sampler against trainer",
        {"policy/logprob_gap_mean": "mean", "policy/logprob_gap_max": "largest"},
        "Log-prob gap of the same tokens, in nats.",
    ),
    Panel(
        "Probability ratio",
        {"policy/ratio": "mean", "policy/ratio_max": "largest"},
        "New over old probability of a trained token.",
        y_low=None,
    ),
    Panel(
        "Staleness",
        {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
        "Number of publications between sampling and update. async_rollouts.max_staleness bounds it.",
    ),
)
IMITATION = (
    Panel("Rollouts kept", {"rollout/kept_fraction": "kept"}, "Share of the step's rollouts that are imitated."),
    Panel("Entropy of responses", {"rollout/entropy_nats": "entropy"}, "Nats a token, of all that was sampled, kept or not."),
    Panel(
        "Likelihood of what is imitated", {"policy/logprob_nats": "log-prob"}, "Nats a token, before each update.", y_low=None
    ),
)
MACHINE = (
    Panel(
        "Use of the machine's arithmetic",
        {"machine/flop_utilisation": "of large products"},
        "Matrix products of updates in a second, as a share of what large products reach here.",
    ),
    Panel("Memory", {"machine/peak_memory_mib": "MiB"}, "Peak memory of the trainer's process so far."),
)
TIME = (
    Panel(
        "Time by phase",
        {
            "time/rollout_s": "rollout",
            "time/score_s": "score",
            "time/update_s": "update",
            "time/publish_s": "publish",
            "time/checkpoint_s": "checkpoint",
        },
        "Of each step, one phase on top of the other. With async_rollouts, rollouts overlap with the steps before.",
        look=Look.AREA,
    ),
    Panel(
        "Throughput",
        {"rollout/tokens_per_s": "sampled", "update/tokens_per_s": "trained on"},
        "Tokens sampled per second of rollout, and trained on per second of updates.",
    ),
    Panel("Whole step", {"time/step_s": "step"}, "From the first rollout to the published weights."),
    Panel("Left of the budget", {"budget/left_s": "left"}, "Of the wall-clock time that the stage may train.", y_low=None),
    *MACHINE,
)
ENGINES = (
    Panel(
        "Engines at work",
        {
            "scheduler/row_share": "rows that decode",
            "scheduler/busy_share": "engines that decode",
            "scheduler/tail_idle_share": "idle at the end",
        },
        "Shares of the engines' time. Idle at the end: when no rollout waits.",
    ),
    Panel(
        "KV memory reserved",
        {"scheduler/kv_share_mean": "mean", "scheduler/kv_share_max": "largest"},
        "Share of what the engines have. Static reserves nothing.",
    ),
    Panel(
        "Rollouts that wait for an engine",
        {"scheduler/queue_mean": "mean", "scheduler/queue_max": "most"},
        "Over the time of the step.",
    ),
    Panel(
        "Waits",
        {
            "scheduler/queue_wait_mean_s": "for an engine",
            "scheduler/tool_wait_mean_s": "for tools to start",
            "scheduler/tool_run_mean_s": "for tools to answer",
        },
        "Mean of a rollout, and of a turn.",
    ),
    Panel(
        "Longest rollout",
        {"scheduler/longest_rollout_s": "longest"},
        "From its first turn to its end: a lower bound of the time of the step.",
    ),
    Panel("Longest response", {"scheduler/longest_rollout_tokens": "tokens"}, "Of one rollout, tool output included."),
    Panel(
        "Found in the cache",
        {"scheduler/cached_token_share": "cached"},
        "Share of the requests' tokens that were not computed again.",
    ),
    Panel(
        "Computed twice",
        {
            "scheduler/recomputed_tokens": "after evictions and lost engines",
            "scheduler/moved_tokens": "on an engine with less to do",
        },
        "Tokens.",
    ),
    Panel(
        "Lost",
        {
            "scheduler/engines_lost": "engines lost",
            "scheduler/restarts": "turns begun again",
            "scheduler/evictions": "evictions",
        },
        "How often in a step; a healthy one has none.",
    ),
)
BRANCHING = (  # ARPO (arXiv 2507.19849)
    Panel(
        "Branches and fresh rollouts per task",
        {"branching/branches_per_task": "branches", "branching/fresh_per_task": "fresh, to fill the group"},
        "In addition to the rollouts that start at the prompt.",
    ),
    Panel(
        "Shared tokens found in the cache",
        {"scheduler/branch_cached_token_share": "share"},
        "Of the tokens that branches have in common with their parents; the others are prefilled again.",
    ),
    Panel(
        "Branches that waited, and those given up for earlier ones",
        {"scheduler/branches_queued": "waited for room", "scheduler/branches_displaced": "given up"},
        "In a step; no group contains those given up.",
    ),
    Panel(
        "Tokens of branches given up",
        {"scheduler/displaced_tokens": "sampled", "scheduler/displaced_prefilled_tokens": "prefilled"},
        "Tokens that are sampled or prefilled and then discarded.",
    ),
    Panel(
        "What entropy adds to the odds of a branch",
        {"branching/weighted_delta_h_mean": "βΔH, mean", "branching/weighted_delta_h_abs_max": "|βΔH|, largest"},
        "Below 0.01, entropy has almost no influence on branching.",
        y_low=None,
    ),
    Panel(
        "Odds of a branch",
        {
            "branching/probability_mean": "α + βΔH, mean",
            "branching/wanted_rate": "wanted",
            "branching/branch_rate": "made, within the budget",
        },
        "Of all decisions whether to branch.",
    ),
)
BY_ENGINE = "scheduler/row_share/"  # one metric per engine, which the timeline shows
TOOL_CALLS = (  # rStar2-Agent (arXiv 2508.20722), Figure 6, as two plots: calls and seconds share no axis
    Panel(
        "Tool calls per step",
        {"rollout/tool_calls_dispatched": "calls"},
        "Those that reached a tool, in all rollouts together.",
    ),
    Panel(
        "Tool latency",
        {"time/tool_latency_mean_s": "mean", "time/tool_latency_p95_s": "95th percentile", "time/tool_latency_p50_s": "median"},
        "Of one call, from dispatch to result, queues included.",
    ),
)
_LEARNING_RATE = Panel("Learning rate", {"update/learning_rate": "learning rate"}, "Of each update.")
_TRAINED = Panel("Throughput", {"update/tokens_per_s": "tokens per second"}, "Tokens trained on per second.")
_STEP_TIME = Panel("Time", {"time/step_s": "step"}, "Seconds of each step.")
FINE_TUNING = (
    Panel("Loss", {"sft/loss": "loss"}, "Nats a token of the demonstrator's turns."),
    VALIDATION,
    _GRADIENT_NORM,
    _LEARNING_RATE,
    Panel("Throughput", {"sft/tokens_per_s": "tokens per second"}, "Tokens trained on per second."),
    *MACHINE,
    _STEP_TIME,
)
REWARD_MODEL = (
    Panel(
        "Loss of the reward model",
        {"reward_model/loss": "loss"},
        "Nats a preference, before each update; ln 2 = 0.693 knows nothing.",
    ),
    Panel(
        "Its accuracy",
        {"reward_model/accuracy": "in the right order"},
        "Of the step's preferences, before each update; a tie counts half.",
    ),
    Panel(
        "Its scores",
        {"reward_model/margin": "margin", "reward_model/score": "mean"},
        "By how much the better response is ahead, and the mean of all.",
        y_low=None,
    ),
    _GRADIENT_NORM,
    _LEARNING_RATE,
    _TRAINED,
    *MACHINE,
    _STEP_TIME,
)
PREFERENCES = (
    Panel(
        "Loss of DPO",
        {"dpo/loss": "the step's pairs", "validation/pair_loss": "held out"},
        "Nats a pair; ln 2 = 0.693 is the reference's. Before each update; of held-out pairs after it.",
    ),
    Panel(
        "Implicit-reward accuracy",
        {"dpo/accuracy": "the step's pairs", "validation/pair_accuracy": "held out"},
        "Pairs whose chosen response gained more on the reference than the rejected one; a tie counts half.",
    ),
    Panel(
        "Margin",
        {"dpo/margin": "the step's pairs", "validation/pair_margin": "held out"},
        "By how much the implicit reward of the chosen response is the larger one.",
        y_low=None,
    ),
    Panel(
        "Implicit rewards",
        {"dpo/chosen_reward": "chosen", "dpo/rejected_reward": "rejected"},
        "β times how many nats likelier a response became; both may fall while the margin grows.",
        y_low=None,
    ),
    Panel(
        "Implicit rewards of held-out pairs",
        {"validation/pair_chosen_reward": "chosen", "validation/pair_rejected_reward": "rejected"},
        "The same for pairs that are not trained on.",
        y_low=None,
    ),
    Panel("Entropy", {"policy/entropy_nats": "entropy"}, "Nats a token of the responses."),
    _GRADIENT_NORM,
    _LEARNING_RATE,
    _TRAINED,
    *MACHINE,
    Panel(
        "Time",
        {"time/step_s": "step", "time/score_s": "of it, scoring", "time/validation_s": "validation"},
        "Seconds of each step, and of its measuring on held-out pairs.",
    ),
)
