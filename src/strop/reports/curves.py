"""Which metrics are drawn together in a report, and what a reader should look for in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strop.reports.plots import Look
from strop.reports.scales import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot to be: the metrics it shows, with the name of each line."""

    title: str
    metrics: Mapping[str, str]
    note: str  # what to look for, in a sentence
    unit: Unit = Unit.PLAIN
    optional: frozenset[str] = frozenset()  # not every run logs these; their absence is not worth a word
    interval: tuple[str, str] | None = None  # the metrics of the band around its one line
    look: Look = Look.LINE
    y_low: float | None = 0.0
    y_high: float | None = None
    is_by_time: bool = False  # against the seconds that a stage has trained, and only where a stage says them


_INTERVAL = ("validation/accuracy_low", "validation/accuracy_high")
VALIDATION = Panel(
    title="Accuracy on held-out tasks",
    metrics={"validation/accuracy": "accuracy"},
    note="Of the policy as it was after the step; the band is the 95% interval over tasks.",
    unit=Unit.PERCENT,
    optional=frozenset({"validation/accuracy"}),
    interval=_INTERVAL,
    y_high=1.0,
)
VALIDATION_BY_TIME = replace(
    VALIDATION,
    title="Accuracy on held-out tasks by time",
    note="Against seconds of training: of each point, when its policy was there. Validations count, but its own.",
    is_by_time=True,
)

