"""What each kind of stage that makes, trains or measures a model may say in a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.algorithms.config import MethodConfig
from strop.algorithms.group_method import GroupMethod
from strop.algorithms.mismatch import Mismatch
from strop.algorithms.policy_loss import Loss
from strop.algorithms.protocol import Column
from strop.algorithms.selection import WHOLE_REWARD
from strop.config import Config
from strop.errors import ConfigError
from strop.evaluation.verdict import verdict_of
from strop.pipelines.endings import problem_with_ending
from strop.pipelines.graph import Input, Product
from strop.pipelines.held_out import ValidationConfig
from strop.pipelines.metric_rule import MetricRule
from strop.pipelines.reward_inputs import inputs_of_reward
from strop.pipelines.schedule import Done, ScheduleEntry, first_steps, problem_with, reached, switched
from strop.pipelines.true_answers import problem_with_only_right
from strop.rewards.config import AnyRewardConfig, FunctionRewardConfig, RewardConfig
from strop.rewards.sum_config import SumRewardConfig
from strop.rollout.branching import BranchingConfig
from strop.rollout.environment import RolloutLimits
from strop.rollout.play import SamplingConfig
from strop.tasks.config import Split, TaskConfig
from strop.tasks.demonstrators import DemonstratorConfig
from strop.training.config import OptimizerConfig, Schedule, TrainerConfig


class TinyModel(Config):
    """A new Llama-architecture model with random weights and a byte-level BPE tokenizer trained on the demonstrations."""

    vocab_size: int = Field(default=448, ge=300)
    hidden_size: int = Field(default=128, ge=8)
    intermediate_size: int = Field(default=384, ge=8)
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=4, ge=1)
    max_length: int = Field(default=512, ge=64)
    # At width 128 the usual 0.02 delays the copying of digits by over a thousand updates; 0.08 is about 1/sqrt(width).
    initializer_range: float = Field(default=0.08, gt=0)
    num_texts: int = Field(default=1000, ge=10)  # demonstrations that the tokenizer is trained on

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width. Make it a"
                f" multiple of {2 * self.num_heads}."
            )
        return self


class Stage(Config):
    """What every stage may say: where tasks come from, how they are posed, played and judged, how a model is trained."""

    makes: ClassVar[Product]

    tasks: TaskConfig
    prompt: str = "rstar2"
    sampling: SamplingConfig = SamplingConfig()
    limits: RolloutLimits = RolloutLimits()
    reward: AnyRewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()

    def inputs(self) -> tuple[Input, ...]:
        """The stages that it stands on, each by the key that names it."""
        return ()


def init_of(stage: Stage) -> str:
    """The stage whose model it begins with; empty where it begins with none."""
    return next((each.stage for each in stage.inputs() if each.key == "init"), "")


def check_schedule(optimizer: OptimizerConfig, num_updates: int, *, key: str = "trainer.optimizer") -> None:
    """Raises `ValueError` when a cosine over `num_updates` would end before its warm-up does."""
    if optimizer.schedule is Schedule.COSINE and optimizer.warmup_updates >= num_updates:
        raise ValueError(
            f"{key}.warmup_updates is {optimizer.warmup_updates}, but the stage has {num_updates} updates in all:"
            " nothing is left for the cosine. Lower warmup_updates, raise steps, or set schedule = 'constant'."
        )


class ModelStage(Stage):
    """Where the weights come from: a directory or hub id that `transformers` loads, or a tiny model made here."""

    makes: ClassVar[Product] = Product.MODEL
    kind: Literal["model"]
    path: str | None = None
    tiny: TinyModel | None = None
    demonstrator: DemonstratorConfig | None = None  # whose texts the tiny model's tokenizer is trained on

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either path (a model directory or hub id) or tiny (a table of sizes), and not both.")
        if self.tiny is not None and self.demonstrator is None:
            raise ValueError("a tiny model's tokenizer is trained on demonstrations: give demonstrator too.")
        return self


class TrainingStage(Stage):
    """What every stage that trains may say."""

    makes: ClassVar[Product] = Product.MODEL
    init: str
    validation: ValidationConfig | None = None  # measure the policy on held-out tasks now and then

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("init", (self.init,), Product.MODEL)

    @model_validator(mode="after")
    def _validated_attempts_can_differ(self) -> Self:
        if self.validation is None or self.validation.k == 1:
            return self
        temperature = self.validation.temperature
        if (self.sampling.temperature if temperature is None else temperature) == 0:
            raise ValueError(
                f"validation plays at temperature 0: all {self.validation.k} rollouts of a task would be the same. Set"
                " validation.k = 1, or raise validation.temperature."
            )
        return self

    @property
    def longest_response(self) -> int:
        """The largest `sampling.max_tokens` that it ever has."""
        return self.sampling.max_tokens


class SftStage(TrainingStage):
    """Supervised fine-tuning on conversations of other stages, or on demonstrations played in the real environment.

    Called `distil`, it says that those conversations are a teacher's, another model than the student starts from;
    distillation.py holds the recipe to that.
    """

    kind: Literal["sft", "distil"]
    data: tuple[str, ...] = ()  # stages whose conversations it imitates; instead of a demonstrator
    demonstrator: DemonstratorConfig | None = None
    num_demonstrations: int | None = Field(default=None, ge=1)
    only_right: bool = False  # imitate those alone that the reward calls right; CS336 assignment 5, section 4.3
    steps: int = Field(ge=1)  # one update each
    batch_size: int = Field(default=32, ge=1)  # demonstrations of one update
    checkpoint_every: int = Field(default=100, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)

    def inputs(self) -> tuple[Input, ...]:
        judges = inputs_of_reward(self.reward) if self.is_judged else ()
        return (*super().inputs(), *Input.each("data", self.data, Product.CONVERSATIONS), *judges)

    @property
    def is_judged(self) -> bool:
        """Whether it asks its reward for anything."""
        return self.only_right or self.validation is not None

    @model_validator(mode="after")
    def _knows_what_is_right(self) -> Self:
        if self.only_right and (problem := problem_with_only_right(self.reward, self.tasks, self.demonstrator)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.kind == "distil" and (self.demonstrator is not None or self.num_demonstrations is not None or not self.data):
            wrong = "data names no stage" if not self.data else "a demonstrator is no model"
            raise ValueError(
                f"kind is 'distil', which imitates a teacher, but {wrong}. Name stages with rollouts of the teacher in data"
                " (kind = 'rejection_sampling'), and leave demonstrator and num_demonstrations out; or set kind = 'sft'."
            )
        if bool(self.data) == (self.demonstrator is not None):
            raise ValueError(
                "give either data (stages that make conversations) or demonstrator (who plays them now), and not both."
            )
        if (self.demonstrator is None) != (self.num_demonstrations is None):
            raise ValueError("num_demonstrations says how many the demonstrator plays: give both, or data and neither.")
        return self

    @model_validator(mode="after")
    def _fills_a_batch(self) -> Self:
        if self.num_demonstrations is not None and self.batch_size > self.num_demonstrations:
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {self.num_demonstrations} demonstrations: an epoch would not"
                " fill one batch. Lower batch_size, or raise num_demonstrations."
            )
        return self

    @model_validator(mode="after")
    def _schedule_ends_after_its_warmup(self) -> Self:
        check_schedule(self.trainer.optimizer, self.steps)
        return self


class EvalStage(Stage):
    """avg@k on held-out tasks, played like training's rollouts."""

    makes: ClassVar[Product] = Product.EVALUATION
    kind: Literal["eval"]
    init: str
    split: Split = "test"
    num_tasks: int = Field(default=100, ge=1)
    k: int = Field(default=4, ge=1)  # rollouts of each task
    tools: Literal["real", "noise", "none"] = "real"  # controls: results with their digits drawn anew, or no tool at all

    def inputs(self) -> tuple[Input, ...]:
        return (*Input.each("init", (self.init,), Product.MODEL), *inputs_of_reward(self.reward))

    @model_validator(mode="after")
    def _attempts_can_differ(self) -> Self:
        if self.sampling.temperature == 0 and self.k > 1:
            raise ValueError(
                f"sampling.temperature is 0: all {self.k} attempts at a task would be the same, and their mean, pass@k and"
                " interval would say what one attempt says. Set k = 1, or raise the temperature."
            )
        return self


