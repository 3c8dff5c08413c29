"""What each kind of stage that makes data of a model, or a directory to give away, may say in a recipe."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.pipelines.graph import Input, Product
from strop.pipelines.reward_inputs import inputs_of_reward
from strop.pipelines.stage_config import Stage
from strop.tasks.config import ArithmeticConfig, CountdownConfig, LookupConfig
from strop.tasks.demonstrators import DemonstratorConfig


class SampledStage(Stage):
    """What every stage may say in which a model plays a set of tasks that is fixed beforehand."""

    init: str
    data: tuple[str, ...] = ()  # stages whose tasks are played, instead of `tasks`
    num_tasks: int | None = Field(default=None, ge=1)  # the first of them; all when not set
    k: int = Field(default=8, ge=1)  # rollouts of each task

    def inputs(self) -> tuple[Input, ...]:
        return (
            *Input.each("init", (self.init,), Product.MODEL),
            *Input.each("data", self.data, Product.TASKS),
            *inputs_of_reward(self.reward),
        )

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        is_endless = isinstance(self.tasks, ArithmeticConfig | CountdownConfig | LookupConfig)
        if self.num_tasks is None and not self.data and is_endless:
            raise ValueError(f"tasks.kind = {self.tasks.kind!r} makes tasks without end. Set num_tasks, or data.")
        return self

    @model_validator(mode="after")
    def _can_differ(self) -> Self:
        if self.sampling.temperature == 0 and self.k > 1:
            raise ValueError(
                f"sampling.temperature is 0: all {self.k} rollouts of a task would be the same. Raise it; 1.0 is usual. Or set"
                " k = 1."
            )
        return self


class CurationStage(Stage):
    """Problems that pass the rules of a curation file, as `strop data curate` keeps them; docs/data.md."""

    makes: ClassVar[Product] = Product.TASKS
    kind: Literal["curation"]
    recipe: str  # the curation file: sources and rules
    # By rule of the file that judges by a model's rollouts: the stage that plays them, instead of the rule's own `outcomes`.
    outcomes: dict[Literal["agreement", "difficulty"], str] = Field(default={})
    jobs: int = Field(default=2, ge=1)  # processes that judge

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("outcomes", self.outcomes.values(), Product.TASKS, Product.CONVERSATIONS)


class FilterStage(SampledStage):
    """Keeps the tasks that a policy gets right neither too often nor too rarely.

    rStar2-Agent (arXiv 2508.20722), section 4.3, drops those that are right 8 times of 8.
    """

    makes: ClassVar[Product] = Product.TASKS
    kind: Literal["filter"]
    min_right: int = Field(default=0, ge=0)  # of k
    max_right: int | None = Field(default=None, ge=0)  # of k; all but one when not set: 8 of 8 are dropped

    @property
    def most_right(self) -> int:
        return self.k - 1 if self.max_right is None else self.max_right

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if not self.min_right <= self.most_right <= self.k:
            raise ValueError(
                f"min_right is {self.min_right} and max_right {self.most_right} of k = {self.k} rollouts: no task could be"
                " kept, or max_right is more than there are. Choose min_right <= max_right <= k."
            )
        return self


class RejectionSamplingStage(SampledStage):
    """Keeps the right rollouts of a policy as conversations to imitate; DeepSeek-R1 (arXiv 2501.12948) section 2.3.

    Which figures R1 used is not published.
    """

    makes: ClassVar[Product] = Product.CONVERSATIONS
    kind: Literal["rejection_sampling"]
    max_per_task: int | None = Field(default=None, ge=1)  # of those that pass, the first
    drop_repeats: bool = True  # of right rollouts of a task with the same tokens, keep the first only
    max_foreign_share: float | None = Field(default=0.0, ge=0, le=1)  # of words, in another script than most; not set: any
    max_paragraph_chars: int | None = Field(default=2000, ge=1)  # not set: any
    allow_code_blocks: bool = False  # between ``` marks; a call of a tool is none


class MixStage(Stage):
    """One set of several, drawn without replacement and shuffled by the recipe's seed."""

    makes: ClassVar[Product] = Product.SAME
    kind: Literal["mix"]
    data: tuple[str, ...] = Field(min_length=1)
    counts: dict[str, int] | None = None  # rows of each stage
    shares: dict[str, float] | None = None  # of `total`, by stage; they add up to 1
    total: int | None = Field(default=None, ge=1)

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("data", self.data, Product.TASKS, Product.CONVERSATIONS)

    @model_validator(mode="after")
    def _says_how_many_once(self) -> Self:
        if repeated := sorted({name for name in self.data if self.data.count(name) > 1}):
            raise ValueError(f"data names {', '.join(repeated)} twice, but rows are drawn without replacement. Name it once.")
        if self.counts is not None and self.shares is not None:
            raise ValueError("give counts (rows of each stage) or shares of total, and not both.")
        if (self.shares is None) != (self.total is None):
            raise ValueError("shares are of total: give both, or neither.")
        for key, named in (("counts", self.counts), ("shares", self.shares)):
            if named is not None and set(named) != set(self.data):
                raise ValueError(f"{key} names {', '.join(sorted(named))}, but data names {', '.join(sorted(self.data))}.")
            if named is not None and any(value <= 0 for value in named.values()):
                raise ValueError(f"{key} has a value of 0 or less. Leave that stage out of data and {key}.")
        if self.shares is not None and abs(sum(self.shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares add up to {sum(self.shares.values()):g}. Make that 1.")
        return self


class DemonstrationsStage(Stage):
    """Conversations that a demonstrator plays in the real environment, for stages that mix them with others."""

    makes: ClassVar[Product] = Product.CONVERSATIONS
    kind: Literal["demonstrations"]
    init: str  # whose tokenizer they are written in
    demonstrator: DemonstratorConfig
    num_demonstrations: int = Field(ge=1)

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("init", (self.init,), Product.MODEL)


class ConversationsStage(Stage):
    """Conversations that others wrote down, of several turns with calls and results, for stages that imitate or mix them."""

    makes: ClassVar[Product] = Product.CONVERSATIONS
    kind: Literal["conversations"]
    path: str  # a .jsonl (or .json, .parquet) of rows with `messages`, as `strop data convert` writes them
    limit: int | None = Field(default=None, ge=1)  # the first of them; all when not set


class ExportStage(Stage):
    """A model directory to give away, with a model card and the lineage of everything that it stands on."""

    makes: ClassVar[Product] = Product.MODEL
    kind: Literal["export"]
    init: str
    results: tuple[str, ...] = ()  # evaluations that the card quotes

    def inputs(self) -> tuple[Input, ...]:
        return (
            *Input.each("init", (self.init,), Product.MODEL),
            *Input.each("results", self.results, Product.EVALUATION),
        )
