"""The search tool: takes a query, returns the results of its backend."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from pydantic import Field

from strop.config import Choice
from strop.sandbox.protocol import CodeRunner
from strop.tools.limits import CallLimits, MaxChars
from strop.tools.protocol import TimedTool, Tool, ToolKind, ToolSpec, text_parameters
from strop.tools.python import shorten
from strop.tools.search import Backend, KeptConfig, KeptResults, QueryRefused
from strop.tools.search.bm25 import Bm25Config, Bm25Index
from strop.tools.search.http import HttpConfig, HttpSearch
from strop.types import ToolOutcome

NOTHING_FOUND = "No search results found."  # ARPO's words
BackendConfig = Annotated[Bm25Config | KeptConfig | HttpConfig, Choice()]


class Search(ToolKind):
    """A search tool and its backend."""

    class Config(CallLimits):
        """Its name, its limits and where results come from."""

        name: str | None = Field(default=None, min_length=1, description="Name for the policy; by default that of the table.")
        description: str = Field(
            default="Searches for a query and returns the best results.", description="Description for the policy."
        )
        top_k: int = Field(default=5, ge=1, le=10**6, description="Results of one query.")
        max_chars: MaxChars = 4_096
        max_result_chars: int = Field(
            default=10**6, ge=16, le=10**9, description="Longest result; of a longer one the head is kept."
        )
        backend: BackendConfig = Field(description="Where the results come from.")

    config: Config

    def known_name(self, key: str) -> str:
        return self.config.name or key.rpartition(".")[2]

    def files(self) -> Mapping[str, Path]:
        backend = self.config.backend
        return {"backend.path": Path(backend.path)} if isinstance(backend, Bm25Config | KeptConfig) else {}

    async def open(self, stack: AsyncExitStack, runner: CodeRunner, *, key: str) -> list[Tool]:
        backend: Backend
        match self.config.backend:
            case Bm25Config() as config:
                backend = Bm25Index(config)
            case KeptConfig() as config:
                backend = KeptResults(config)
            case config:
                backend = service = HttpSearch(config)
                stack.push_async_callback(service.close)
        return [SearchTool(backend, self.config, name=self.known_name(key))]


class SearchTool(TimedTool):
    """Searches for `query`. A query that finds nothing is no error.

    Args:
        backend: shared by all rollouts; the caller closes it.
        name: for the policy.
    """

    def __init__(self, backend: Backend, config: Search.Config, *, name: str) -> None:
        self._backend, self._config = backend, config
        parameters = text_parameters(query="What to search for.")
        super().__init__(ToolSpec(name=name, description=config.description, parameters=parameters))

    @property
    def longest_call_s(self) -> float:
        return self._backend.longest_call_s

    async def answer(self, arguments: Mapping[str, object], *, seed: int) -> tuple[ToolOutcome, str]:
        """Search once. Raises `ToolBroken` if the backend keeps failing."""
        query = str(arguments["query"]).strip()
        if not query:
            return ToolOutcome.WRONG_ARGUMENTS, f"{self.spec.name}: the query is empty."
        outcome = ToolOutcome.STDOUT
        try:
            text = await self._backend.results(query, top_k=self._config.top_k)
        except QueryRefused as error:
            outcome, text = ToolOutcome.REJECTED, f"The search service does not accept this query ({error})."
        text = "\n".join(line[: self._config.max_result_chars] for line in text.split("\n"))  # a result is a line
        if not text:
            outcome, text = ToolOutcome.EMPTY, NOTHING_FOUND
        return outcome, shorten(text, self._config.max_chars)
