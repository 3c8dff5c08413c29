"""Says in a recipe how a policy learns from preference pairs by DPO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from strop.pipelines.graph import Input, Product
from strop.pipelines.held_out import HeldOutConfig
from strop.pipelines.stage_config import Stage


class PairValidationConfig(HeldOutConfig):
    """The policy is measured by its implicit rewards of pairs that are held out."""

    every_steps: int = Field(default=50, ge=1)
    num_pairs: int = Field(default=200, ge=1)  # the first of those held out, or as many as there are; CS336, supplement


class DpoStage(Stage):
    """DPO (arXiv:2305.18290) on pairs of responses; the defaults are those of CS336 assignment 5's supplement."""

    makes: ClassVar[Product] = Product.MODEL
    kind: Literal["dpo"]
    init: str  # whose model it starts from, which is the reference, too
    path: str  # a .jsonl of pairs
    test_path: str | None = None  # what is held out; unset: a share of `path`
    test_share: float = Field(default=0.1, gt=0, lt=1)  # of the prompts of `path`, where there is no test_path
    beta: float = Field(default=0.1, gt=0)  # how dear it is to leave the reference
    max_length: int = Field(default=8192, ge=2)  # tokens of prompt and response; pairs with more are left out, and counted
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=64, ge=1)  # pairs of one update
    validation: PairValidationConfig = PairValidationConfig()
    checkpoint_every: int = Field(default=100, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("init", (self.init,), Product.MODEL)
