"""A stage: averages the weights of the models of two stages."""

from pydantic import Field
from transformers import AutoTokenizer

from strop import Stage
from strop.recipe.stage import Estimate, Input, Product, StageResult
from strop.stages.context import product_of
from strop.training.models import load_model


class Average(Stage):
    """Makes a model whose weights are the mean of two others'."""

    makes = Product.MODEL

    class Config(Stage.Config):
        init: str = Field(description="A stage with a model.")
        other: str = Field(description="Another stage with a model of the same sizes.")

    def inputs(self):
        return (
            *Input.each("init", [self.config.init], Product.MODEL),
            *Input.each("other", [self.config.other], Product.MODEL),
        )

    def plan(self, name, recipe, machine):
        return Estimate(arithmetic=f"the mean of {self.config.init} and {self.config.other}")

    async def run(self, context):
        first, second = (product_of(context.run, stage) for stage in (self.config.init, self.config.other))
        model, other = load_model(first), load_model(second).state_dict()
        model.load_state_dict({name: (tensor + other[name]) / 2 for name, tensor in model.state_dict().items()})
        model.save_pretrained(context.directory.model)
        AutoTokenizer.from_pretrained(first).save_pretrained(context.directory.model)
        return StageResult(summary="averaged two models", product=context.directory.model)
