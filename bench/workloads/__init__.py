"""Workloads: the lengths, sizes and times of the steps of real RLVR jobs, to be replayed.

A workload is a `Trace`: frozen `Step`s of arrays. `generate` makes a trace from the tables of seven measured tasks
(`TASKS`). `read` reads one from a trace file in either format of PolyTrace, and `write` saves one in such a file.
`distance` compares generated traces with the tables. This package uses no planes, stores or processes.
"""

from bench.workloads.generator import generate
from bench.workloads.polytrace import read, write
from bench.workloads.tables import TASKS
from bench.workloads.trace import Step, Trace

__all__ = ["TASKS", "Step", "Trace", "generate", "read", "write"]
