"""Makes a tool from any typed Python function: its name, its docstring and its signature are all that is needed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from strop import user_code
from strop.errors import StropError, UserError
from strop.registry import import_object
from strop.sandbox.protocol import CodeRunner
from strop.tools.limits import CallLimits
from strop.tools.protocol import TimedTool, Tool, ToolKind, ToolSpec
from strop.types import ToolOutcome

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?: ?\([^)]*\))?: *(.*)$")


class Function(ToolKind):
    """A typed Python function of your own."""

    class Config(CallLimits):
        """The function, its name and its limits."""

        function: str = Field(description="The function, as module:name, with the decorator `tool` or without.")
        name: str | None = Field(default=None, min_length=1, description="Its name in the prompt; by default its own.")
        wall_s: float = Field(default=30.0, gt=0, le=86_400 * 365, description="Seconds that a call may take.")

        def import_code(self, key: str) -> None:
            """As `imported`."""
            self.imported(key)

        def imported(self, key: str) -> FunctionTool:
            """Raises `UserError` when it cannot be imported, or is no function with types and a docstring."""
            found = import_object(self.function, key=f"{key}.function")
            function = found.function if isinstance(found, FunctionTool) else found
            if not callable(function):
                raise UserError(f"{key}.function: {self.function!r} is of type {type(function).__name__}, not a function.")
            try:
                return tool(function, name=self.name, wall_s=self.wall_s)
            except UserError as error:
                raise UserError(f"{key}.function: {self.function!r}: {error}") from error

    config: Config

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> list[Tool]:
        return [self.config.imported(key)]


class FunctionTool(TimedTool):
    """A typed function as a tool; made by `tool`."""

    def __init__(self, function: Callable[..., Any], spec: ToolSpec, arguments: type[BaseModel], wall_s: float | None) -> None:
        super().__init__(spec)
        self.function, self._arguments, self._wall_s = function, arguments, wall_s
        self._takes_seed = "seed" in inspect.signature(function).parameters

    @property
    def longest_call_s(self) -> float:
        return self._wall_s or 0.0

    async def answer(self, arguments: Mapping[str, object], *, seed: int) -> tuple[ToolOutcome, str]:
        """Run once. `seed` reaches the function only if it has a parameter of that name.

        A coroutine is cancelled at the limit; a plain function runs in a thread, which then goes on without its caller. The
        policy reads what the function raises, and an error for a result that cannot be shown.
        """
        try:
            checked = self._arguments.model_validate_json(json.dumps(dict(arguments)))
        except ValidationError as error:
            return ToolOutcome.WRONG_ARGUMENTS, self._explain(error)
        except StropError:
            raise
        except Exception as error:  # noqa: BLE001 - of a check that an argument's own type makes
            return ToolOutcome.ERROR, _in_words(error)
        values = {str(field.alias): getattr(checked, name) for name, field in type(checked).model_fields.items()}
        if self._takes_seed:
            values["seed"] = seed
        return await self._outcome(values)

    async def _outcome(self, values: Mapping[str, Any]) -> tuple[ToolOutcome, str]:
        limit = asyncio.timeout(self._wall_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self.function):
                    value = await self.function(**values)
                else:
                    value = await _in_thread(functools.partial(self.function, **values))
            text = _as_text(value)
        except StropError:
            raise  # ours: a broken machine, not a wrong call
        except TimeoutError as error:
            if limit.expired():
                return ToolOutcome.TIMEOUT, f"{self.spec.name} gave no answer within {self._wall_s:g} s."
            return ToolOutcome.TIMEOUT, _words(error) or "TimeoutError"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy reads what it raises
            return ToolOutcome.ERROR, _in_words(error)
        return (ToolOutcome.STDOUT if text else ToolOutcome.EMPTY), text

    def _explain(self, error: ValidationError) -> str:
        mistakes = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors(include_url=False)]
        return f"{self.spec.name}: wrong arguments. " + "; ".join(mistakes)


def tool(function: Callable[..., Any], *, name: str | None = None, wall_s: float | None = None) -> FunctionTool:
    """The tool that calls `function`. Usable as a decorator.

    Every parameter needs a type that JSON can carry (numbers, text, lists, `Literal`, `X | None`, enums, dataclasses, pydantic
    models) and must be passable by name; a parameter called `seed` is not shown to the policy: it receives the seed of the
    call. The docstring is the description; the `Args:` section describes the arguments.

    Args:
        name: what the policy calls it; the function's own name when None.
        wall_s: of one call; when None no limit but the rollout's `limits.deadline_s`, beyond which a call counts as our fault.

    Raises:
        UserError: no docstring, a parameter without a type, one that cannot be passed by name, or of a type that JSON lacks.
    """
    shown = name or str(getattr(function, "__name__", type(function).__name__))
    where = user_code.place_of(function)
    place = f"{shown} ({where})" if where else shown
    docstring = inspect.getdoc(function)
    if not docstring:
        raise UserError(f"tool {place}: it has no docstring. Write one: it is all that tells the policy what the tool does.")
    description, described = read_docstring(docstring)
    try:
        arguments = create_model(
            shown, __config__=ConfigDict(extra="forbid", strict=True), **_fields(function, place, described)
        )
        parameters = parameters_schema(arguments.model_json_schema(), tool=place)
    except PydanticUserError as error:
        raise UserError(
            f"tool {place}: a parameter has a type that JSON cannot carry: {error.message.splitlines()[0]} Take text, numbers,"
            " lists, dataclasses or pydantic models."
        ) from error
    return FunctionTool(function, ToolSpec(name=shown, description=description, parameters=parameters), arguments, wall_s)


def _fields(function: Callable[..., Any], name: str, described: Mapping[str, str]) -> dict[str, Any]:
    """The parameters that the policy is shown, as aliases of the fields of a pydantic model: it has names of its own."""
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
            field = Field(default, alias=parameter.name, description=described.get(parameter.name))
            fields[f"argument_{len(fields)}"] = (parameter.annotation, field)
    return fields


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {_words(error)}"


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as fault:  # noqa: BLE001 - an exception of the user's, whose words cannot be had either
        return f"(its message raised {type(fault).__name__})"


def _as_text(value: object) -> str:
    """Return `value` as text. Raises any exception if it cannot be made text."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=lambda each: to_json(each, fallback=_own_text))  # in one order in every process
    return to_json(value, fallback=_own_text).decode()


