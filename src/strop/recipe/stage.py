"""The base class of stages: inputs, checks, cost and run; and the config keys that stages with rollouts share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from strop import config as configs
from strop.config import Config
from strop.engine.config import EngineChoice
from strop.registry import Component
from strop.rewards import MathReward, Reward, SumReward
from strop.rollout.branching import BranchingConfig
from strop.rollout.environment import EnvironmentKind, RolloutLimits, Tools
from strop.rollout.player import SamplingConfig
from strop.tasks.protocol import Split, TaskSource
from strop.types import derive_seed

if TYPE_CHECKING:
    from strop.errors import UserError
    from strop.recipe.recipe import Recipe
    from strop.stages.context import StageContext
    from strop.training.config import TrainerConfig


_NUM_FIRST_TASKS = 64
STAGE_BEFORE = "the stage before"
"""`init` of a stage that was made in Python without one; `strop.train` replaces it."""


class Product(StrEnum):
    """What a stage makes for other stages."""

    MODEL = "a model"
    TASKS = "tasks"
    CONVERSATIONS = "conversations"
    REWARD_MODEL = "a reward model"
    EVALUATION = "an evaluation"
    SAME = "the kind of its input"  # of stages that take tasks or conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A stage from which another one reads: the key that names it, and what it may make."""

    key: str
    stage: str
    wants: tuple[Product, ...]

    @classmethod
    def each(cls, key: str, stages: Iterable[str], *wants: Product) -> tuple[Self, ...]:
        """Return an input for each of `stages`."""
        return tuple(cls(key=key, stage=stage, wants=wants) for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a stage samples from engines. Tokens are upper bounds, with every response at its limit."""

    tokens: int = 0
    steps: int = 1
    rollouts: int = 0  # of a step, which are played at once
    kept: float = 1.0  # share of the tokens that stays on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a stage trains. Tokens are upper bounds, and include those that a critic or a reference computes too."""

    trainer: TrainerConfig
    tokens: int = 0
    flops_per_parameter: int = 6  # of a token: 2 forward and 4 backward, and 2 for each pass that scores
    copies: float = 4.0  # of the weights in float32: themselves, their gradients and two moments
    tokens_of_update: int  # distinct ones, computed at once if they fit into a micro-batch
    longest: int  # tokens of the longest row, which is a micro-batch by itself if it is longer than one
    saved: int = 1  # models in a checkpoint, each with two moments
    checkpoints: int = 1  # that are kept
    in_one_process: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a stage would do, in words and in numbers."""

    arithmetic: str = ""  # in words: steps x tasks x rollouts
    sampled: Sampled | None = None
    trained: Trained | None = None
    overlaps: bool = False  # a step's rollouts are played while the step before is trained on
    time_limit_s: float | None = None
    lines: tuple[str, ...] = ()  # changes on the way, a line each

    @property
    def tokens(self) -> int:
        """At most, sampled if anything is; otherwise trained."""
        return next((each.tokens for each in (self.sampled, self.trained) if each is not None), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage made."""

    summary: str  # one sentence
    product: Path | None = None  # a model directory or a file of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What estimates know of the model that a stage starts from; 0 where nothing is known."""

    num_parameters: int = 0
    num_active: int = 0  # parameters that compute one token: fewer in a mixture of experts
    num_layers: int = 0
    hidden_size: int = 0
    kv_values: int = 0  # of one token, in all layers
    num_kv_heads: int = 0  # of keys and values, in a layer
    num_heads: int = 0  # of attention, in one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a check or an estimate may ask of the machine and of the run."""

    is_elsewhere: bool = False  # hardware is planned for that need not be here
    model: Model = field(default_factory=Model)  # that the stage in question starts from


class Stage(Component):
    """Base of all stages. The plan, the doctor and the run call only these methods."""

    kinds = {  # noqa: RUF012  (a constant table)
        "model": "strop.stages.model:ModelStage",
        "demonstrations": "strop.stages.conversations:DemonstrationsStage",
        "conversations": "strop.stages.conversations:Conversations",
        "sft": "strop.stages.sft:SFT",
        "distil": "strop.stages.sft:Distillation",
        "eval": "strop.stages.evaluation:Eval",
        "harness": "strop.stages.harness:Harness",
        "rl": "strop.stages.rl:RL",
        "expert_iteration": "strop.stages.expert_iteration:ExpertIteration",
        "curation": "strop.stages.curation:Curation",
        "filter": "strop.stages.filter:Filter",
        "rejection_sampling": "strop.stages.rejection_sampling:RejectionSampling",
        "mix": "strop.stages.mix:Mix",
        "reward_model": "strop.stages.reward_model:RewardModel",
        "dpo": "strop.stages.dpo:DPO",
        "export": "strop.stages.export:Export",
    }
    makes: ClassVar[Product]
    reads: ClassVar[tuple[Product, ...]] = (Product.TASKS,)
    """What the stages in its key `data` make."""
    plays: ClassVar[bool] = False
    """Whether it plays its tasks on engines."""
    root_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of the recipe's root that change what the stage makes, in addition to `seed` and `threads`."""

    class Config(Config):
        """A stage has no keys by itself."""

    config: Config

    def __init__(self, config: configs.Config | None = None, /, **keys: Any) -> None:
        init = self.Config.model_fields.get("init")
        if config is None and init is not None and init.is_required():
            keys.setdefault("init", STAGE_BEFORE)
        super().__init__(config, **keys)

    @property
    def opens_engines(self) -> bool:
        """Whether it plays anything, if only to measure itself."""
        return self.plays

    @property
    def is_judged(self) -> bool:
        """Whether it asks its reward for anything."""
        return self.opens_engines

    def inputs(self) -> tuple[Input, ...]:
        """The stages that it reads from, each with the key that names it: those in `init`, in `data` and in its reward."""
        init, data = getattr(self.config, "init", ""), getattr(self.config, "data", ())
        models = scoring_stages(self.config.reward) if self.is_judged and hasattr(self.config, "reward") else {}
        return (
            *Input.each("init", [init] if init else [], Product.MODEL),
            *Input.each("data", data, *self.reads),
            *(
                Input(key=f"reward.parts.{part}.scorer.stage", stage=stage, wants=(Product.REWARD_MODEL,))
                for part, stage in models.items()
            ),
        )

    def files(self) -> Mapping[str, Path]:
        """Files and directories that it reads from elsewhere, by key: that in `path`."""
        path = getattr(self.config, "path", None)
        return {} if path is None else {"path": Path(path).expanduser()}

    def keys(self) -> dict[str, Any]:
        """The keys that change what it makes, as JSON values: all of its own, unless it says otherwise."""
        return self.table()

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        """What would make the stage fail, found before the run starts: each problem with its key, value and remedy.

        A plan shows a `NotThere`, and any other error ends it.
        """
        yield from ()

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        """What the stage would do and cost."""
        return Estimate()

    def size(self) -> Model:
        """What is known of the model before the stage has made it: of a stage that takes weights from outside."""
        return Model()

    @abstractmethod
    async def run(self, context: StageContext) -> StageResult:
        """Run from where it stands. A stage that was interrupted is run again in the same directory."""

    @property
    def init(self) -> str:
        """The stage whose model it begins with; empty where there is none."""
        return next((each.stage for each in self.inputs() if each.key == "init"), "")


def scoring_stages(reward: Reward) -> dict[str, str]:
    """By part of the reward, the stage whose reward model it asks."""
    if not isinstance(reward, SumReward):
        return {}
    scorers = {name: getattr(part.config, "scorer", None) for name, part in reward.parts.items()}
    return {name: stage for name, scorer in scorers.items() if (stage := getattr(scorer, "stage", None)) is not None}


class PosedKeys(Stage.Config):
    """Keys of a stage whose tasks are posed to a model or to a demonstrator."""

    tasks: TaskSource = Field(description="Where tasks come from.")
    prompt: str = Field(default="rstar2", description="The prompt: one of strop's, or the path of a .toml file.")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="How completions are sampled.")
    limits: RolloutLimits = Field(default=RolloutLimits(), description="Limits of one rollout.")
    may_truncate: ClassVar[bool] = False

    @model_validator(mode="after")
    def _samples_all(self) -> Self:
        if self.sampling.truncation is not None and not self.may_truncate:
            raise ValueError(
                "sampling has top_p, top_k, min_p or a repetition_penalty, but what is trained on is sampled from the whole"
                " distribution. Set them in the sampling of a stage of kind 'eval'."
            )
        return self


