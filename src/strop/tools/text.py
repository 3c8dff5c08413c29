"""Text that comes from elsewhere, made such that a tokenizer, a file and a pipe take it."""

from __future__ import annotations


def encodable(text: str) -> str:
    r"""`text` with halves of surrogate pairs written out (`\ud83d`): UTF-8 has none, and no tokenizer takes them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