def _own_text(value: object) -> str:
    kind = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:  # its address, another one each time
        raise TypeError(f"the result holds a {kind.__name__}, which has no text of its own")
    return str(value)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, run in a daemon thread, which `asyncio.to_thread` cannot do."""
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if returned.done():  # given up in the meantime
            return
        if error is None:
            returned.set_result(value)
        else:
            returned.set_exception(error)

    def run() -> None:
        value, fault = None, None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            fault = RuntimeError("StopIteration was raised") if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(settle, value, fault)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name="strop-tool").start()
    return await returned


def parameters_schema(schema: Mapping[str, Any], *, tool: str) -> dict[str, Any]:
    """`schema`, of type object, as a policy is shown it: every `$ref` replaced by what it names, and without titles.

    Raises:
        UserError: a type refers to itself: written out it would have no end.
    """
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    inner = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema")}
    if inner.get("additionalProperties") is False:  # which goes without saying
        del inner["additionalProperties"]
    inner.setdefault("type", "object")
    inner.setdefault("properties", {})
    found: dict[str, Any] = _written_out(inner, definitions, (), tool)
    return found


def _written_out(node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], tool: str) -> Any:
    def written(each: Any) -> Any:
        return _written_out(each, definitions, inside, tool)

    if isinstance(node, list):
        return list(map(written, node))
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        if name in inside or name not in definitions:
            raise UserError(
                f"tool {tool}: the type {name} of an argument holds itself, or is not defined; the policy cannot be shown it."
                " Take a flat type, or text that the tool reads."
            )
        if isinstance(definitions[name], bool):  # anything, or nothing: further keys narrow neither for a policy
            return definitions[name]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return _written_out({**definitions[name], **siblings}, definitions, (*inside, name), tool)
    found = {}
    for key, value in node.items():
        if key == "properties" and isinstance(value, Mapping):  # whose keys are names, also one that is called title
            found[key] = {name: written(each) for name, each in value.items()}
        elif key != "title" or not isinstance(value, str):
            found[key] = written(value)
    return found


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text above the sections of a docstring, and the description of each argument in its `Args:` section."""
    text = inspect.cleandoc(text)
    sections = list(_SECTION.finditer(text))
    description = text[: sections[0].start()].strip() if sections else text
    described: dict[str, str] = {}
    ends = [section.start() for section in sections[1:]] + [len(text)]
    for section, end in zip(sections, ends, strict=False):
        if section[1] in ("Args", "Arguments", "Parameters"):
            described |= _arguments(text[section.end() : end])
    return description, described


def _arguments(section: str) -> dict[str, str]:
    described: dict[str, str] = {}
    name = ""
    for line in filter(str.strip, inspect.cleandoc(section).splitlines()):
        if named := _ARGUMENT.match(line):
            name, described[named[1]] = named[1], named[2].strip()
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described
