"""Calls a user's code. A mistake in it is one `ConfigError` with the function, file and line."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from strop.errors import ConfigError, StropError, in_short

ValueT = TypeVar("ValueT")

_NOT_OWN = [Path(__file__).parent.resolve(), *(Path(sysconfig.get_path(each)).resolve() for each in ("stdlib", "scripts"))]


def call(function: Callable[..., ValueT], *arguments: Any, what: str, about: str = "", **keys: Any) -> ValueT:
    """Return what a user's function returns. Raises `ConfigError` if it raises, or is a coroutine function.

    Args:
        what: the function in words, as in "reward function my_reward".
        about: what it was called for, as in "for task 'a'".
    """
    try:
        value = function(*arguments, **keys)
    except StropError:
        raise
    except Exception as error:
        problem = f"raised {type(error).__name__}: {in_short(error)}{about and f' {about}'}"
        raise mistake(function, problem, what=what, error=error) from error
    if inspect.iscoroutine(value):
        value.close()
        raise mistake(function, "is a coroutine function. Write def instead of async def", what=what)
    return value


@contextmanager
def blaming(about: str = "") -> Iterator[None]:
    """Make an exception of the user's code in this block a `ConfigError`; see `blame`. Other exceptions stay as they are."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, StropError) and (found := blame(error, about)) is not None:
            raise found from error
        raise


def blame(error: BaseException, about: str = "") -> ConfigError | None:
    """Return the message about an exception that the user's code raised, or None if no frame of it is the user's."""
    if isinstance(error, SyntaxError) and error.filename is not None and is_own(error.filename):
        return ConfigError(
            f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}{about and f' {about}'}."
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if not frames:
        return None
    last, words = frames[-1], f"raised {type(error).__name__}: {in_short(error)}{about and f' {about}'}"
    return ConfigError(f"{last.name} ({last.filename}, line {last.lineno}) {words}.")


def is_own(file: str) -> bool:
    """Whether `file` holds the user's code: it is not of strop, of Python or of an installed package."""
    path = Path(file).resolve()
    is_installed = {"site-packages", "dist-packages"} & {*path.parts} or any(map(path.is_relative_to, _NOT_OWN))
    return not (file.startswith("<") or is_installed)


def expect(value: Any, kind: type[ValueT], function: Any, *, what: str, about: str = "") -> ValueT:
    """Return `value`, which `function` returned, if it is of the type `kind`. Raises `ConfigError` otherwise."""
    if not isinstance(value, kind):
        raise returned(function, value, f"Return a {kind.__name__}", what=what, about=about)
    return value


def returned(function: Any, value: object, remedy: str, *, what: str, about: str = "") -> ConfigError:
    """Return the message about a value that `function` must not return."""
    return mistake(function, f"returned {in_short(repr(value))}{about and f' {about}'}. {remedy}", what=what)


def mistake(function: Any, problem: str, *, what: str, error: Exception | None = None) -> ConfigError:
    """Return one message with the function, file and line of the user's code, and what is wrong."""
    place = place_of(function, error)
    return ConfigError(f"{what}{place and f' ({place})'} {problem}.")


def place_of(function: Any, error: Exception | None = None) -> str:
    """Return the file and line of `function`, or of its last frame in the traceback of `error`; "" if there is no source."""
    function = inspect.unwrap(function)
    if isinstance(function, type):
        try:
            return f"{inspect.getsourcefile(function)}, line {inspect.getsourcelines(function)[1]}"
        except (OSError, TypeError):
            return ""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}, line {(own[-1].lineno if own else None) or code.co_firstlineno}"