class RolloutStage(TrainingStage):
    """What every stage may say that learns from its own rollouts: each step one rollout batch, updates, one publication."""

    data: tuple[str, ...] = ()  # stages whose tasks it trains on, instead of `tasks`
    steps: int = Field(ge=1)  # of expert iteration 5 in CS336 assignment 5, section 5
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)  # G, the rollouts of a task; of RL those that are learnt from
    epochs: int = Field(default=1, ge=1)  # passes over what a step has to learn from
    budget_s: float | None = Field(default=None, gt=0)  # begin no step that would end later; steps is then a limit
    end_when: tuple[MetricRule, ...] = ()  # what ends it before `steps`: the first rule that holds
    schedule: tuple[ScheduleEntry, ...] = ()  # what changes on the way
    checkpoint_every: int = Field(default=1, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)
    give_up_after: int = Field(default=3, ge=1)  # steps in a row that cannot learn, before the run stops (law 11)

    def inputs(self) -> tuple[Input, ...]:
        return (*super().inputs(), *Input.each("data", self.data, Product.TASKS), *inputs_of_reward(self.reward))

    def at(self, done: Done) -> Self:
        """The stage as it is for a step that begins with so much done."""
        return switched(self, reached(self.schedule, done))

    def with_each_tasks(self) -> tuple[Self, ...]:
        """The stage as it begins, and as it is with each of the other sets of tasks that its schedule has."""
        return (self, *(switched(self, [entry]) for entry in self.schedule if entry.tasks is not None))

    @property
    def validated_every(self) -> int | None:
        """After each so many steps it measures its policy on held-out tasks; None where it does not."""
        return None if self.validation is None else self.validation.every_steps

    @property
    def longest_response(self) -> int:
        return max(self.sampling.max_tokens, *(entry.sampling.max_tokens or 0 for entry in self.schedule), 0)

    @model_validator(mode="after")
    def _early_end_needs_no_cosine(self) -> Self:
        what = f"budget_s is {self.budget_s:g}" if self.budget_s is not None else "end_when may end the stage early"
        if (self.budget_s is not None or self.end_when) and self.trainer.optimizer.schedule is Schedule.COSINE:
            raise ValueError(
                f"{what}, but trainer.optimizer.schedule is 'cosine', which needs to know how many updates there will be. Set"
                f" schedule = 'constant', or leave {what.split()[0]} out."
            )
        has_verdict = bool(verdict_of(self.reward).parts)
        if problem := problem_with_ending(
            self.end_when, steps=self.steps, every_steps=self.validated_every, has_verdict=has_verdict
        ):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _schedule_holds(self) -> Self:
        firsts = first_steps(self.schedule, self.validated_every)
        for place, entry in enumerate(self.schedule):
            problem = self._rule_problem(entry.when, firsts[place]) if entry.when is not None else ""
            if problem := problem or self._schedule_problem(entry) or problem_with(self, self.schedule[: place + 1]):
                raise ValueError(f"schedule entry {place + 1} ({entry.moment}, {entry.what}): {problem}")
        return self

    def _rule_problem(self, rule: MetricRule, first: int) -> str:
        """Why the rule of an entry, which could hold after step `first` at the earliest, never does; empty where it may."""
        has_verdict = bool(verdict_of(self.reward).parts)
        if why := rule.why_blind(is_validated=self.validation is not None, has_verdict=has_verdict):
            return f"it waits for held-out accuracy, but {why}, or leave the entry out."
        if first >= self.steps:
            return (
                f"it could hold after step {first} at the earliest, but the stage has {self.steps} steps, so this never changes"
                " a thing. Make it earlier, or raise steps."
            )
        return ""

    def _schedule_problem(self, entry: ScheduleEntry) -> str:
        """Why an entry cannot be what is meant; empty where it can."""
        limit = max(entry.at_step or 0, (entry.every_steps or 0) + 1)
        if limit > self.steps:
            return f"the stage has {self.steps} steps, so this never changes a thing. Make it earlier, or raise steps."
        if entry.reset_optimizer and self.trainer.optimizer.schedule is Schedule.COSINE:
            return (
                "trainer.optimizer.schedule is 'cosine' over all updates of the stage, and would begin again without an end."
                " Set schedule = 'constant', or make two stages."
            )
        if entry.tasks is not None and self.data:
            return "data names stages whose tasks are played, so these never are. Leave data out, or make two stages."
        if entry.reward is not None and isinstance(self.reward, FunctionRewardConfig):
            return "reward.kind = 'function' has one part alone, and no weights. Leave reward out."
        if entry.reward is not None and isinstance(self.reward, SumRewardConfig):
            unknown = [name for name in entry.reward.weights if name not in self.reward.parts]
            if unknown:
                return f"reward has no part {unknown[0]!r}. The parts are {', '.join(self.reward.parts)}."
        return ""


