"""Makes a tool from any typed Python function: its name, its docstring and its signature are all that is needed."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from strop.errors import StropError, UserError
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.types import ToolOutcome


class FunctionTool(Tool):
    """A typed function as a tool; made by `tool`."""

    def __init__(self, function: Callable[..., Any], spec: ToolSpec, arguments: type[BaseModel]) -> None:
        self._function = function
        self._spec = spec
        self._arguments = arguments

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def call(self, arguments: Mapping[str, object], *, seed: int) -> ToolResult:
        """Run once; plain functions run in a thread. `seed` reaches the function only if it has a parameter of that name."""
        started_at = time.perf_counter()
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            return ToolResult(outcome=ToolOutcome.WRONG_ARGUMENTS, text=self._explain(error), duration_s=0.0)
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if "seed" in inspect.signature(self._function).parameters:
            values["seed"] = seed
        outcome, text = ToolOutcome.STDOUT, ""
        try:
            if inspect.iscoroutinefunction(self._function):
                value = await self._function(**values)
            else:
                value = await asyncio.to_thread(self._function, **values)
            text = "" if value is None else str(value)
        except StropError:
            raise  # ours: a broken machine, not a wrong call
        except Exception as error:  # noqa: BLE001 - whatever it raises is what the policy reads
            outcome, text = ToolOutcome.ERROR, f"{type(error).__name__}: {error}"
        if outcome is ToolOutcome.STDOUT and not text:
            outcome = ToolOutcome.EMPTY
        return ToolResult(outcome=outcome, text=text, duration_s=time.perf_counter() - started_at)

    def _explain(self, error: ValidationError) -> str:
        mistakes = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors(include_url=False)]
        return f"{self.spec.name}: wrong arguments. " + "; ".join(mistakes)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """The tool that calls `function`. Usable as a decorator.

    Every parameter needs a type that JSON can carry and must be passable by name; a parameter called `seed` is not shown to
    the policy: it receives the seed of the call. The docstring is the description.

    Raises:
        UserError: no docstring, a parameter without a type, or one that cannot be passed by name.
    """
    name, description = function.__name__, inspect.getdoc(function)
    if not description:
        raise UserError(f"tool {name}: it has no docstring. Write one: it is all that tells the policy what the tool does.")
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise UserError(
            f"tool {name}: the type of a parameter is unknown ({error}). Import it where the tool is defined."
        ) from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise UserError(f"tool {name}: parameter {parameter} cannot be passed by name. Give it a plain name.")
        if parameter.annotation is inspect.Parameter.empty:
            raise UserError(f"tool {name}: parameter {parameter.name!r} has no type. Write one, as in `{parameter.name}: str`.")
        if parameter.name != "seed":
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
    arguments = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    schema = arguments.model_json_schema()
    parameters = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
    return FunctionTool(function, ToolSpec(name=name, description=description, parameters=parameters), arguments)
