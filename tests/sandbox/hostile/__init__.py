"""The hostile catalogue: programs that attack the sandbox, and what must hold from outside after each of them.

case.py        what a case is: a program, why it is hostile, and the answers that are right
cases/         the programs, by family
host.py        the host of the attack: canaries, listeners, and what can be counted from outside
invariants.py  what must hold whatever a program did
play.py        one case at one sandbox: run twice, next to a victim, between two honest calls
player.py      a process of its own that plays cases for the tests, as root, without rights or in a container
"""
