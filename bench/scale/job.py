"""What hosts do in a simulation: how many there are, what they append and how it is consumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Each host has a producer and a consumer, which are one process beside the node."""

    hosts: int
    rows_s: float | None = None
    """That each host appends; None: as many as it can, with at most `ahead` appends of each not yet acked."""
    block: int = 512
    """Rows of one append."""
    group: int = 8
    """Rows of one prompt."""
    want: int = 512
    """Rows of one delivery, at most."""
    least: int = 8
    """Rows that it waits for."""
    row_bytes: float = 0.0
    """Payload that a consumer reads of each row; 0: none is read."""
    limited: bool = False
    """The stream has a limit for all hosts together, which one node keeps."""
    hot: float = 0.0
    """Of the appends, which share are of one group that all hosts have in common."""
    appends: int | None = None
    """Of each host; None: for as long as the simulation goes."""
    ahead: int = 4
    cores: int | None = None
    """All processes of all hosts share so many cores; None: each has its own."""
    link_bytes_s: float = 25e9 / 8
    latency_s: float = 50e-6
    local_s: float = 30e-6
    """Between a client and its node, beside what either computes."""
    greetings: bool = True
    seconds: float = 2.0
    warm_s: float = 0.5
    """Before anything is counted."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.block % self.group or not self.group <= self.least <= self.want:
            raise ValueError("a job has hosts, blocks of whole groups, and group <= least <= want")
