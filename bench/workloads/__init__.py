"""Workloads: what the steps of real RLVR jobs are made of, in numbers, to be replayed.

Two ways lead to the same frozen values, a `Trace` of `Step`s of arrays: `generate` makes one from the tables of
seven measured tasks (`TASKS`), and `read` takes one from a trace file in either format of PolyTrace. `write` saves one
so that it can be read again. Nothing here knows of planes, stores or processes: it is numbers, and imports NumPy alone.
`distance` says how near what is made is to the tables.
"""

from bench.workloads.generator import generate
from bench.workloads.polytrace import read, write
from bench.workloads.tables import TASKS
from bench.workloads.trace import Step, Trace

__all__ = ["TASKS", "Step", "Trace", "generate", "read", "write"]