class RlStage(RolloutStage):
    """Reinforcement learning by a method."""

    kind: Literal["rl"]
    method: MethodConfig
    updates_per_step: int = Field(default=1, ge=1)  # mini-batches, split by task
    max_staleness: int = Field(default=0, ge=0)  # publications that rollouts may be behind; 1: step k + 1 rolls while k trains
    branching: BranchingConfig | None = None  # ARPO: some of a task's rollouts begin at the prompt, the others branch off them
    critic_init: str | None = None  # a stage with the model or reward model that a critic starts from; unset: as the policy

    def inputs(self) -> tuple[Input, ...]:
        critic = () if self.critic_init is None else (self.critic_init,)
        return (*super().inputs(), *Input.each("critic_init", critic, Product.MODEL, Product.REWARD_MODEL))

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.tasks_per_step % self.updates_per_step:
            raise ValueError(
                f"tasks_per_step is {self.tasks_per_step}, which does not split into updates_per_step ="
                f" {self.updates_per_step} equal mini-batches. Nearest that do: {self._nearest_that_divide()}."
            )
        try:
            self.method.num_rollouts(self.group_size)
        except ConfigError as error:  # of a method by itself, which does not know where it stands
            raise ValueError(str(error)) from error
        if isinstance(self.method, GroupMethod) and self.method.tied_by != WHOLE_REWARD:
            parts = verdict_of(self.reward).parts
            if self.method.tied_by not in parts:
                raise ValueError(
                    f"method.tied_by is {self.method.tied_by!r}, but no part of reward that says what is right is called so."
                    f" Such parts: {', '.join(parts) or 'none'}. Name one of them, or set tied_by = {WHOLE_REWARD!r}."
                )
        if self.method.loss is Loss.POLICY_GRADIENT and self.updates_per_step * self.epochs > 1:
            raise ValueError(
                f"method.loss is 'policy_gradient', which is right for one update after sampling, but a step makes"
                f" {self.updates_per_step * self.epochs}: updates_per_step = {self.updates_per_step}, epochs = {self.epochs}."
                ' Set both to 1, or loss = "no_clip".'
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: every rollout of a task would be the same. Raise it; 1.0 is usual.")
        return self

    def _nearest_that_divide(self) -> str:
        tasks, updates = self.tasks_per_step, self.updates_per_step
        divisors = [number for number in range(1, tasks + 1) if tasks % number == 0]
        around = [
            max(each for each in divisors if each < updates),
            min((each for each in divisors if each > updates), default=0),
        ]
        multiples = [tasks // updates * updates, (tasks // updates + 1) * updates]
        updates_to_set, tasks_to_set = (" or ".join(str(each) for each in pair if each) for pair in (around, multiples))
        return f"updates_per_step = {updates_to_set}, or tasks_per_step = {tasks_to_set}"

    @model_validator(mode="after")
    def _can_be_played_ahead(self) -> Self:
        if not self.max_staleness:
            return self
        if self.max_staleness > 1:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, but one step at most is played ahead of the one that is trained on, so"
                " that rollouts are one publication behind. Set max_staleness = 1."
            )
        if self.method.mismatch is Mismatch.OFF:
            raise ValueError(
                "max_staleness is 1, so rollouts are sampled from older weights than they train, but method.mismatch is 'off':"
                " nothing would correct for that. Leave method.mismatch out (it is then 'truncate_token'), or set"
                " max_staleness = 0."
            )
        for number, entry in enumerate(self.schedule, start=1):
            if (entry.at_update is not None or entry.when is not None) and entry.switches:
                unknown = "how many updates were made, which is" if entry.when is None else "metrics of steps, which are"
                raise ValueError(
                    f"schedule entry {number} ({entry.moment}, {entry.what}) hangs on {unknown} not known yet when a step is"
                    " played ahead (max_staleness is 1). Say at_step, or set max_staleness = 0."
                )
        return self

    @model_validator(mode="after")
    def _branches_within_its_rollouts(self) -> Self:
        if self.branching is not None and self.branching.initial_rollouts > self.rollouts_per_task:
            raise ValueError(
                f"branching.initial_rollouts is {self.branching.initial_rollouts}, but a task has {self.rollouts_per_task}"
                " rollouts in all. Lower it (ARPO begins half of them at the prompt), or raise group_size."
            )
        return self

    @model_validator(mode="after")
    def _has_use_for_a_critic(self) -> Self:
        if self.critic_init is not None and self.method.critic is None:
            raise ValueError(
                f"critic_init is {self.critic_init!r}, but method {self.method.name!r} has no critic. Leave it out, or set"
                ' method.name = "ppo".'
            )
        return self

    @model_validator(mode="after")
    def _leaves_steps_to_the_policy(self) -> Self:
        if self.steps_of_critic_alone >= self.steps:
            raise ValueError(
                f"trainer.critic.alone_steps is {self.trainer.critic.alone_steps}, but the stage has {self.steps} steps: none"
                " is left for the policy. Lower alone_steps, or raise steps."
            )
        return self

    @model_validator(mode="after")
    def _schedule_ends_after_its_warmup(self) -> Self:
        check_schedule(self.trainer.optimizer, self.num_updates)
        if self.method.critic is not None:
            check_schedule(self.trainer.critic.optimizer, self.num_critic_updates, key="trainer.critic.optimizer")
        return self

    def _schedule_problem(self, entry: ScheduleEntry) -> str:
        limit = max(entry.at_update or 0, entry.every_updates or 0)
        if limit >= self.num_updates:
            return f"the stage has {self.num_updates} updates, so this never changes a thing. Make it earlier, or raise steps."
        if entry.refresh_reference and Column.REFERENCE_LOGPROBS not in self.method.needs:
            return "there is no reference, since method.kl_coefficient is 0. Raise it, or leave refresh_reference out."
        return super()._schedule_problem(entry)

    @property
    def rollouts_per_task(self) -> int:
        return self.method.num_rollouts(self.group_size)

    @property
    def steps_of_critic_alone(self) -> int:
        """First steps in which the policy is not updated; 0 for a method without a critic."""
        return 0 if self.method.critic is None else self.trainer.critic.alone_steps

    @property
    def num_updates(self) -> int:
        """Of the policy, where every step is full."""
        return (self.steps - self.steps_of_critic_alone) * self.updates_per_step * self.epochs

    @property
    def num_critic_updates(self) -> int:
        """Of the critic, if there is one."""
        return self.steps * self.updates_per_step * self.epochs


class ExpertIterationStage(RolloutStage):
    """Expert iteration: SFT on the rollouts of a step that are right."""

    kind: Literal["expert_iteration"]
    batch_size: int = Field(default=32, ge=1)  # rollouts of one update, at most
    drop_repeats: bool = False  # of right rollouts of a task with the same tokens, imitate the first only

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"sampling.temperature is 0: all {self.group_size} rollouts of a task would be the same. Raise it; 1.0 is"
                " usual. Or set group_size = 1."
            )
        if self.trainer.optimizer.schedule is Schedule.COSINE:
            raise ValueError(
                "trainer.optimizer.schedule is 'cosine', which needs to know how many updates there will be; here that hangs"
                " on how many rollouts are right. Set schedule = 'constant'."
            )
        return self

    def _schedule_problem(self, entry: ScheduleEntry) -> str:
        if entry.refresh_reference:
            return "expert iteration has no reference. Leave refresh_reference out."
        return super()._schedule_problem(entry)

    @property
    def rollouts_per_task(self) -> int:
        return self.group_size
