"""The whole service under real signals, cut links and full disks: every call is answered once, rightly, and in time.

processes.py   processes of a service by their part in it, and signals that reach no other process
service.py     a service as a user starts it, with a keeper that starts again what died
ledger.py      calls that each have an answer of their own, and what became of them
notebooks.py   sessions whose cells count how often they ran
agent.py       sends signals to parts of the service, at random moments of a seed
networks.py    two network namespaces and the cable between them
usage.py       what a service holds: memory, descriptors, mounts, processes
"""
