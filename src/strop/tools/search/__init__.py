"""Text search: an index of your own passages, cached results, or a service over HTTP."""

from strop.tools.search.corpus import read_corpus
from strop.tools.search.protocol import Backend, Passage, QueryRefused
from strop.tools.search.tool import Search, SearchTool

__all__ = ["Backend", "Passage", "QueryRefused", "Search", "SearchTool", "read_corpus"]
