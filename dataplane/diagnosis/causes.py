"""The result of a diagnosis: causes, ranked by the seconds of a step that each costs.

Values only, shown by the command, the page and tests. As JSON they are objects with the names of these fields;
`Diagnosis.read` reads the output of `Diagnosis.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from dataplane.errors import Misuse

Kind = Literal[
    "code",  # a line of user code takes long
    "skew",  # the time of a line of user code depends on the size of its rows, which differ much
    "tail",  # a line of user code sometimes takes much longer, independent of its rows
    "lock",  # a line of user code waits for a lock, a thread or a process
    "straggler",  # one process takes longer than its peers
    "host",  # the processes of one host take longer than their peers
    "ack",  # a consumer holds rows for long before it acks them
    "budget",  # producers wait for memory
    "disk",  # a read or write of spilled data waits for the disk
    "link",  # a process waits for bytes of another host
    "prefetch",  # bytes are requested only when they are needed
    "limit",  # max_lag, max_rows or max_bytes keeps two roles from working at a time
    "processor",  # ready threads had no processor, because the job's own processes need more than the host has
    "collective",  # the collective itself: all ranks wait there equally
    "plane",  # calls into the plane themselves
]


@dataclass(frozen=True, slots=True)
class CauseLink:
    """One wait of a chain: a process of `role` on `host` waits at a line for `seconds` of a step. `kind`: what it waits
    for, "rows", "permits", "max_lag", "max_rows", "max_bytes", "memory", "disk", "fetch" or "collective"."""

    role: str
    host: str
    file: str
    line: int
    function: str
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Cause:
    """A root cause: a delay that no other delay explains. It costs `seconds` of each step, `share` of the step.
    `processes`: the ids of the processes that show it. `chain`: the waits that lead to it, beginning with a wait of the
    last role. `setting`: the argument or role to change; empty for none."""

    kind: Kind
    file: str
    line: int
    function: str
    role: str
    host: str
    processes: tuple[int, ...]
    seconds: float
    share: float
    chain: tuple[CauseLink, ...]
    setting: str
    advice: str


@dataclass(frozen=True, slots=True)
class Role:
    """The time of the processes of a role, as shares: `busy` in user code, and `waiting` by kind of wait."""

    name: str
    processes: int
    hosts: tuple[str, ...]
    busy: float
    waiting: dict[str, float]


@dataclass(frozen=True, slots=True)
class Crowded:
    """A host whose processors other jobs use. Each step waits `seconds` for one, `share` of it. Of the host's
    `processors`, the job used `job` on average, others `others`. Not a cause: no change of the job helps."""

    host: str
    processors: int
    job: float
    others: float
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class RunSize:
    """The number of processes of a run that was compared, and the duration of its step."""

    processes: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of `seconds` of a job. A step is one delivery to each process of `role`, the last of the pipeline.
    It takes `step_s`, of which the role waits `lost_s`. `notes`: measurements that failed, and `crowded` hosts.
    `compared`: the smaller and the larger run of a comparison, otherwise empty. All else is then of the larger run, but
    `lost_s` and the seconds of causes are the excess over the smaller run's, at the same work of each process."""

    seconds: float
    role: str
    steps: float
    step_s: float
    lost_s: float
    causes: tuple[Cause, ...]
    roles: tuple[Role, ...]
    notes: tuple[str, ...] = ()
    crowded: tuple[Crowded, ...] = ()
    compared: tuple[RunSize, ...] = ()

    def json(self) -> str:
        """The diagnosis as a JSON object of these fields, with the most costly causes first."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str | bytes) -> Diagnosis:
        """The diagnosis that `json` wrote. Raises Misuse for other text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise Misuse(f"not a diagnosis: {error}") from None
