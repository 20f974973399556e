"""The resources of a plan: hosts, their workers, and the cost of transfers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dataplane.pipeline.events import Floats, Ints


@dataclass(frozen=True, slots=True)
class Host:
    """One host and its workers."""

    workers: int = 1
    #: Cores that its workers share; 0: as many as they need.
    cores: float = 0.0
    #: The bytes that its plane may hold; 0: no limit.
    store_bytes: float = 0.0
    #: The bytes that each of its workers may hold for itself, such as a device's memory; 0: no limit.
    worker_bytes: float = 0.0
    #: Bytes a second that it sends to other hosts; 0: no limit.
    bytes_per_s: float = 0.0
    #: The speed of its workers, relative to the worker on which costs were measured.
    speed: float = 1.0
    #: The resources of the host that a stage may require, such as "gpu".
    resources: frozenset[str] = frozenset()
    #: The address of its node, for workers that are processes; empty: the executor's node.
    address: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, and the cost of transfers. Workers are numbered from 0, host by host."""

    hosts: tuple[Host, ...]
    #: Seconds from an instruction's end on one worker until another worker of the same host has its output.
    hop_s: float = 0.0
    #: Additional seconds if the workers are on different hosts.
    latency_s: float = 0.0
    #: Seconds that an instruction takes beyond its work, to read, store and report; 0 for gradients of weights.
    overhead_s: float = 0.0
    of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.hosts or any(host.workers < 1 for host in self.hosts):
            raise ValueError("a cluster has hosts, each with a worker or more")
        object.__setattr__(self, "of", tuple(h for h, host in enumerate(self.hosts) for _ in range(host.workers)))

    @classmethod
    def uniform(cls, workers: int, per_host: int | None = None, **host: object) -> Cluster:
        """This many equal workers, `per_host` on each host (None: all on one). `host`: fields of `Host`."""
        per_host = per_host or workers
        counts = [min(per_host, workers - first) for first in range(0, workers, per_host)]
        return cls(tuple(replace(Host(**host), workers=count) for count in counts))  # type: ignore[arg-type]

    @property
    def workers(self) -> int:
        """The number of workers of all hosts."""
        return len(self.of)

    def host(self, worker: int) -> Host:
        """The host of a worker."""
        return self.hosts[self.of[worker]]

    def arrays(self) -> tuple[Ints, Floats, Floats, Floats]:
        """The arrays of `events.Room`: the host and the speed of each worker, and the cores and the send rate of each
        host."""
        return (
            np.array(self.of, np.int32),
            np.array([self.host(w).speed for w in range(self.workers)]),
            np.array([host.cores for host in self.hosts]),
            np.array([host.bytes_per_s for host in self.hosts]),
        )
