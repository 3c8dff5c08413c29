"""Words typed by a person -> a config -> one pipeline call. No logic here."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `strop` command."""