def check_differ(temperature: float, num: int, remedy: str, *, key: str = "sampling.temperature") -> None:
    """Raises `ValueError` if `num` rollouts of a task are sampled at temperature 0."""
    if temperature == 0 and num > 1:
        raise ValueError(f"{key} is 0: all {num} rollouts of a task would be the same. Raise it; {remedy}")


class PlayedKeys(PosedKeys):
    """Keys of a stage that plays its tasks on engines and scores the rollouts."""

    reward: Reward = Field(default=MathReward(), description="How a trajectory is scored.")
    environment: EnvironmentKind = Field(default=Tools(), description="What answers the policy: tools, or a class of yours.")
    engine: EngineChoice | None = Field(
        default=None, description="Keys of `engine` with another value in this stage. Default: the recipe's engine."
    )

    @property
    def played_split(self) -> Split:
        """The part of `tasks` that is played."""
        return "train"

    @property
    def has_own_tasks(self) -> bool:
        """Whether it plays `tasks`, and not what another stage made."""
        return not getattr(self, "data", ())

    @property
    def num_first_tasks(self) -> int:
        """How many of the first prompts must fit into an engine; later ones that do not fit are void."""
        return _NUM_FIRST_TASKS

    @property
    def forks(self) -> BranchingConfig | None:
        """Where its rollouts branch; None where they do not."""
        return None

    @property
    def longest_response(self) -> int:
        """The largest `sampling.max_tokens` that the stage ever has."""
        return self.sampling.max_tokens

    def task_seed(self, seed: int, name: str) -> int:
        """The seed of the tasks of the stage `name` in a recipe with `seed`."""
        return derive_seed("run", seed, name, "tasks")

    def with_each_tasks(self) -> Sequence[Self]:
        """The keys as the stage begins, and as they are with each other set of tasks that its schedule has."""
        return (self,)
