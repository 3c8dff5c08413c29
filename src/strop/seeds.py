"""Seeds that belong to work items, not to processes (design law 8)."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of the named parts, the same on every machine and in every process.

    Parts keep their kind and their borders: `derive_seed(1, "2")` and `derive_seed("1", 2)` differ, and so do
    `derive_seed("ab", "c")` and `derive_seed("a", "bc")`.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"strop-seed")
    for part in parts:
        encoded = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 1