LEARNING = (
    Panel(
        title="Reward",
        metrics={"rollout/reward_mean": "reward"},
        note="Mean over the step's rollouts, before any is dropped.",
        y_low=None,
    ),
    Panel(
        title="Accuracy on training tasks",
        metrics={"rollout/accuracy": "accuracy"},
        note="Share of the step's rollouts whose answer is right.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    VALIDATION,
    VALIDATION_BY_TIME,
    Panel(
        title="Tool errors",
        metrics={
            "rollout/tool_error_rate_correct": "in correct trajectories",
            "rollout/tool_error_rate": "in all trajectories",
        },
        note="Share of calls that the policy got wrong.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Response length",
        metrics={"rollout/length_tokens_mean": "tokens"},
        note="Tokens after the prompt, tool output included.",
    ),
    Panel(
        title="Length by outcome",
        metrics={"rollout/length_tokens_mean_correct": "correct", "rollout/length_tokens_mean_wrong": "wrong"},
        note="The same, of rollouts that are right and that are not.",
        optional=frozenset({"rollout/length_tokens_mean_correct", "rollout/length_tokens_mean_wrong"}),
    ),
    Panel(
        title="Truncated and void",
        metrics={"rollout/truncated_fraction": "truncated", "rollout/void_fraction": "void"},
        note="Out of tokens; lost by a fault of ours, left out.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Turns and tool calls",
        metrics={"rollout/turns_mean": "turns", "rollout/tool_calls_mean": "tool calls"},
        note="Mean of a rollout.",
    ),
)

OPTIMISATION = (
    Panel(
        title="Entropy",
        metrics={"policy/entropy_nats": "entropy"},
        note="Nats a token. A fall to zero ends exploration.",
    ),
    Panel(
        title="Groups",
        metrics={"groups/used": "used", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
        note="Right and wrong are the answers alone, whatever else is rewarded.",
    ),
    Panel(
        title="Gradient norm",
        metrics={"update/grad_norm": "gradient norm"},
        note="Before clipping.",
    ),
    Panel(
        title="Loss",
        metrics={"update/loss": "loss"},
        note="Of a policy gradient: its level says little.",
        y_low=None,
    ),
    Panel(
        title="Learning rate",
        metrics={"update/learning_rate": "learning rate"},
        note="Of the step's last update.",
    ),
)

RATIOS = (  # of policies that are reinforced: imitation has none
    Panel(
        title="Clip fraction",
        metrics={"policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
        note="Share of trained tokens whose ratio left the clip range.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Sampler against trainer",
        metrics={"policy/logprob_gap_mean": "mean", "policy/logprob_gap_max": "largest"},
        note="Log-prob gap of the same tokens, in nats.",
    ),
    Panel(
        title="Probability ratio",
        metrics={"policy/ratio": "mean", "policy/ratio_max": "largest"},
        note="New over old probability of a trained token.",
        optional=frozenset({"policy/ratio_max"}),
        y_low=None,
    ),
    Panel(
        title="Staleness",
        metrics={"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
        note="Publications by which the weights that sampled a token are behind; max_staleness bounds it.",
        optional=frozenset({"rollout/staleness_mean", "rollout/staleness_max"}),
    ),
)

IMITATION = (
    Panel(
        title="Rollouts kept",
        metrics={"rollout/kept_fraction": "kept"},
        note="Share of the step's rollouts that are imitated.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="Entropy of responses",
        metrics={"rollout/entropy_nats": "entropy"},
        note="Nats a token, of all that was sampled, kept or not.",
        optional=frozenset({"rollout/entropy_nats"}),
    ),
    Panel(
        title="Likelihood of what is imitated",
        metrics={"policy/logprob_nats": "log-prob"},
        note="Nats a token, before each update.",
        y_low=None,
        y_high=0.0,
    ),
)

MACHINE = (
    Panel(
        title="Use of the machine's arithmetic",
        metrics={"machine/flop_utilisation": "of large products"},
        note="Matrix products of updates in a second, as a share of what large products reach here.",
        unit=Unit.PERCENT,
        optional=frozenset({"machine/flop_utilisation"}),
    ),
    Panel(
        title="Memory",
        metrics={"machine/peak_memory_mib": "MiB"},
        note="The most that the trainer's process held until then.",
        optional=frozenset({"machine/peak_memory_mib"}),
    ),
)

TIME = (
    Panel(
        title="Time by phase",
        metrics={
            "time/rollout_s": "rollout",
            "time/score_s": "score",
            "time/update_s": "update",
            "time/publish_s": "publish",
            "time/checkpoint_s": "checkpoint",
        },
        note="Of each step, one phase on top of the other. With max_staleness, rollouts run beside the step before.",
        unit=Unit.SECONDS,
        optional=frozenset({"time/checkpoint_s", "time/score_s"}),
        look=Look.AREA,
    ),
    Panel(
        title="Throughput",
        metrics={"rollout/tokens_per_s": "sampled", "update/tokens_per_s": "trained on"},
        optional=frozenset({"update/tokens_per_s"}),
        note="Tokens sampled per second of rollout, and trained on per second of updates.",
    ),
    Panel(
        title="Whole step",
        metrics={"time/step_s": "step"},
        note="From the first rollout to the published weights.",
        unit=Unit.SECONDS,
    ),
    Panel(
        title="Left of the budget",
        metrics={"budget/left_s": "left"},
        note="Of the wall-clock time that the stage may train.",
        unit=Unit.SECONDS,
        optional=frozenset({"budget/left_s"}),
        y_low=None,
    ),
    *MACHINE,
)

ENGINES = (
    Panel(
        title="Engines at work",
        metrics={
            "scheduler/row_share": "rows that decode",
            "scheduler/busy_share": "engines that decode",
            "scheduler/tail_idle_share": "idle at the end",
        },
        note="Shares of the engines' time; at the end: once nobody waits.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="KV memory reserved",
        metrics={"scheduler/kv_share_mean": "mean", "scheduler/kv_share_max": "largest"},
        note="Share of what the engines have. Static reserves nothing.",
        unit=Unit.PERCENT,
        optional=frozenset({"scheduler/kv_share_mean", "scheduler/kv_share_max"}),
        y_high=1.0,
    ),
    Panel(
        title="Rollouts that wait for an engine",
        metrics={"scheduler/queue_mean": "mean", "scheduler/queue_max": "most"},
        note="Over the time of the step.",
    ),
    Panel(
        title="Waits",
        metrics={
            "scheduler/queue_wait_mean_s": "for an engine",
            "scheduler/tool_wait_mean_s": "for tools to start",
            "scheduler/tool_run_mean_s": "for tools to answer",
        },
        note="Mean of a rollout, and of a turn.",
        unit=Unit.SECONDS,
        optional=frozenset({"scheduler/tool_wait_mean_s", "scheduler/tool_run_mean_s"}),
    ),
    Panel(
        title="Longest rollout",
        metrics={"scheduler/longest_rollout_s": "longest"},
        note="From its first turn to its end; the step takes no less.",
        unit=Unit.SECONDS,
    ),
    Panel(
        title="Longest response",
        metrics={"scheduler/longest_rollout_tokens": "tokens"},
        note="Of one rollout, tool output included.",
    ),
    Panel(
        title="Found in the cache",
        metrics={"scheduler/cached_token_share": "cached"},
        note="Share of the requests' tokens that were not computed again.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="Computed twice",
        metrics={"scheduler/recomputed_tokens": "tokens"},
        note="After evictions, suspensions and lost engines.",
    ),
    Panel(
        title="Lost and refused",
        metrics={
            "scheduler/engines_lost": "engines lost",
            "scheduler/restarts": "turns begun again",
            "scheduler/evictions": "evictions",
            "scheduler/suspended": "suspended",
            "scheduler/branches_refused": "branches refused",
        },
        note="How often in a step; a healthy one has none.",
    ),
)
BRANCHING = (  # ARPO (arXiv 2507.19849)
    Panel(
        title="Branches and fresh rollouts per task",
        metrics={"branching/branches_per_task": "branches", "branching/fresh_per_task": "fresh, to fill the group"},
        note="Beside those that begin at the prompt at once.",
    ),
    Panel(
        title="Branches given up for earlier ones",
        metrics={"scheduler/branches_displaced": "branches"},
        note="In a step; they stand in no group.",
        optional=frozenset({"scheduler/branches_displaced"}),
    ),
    Panel(
        title="Tokens of branches given up",
        metrics={"scheduler/displaced_tokens": "sampled", "scheduler/displaced_prefilled_tokens": "prefilled"},
        note="What is not sampled twice costs these.",
        optional=frozenset({"scheduler/displaced_tokens", "scheduler/displaced_prefilled_tokens"}),
    ),
    Panel(
        title="What entropy adds to the odds of a branch",
        metrics={"branching/weighted_delta_h_mean": "βΔH, mean", "branching/weighted_delta_h_abs_max": "|βΔH|, largest"},
        note="Where the largest stays below 0.01, a coin decides.",
        y_low=None,
        optional=frozenset({"branching/weighted_delta_h_mean", "branching/weighted_delta_h_abs_max"}),
    ),
    Panel(
        title="Odds of a branch",
        metrics={
            "branching/probability_mean": "α + βΔH, mean",
            "branching/wanted_rate": "wanted",
            "branching/branch_rate": "made, within the budget",
        },
        note="Of all branches that could be, one decision after another.",
        optional=frozenset({"branching/probability_mean", "branching/wanted_rate", "branching/branch_rate"}),
    ),
)
UPDATES = (  # where a step has several: of each by itself what others draw as means of steps
    Panel(
        title="Loss of each update",
        metrics={"update/loss": "policy", "critic/loss": "critic"},
        note="The last update of a step stands at the step, the others before it.",
        optional=frozenset({"update/loss", "critic/loss"}),
        y_low=None,
    ),
    Panel(
        title="Gradient norm of each update",
        metrics={"update/grad_norm": "policy", "critic/grad_norm": "critic"},
        note="Before clipping. It grows within a step as the policy leaves its rollouts.",
        optional=frozenset({"update/grad_norm", "critic/grad_norm"}),
    ),
    Panel(
        title="Entropy at each update",
        metrics={"policy/entropy_nats": "entropy"},
        note="Nats a trained token, before the update.",
        optional=frozenset({"policy/entropy_nats"}),
    ),
    Panel(
        title="Clip fraction of each update",
        metrics={"policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
        note="Share of its trained tokens whose ratio left the clip range: none in a step's first.",
        unit=Unit.PERCENT,
        optional=frozenset({"policy/clip_fraction_low", "policy/clip_fraction_high"}),
    ),
    Panel(
        title="Probability ratio at each update",
        metrics={
            "policy/ratio": "mean",
            "policy/ratio_p01": "1% quantile",
            "policy/ratio_p99": "99% quantile",
            "policy/ratio_max": "largest",
        },
        note="New over old probability of a trained token, before the update.",
        optional=frozenset({"policy/ratio", "policy/ratio_p01", "policy/ratio_p99", "policy/ratio_max"}),
        y_low=None,
    ),
    Panel(
        title="Distance at each update",
        metrics={
            "policy/old_kl_nats": "from the rollouts' policy",
            "policy/sampler_kl_nats": "of the sampler from it",
            "policy/reference_kl_nats": "from the reference",
        },
        note="KL in nats a token, before the update.",
        optional=frozenset({"policy/old_kl_nats", "policy/sampler_kl_nats", "policy/reference_kl_nats"}),
    ),
    Panel(
        title="Updates skipped",
        metrics={"update/skipped": "policy", "critic/skipped": "critic"},
        note="1 where an update was not made: its batch is in the stage's skipped/.",
        optional=frozenset({"update/skipped", "critic/skipped"}),
    ),
)

BY_ENGINE = "scheduler/row_share/"  # one metric an engine: the timeline shows more

TOOL_CALLS = (  # rStar2-Agent (arXiv 2508.20722), Figure 6, as two plots: calls and seconds share no axis
    Panel(
        title="Tool calls per step",
        metrics={"rollout/tool_calls_dispatched": "calls"},
        note="Those that reached a tool, in all rollouts together.",
    ),
    Panel(
        title="Tool latency",
        metrics={
            "time/tool_latency_mean_s": "mean",
            "time/tool_latency_p95_s": "95th percentile",
            "time/tool_latency_p50_s": "median",
        },
        note="Of one call, from dispatch to result, queues included.",
        unit=Unit.SECONDS,
    ),
)

_GRADIENT_NORM = Panel(title="Gradient norm", metrics={"update/grad_norm": "gradient norm"}, note="Before clipping.")
_LEARNING_RATE = Panel(title="Learning rate", metrics={"update/learning_rate": "learning rate"}, note="Of each update.")
_TRAINED = Panel(title="Throughput", metrics={"update/tokens_per_s": "tokens per second"}, note="Tokens trained on per second.")
_STEP_TIME = Panel(title="Time", metrics={"time/step_s": "step"}, note="Seconds of each step.", unit=Unit.SECONDS)

FINE_TUNING = (
    Panel(title="Loss", metrics={"sft/loss": "loss"}, note="Nats a token of the demonstrator's turns."),
    VALIDATION,
    _GRADIENT_NORM,
    _LEARNING_RATE,
    Panel(title="Throughput", metrics={"sft/tokens_per_s": "tokens per second"}, note="Tokens trained on per second."),
    *MACHINE,
    _STEP_TIME,
)

REWARD_MODEL = (
    Panel(
        title="Loss of the reward model",
        metrics={"reward_model/loss": "loss"},
        note="Nats a preference, before each update; ln 2 = 0.693 knows nothing.",
    ),
    Panel(
        title="Its accuracy",
        metrics={"reward_model/accuracy": "in the right order"},
        note="Of the step's preferences, before each update; a tie counts half.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="Its scores",
        metrics={"reward_model/margin": "margin", "reward_model/score": "mean"},
        note="By how much the better response is ahead, and the mean of all.",
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
        title="Loss of DPO",
        metrics={"dpo/loss": "the step's pairs", "validation/pair_loss": "held out"},
        note="Nats a pair; ln 2 = 0.693 is the reference's. Before each update; of held-out pairs after it.",
        optional=frozenset({"validation/pair_loss"}),
    ),
    Panel(
        title="Implicit-reward accuracy",
        metrics={"dpo/accuracy": "the step's pairs", "validation/pair_accuracy": "held out"},
        note="Pairs whose chosen response gained more on the reference than the rejected one; a tie counts half.",
        unit=Unit.PERCENT,
        optional=frozenset({"validation/pair_accuracy"}),
        y_high=1.0,
    ),
    Panel(
        title="Margin",
        metrics={"dpo/margin": "the step's pairs", "validation/pair_margin": "held out"},
        note="By how much the implicit reward of the chosen response is the larger one.",
        optional=frozenset({"validation/pair_margin"}),
        y_low=None,
    ),
    Panel(
        title="Implicit rewards",
        metrics={"dpo/chosen_reward": "chosen", "dpo/rejected_reward": "rejected"},
        note="β times how many nats likelier a response became; both may fall while the margin grows.",
        y_low=None,
    ),
    Panel(
        title="Implicit rewards of held-out pairs",
        metrics={"validation/pair_chosen_reward": "chosen", "validation/pair_rejected_reward": "rejected"},
        note="The same of pairs that nothing is learnt from.",
        optional=frozenset({"validation/pair_chosen_reward", "validation/pair_rejected_reward"}),
        y_low=None,
    ),
    Panel(title="Entropy", metrics={"policy/entropy_nats": "entropy"}, note="Nats a token of the responses."),
    _GRADIENT_NORM,
    _LEARNING_RATE,
    _TRAINED,
    *MACHINE,
    Panel(
        title="Time",
        metrics={"time/step_s": "step", "time/score_s": "of it, scoring", "time/validation_s": "validation"},
        note="Seconds of each step, and of its measuring on held-out pairs.",
        unit=Unit.SECONDS,
        optional=frozenset({"time/validation_s"}),
    ),
)
