"""Whether the workloads are those that were measured. The generator and the reader are `dataplane.workloads`, so that
the command of an installed package has them; they are the same names here."""

from dataplane.workloads import TASKS, Step, Trace, generate, read, write

__all__ = ["TASKS", "Step", "Trace", "generate", "read", "write"]
