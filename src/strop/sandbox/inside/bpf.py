"""Assembles seccomp filters: a decision per system call, as classic BPF in a binary search over their numbers.

A search rather than a list because the kernel runs the program for every number when it is installed, to learn which are
always allowed (those then cost nothing): a list of a hundred numbers takes 260 us to install, a search 80.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

ALLOW, KILL, NOTIFY = 0x7FFF0000, 0x80000000, 0x7FC00000
_ERRNO = 0x00050000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # of an absolute word; by a constant; a constant
_JUMP_IF_EQUAL, _JUMP_IF_NOT_BELOW = 0x15, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_INSTRUCTION = struct.Struct("<HBBI")
_MAX_JUMP = 255

_Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Decides by the low 32 bits of one argument: all that the kernel reads of pids, flags, commands and families.

    Only of an address both halves count.
    """

    argument: int
    equals: int
    mask: int = 0xFFFFFFFF
    is_high_half: bool = False
    then: Rule
    otherwise: Rule


Rule = int | Test  # what the kernel does at once, or a question first


def fail(errno: int) -> int:
    """The call does nothing and fails with `errno`."""
    return _ERRNO | errno


def assemble(rules: Mapping[int, Rule], *, architecture: int, ends: Mapping[int, Rule]) -> bytes:
    """The filter that treats each system call by its number's rule, and allows the others.

    Args:
        architecture: the AUDIT_ARCH of the numbers; calls of any other ABI end the process.
        ends: rules for all numbers from a key up to the next one.
    """
    starts: dict[int, Rule] = {0: ALLOW}
    for number in sorted(rules):
        starts[number] = rules[number]
        starts.setdefault(number + 1, ALLOW)
    starts.update(ends)
    merged: list[tuple[int, Rule]] = []
    for start in sorted(starts):
        if not merged or merged[-1][1] != starts[start]:
            merged.append((start, starts[start]))
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_search(merged),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _search(ranges: list[tuple[int, Rule]]) -> list[_Instruction]:
    """Of (first number, rule), ascending; every number belongs to the last range that starts at or below it."""
    if len(ranges) == 1:
        return _decide(ranges[0][1])
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    return [_branch(_JUMP_IF_NOT_BELOW, ranges[middle][0], when_true=len(low), when_false=0), *low, *high]


def _decide(rule: Rule) -> list[_Instruction]:
    if isinstance(rule, int):
        return [(_RETURN, 0, 0, rule)]
    then, otherwise = _decide(rule.then), _decide(rule.otherwise)
    program: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument + 4 * rule.is_high_half)]
    if rule.mask != 0xFFFFFFFF:
        program.append((_AND, 0, 0, rule.mask))
    return [*program, _branch(_JUMP_IF_EQUAL, rule.equals, when_true=0, when_false=len(then)), *then, *otherwise]


def _branch(kind: int, value: int, *, when_true: int, when_false: int) -> _Instruction:
    if max(when_true, when_false) > _MAX_JUMP:
        raise ValueError(f"a filter with a jump over {max(when_true, when_false)} instructions; BPF allows {_MAX_JUMP}")
    return kind, when_true, when_false, value
