"""Says in a recipe how a reward model is trained, and which parts of a reward stand on one."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from strop.pipelines.graph import Input, Product
from strop.pipelines.stage_config import Stage


class RewardModelStage(Stage):
    """A head of one number on the decoder of another stage's model, trained on preferences."""

    makes: ClassVar[Product] = Product.REWARD_MODEL
    kind: Literal["reward_model"]
    init: str
    path: str  # a .jsonl of pairs, or of single labelled responses
    test_path: str | None = None  # what it is measured on; unset: a share of `path`
    test_share: float = Field(default=0.1, gt=0, lt=1)  # of the prompts of `path`, where there is no test_path
    judged_on: Literal["summary", "response"] = "summary"  # DeepSeek-R1: helpful the summary, safety the response
    think_tag: str = Field(default="think", pattern=r"^\w+$")
    is_prefilled: bool = False  # the prompts had the opening tag, so a response without a closing one is all thought
    max_length: int = Field(default=8192, ge=2)  # tokens of question and response; longer ones are left out, and counted
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=256, ge=1)  # pairs, or single responses, of one update
    checkpoint_every: int = Field(default=100, ge=1)  # steps
    keep_checkpoints: int = Field(default=2, ge=1)

    def inputs(self) -> tuple[Input, ...]:
        return Input.each("init", (self.init,), Product.MODEL)

    @model_validator(mode="after")
    def _trains_all_weights_here(self) -> Self:
        if self.trainer.lora is not None:
            raise ValueError("trainer.lora is set, but a reward model trains all of its weights. Leave it out of this stage.")
        if self.trainer.workers:
            raise ValueError(
                f"trainer.workers is {self.trainer.workers}, but a reward model trains in one process. Set it to 0."
            )
        return self
