"""A data plane for RL post-training: rollout batches by reference, in bounded memory, with no controller on the path.

    import dataplane as dp

    plane = dp.connect()
    ref = plane.put({"input_ids": [[1, 2, 3], [4, 5]], "answer": ["7", "3"]})
    batch = plane.get(ref.select("input_ids")[0:1])   # in any process of this host

Importing this package imports neither torch nor pyarrow, and has no side effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane import aio as aio
    from dataplane import collective as collective
    from dataplane.batch.batch import Batch as Batch
    from dataplane.batch.batch import Column as Column
    from dataplane.batch.concat import concat as concat
    from dataplane.batch.field import Field as Field
    from dataplane.batch.ref import BatchRef as BatchRef
    from dataplane.batch.slicing import packed_share as packed_share
    from dataplane.client.draft import dense as dense
    from dataplane.client.draft import ragged as ragged
    from dataplane.client.loader import Loader as Loader
    from dataplane.client.loader import loader as loader
    from dataplane.client.recorder import Recording as Recording
    from dataplane.client.sync import Appender as Appender
    from dataplane.client.sync import Delivery as Delivery
    from dataplane.client.sync import Draft as Draft
    from dataplane.client.sync import History as History
    from dataplane.client.sync import Plane as Plane
    from dataplane.client.sync import Row as Row
    from dataplane.client.sync import Stream as Stream
    from dataplane.client.sync import Table as Table
    from dataplane.client.sync import Taken as Taken
    from dataplane.client.sync import Weights as Weights
    from dataplane.client.sync import connect as connect
    from dataplane.config import NodeConfig as NodeConfig
    from dataplane.errors import Backpressure as Backpressure
    from dataplane.errors import Closed as Closed
    from dataplane.errors import Corrupt as Corrupt
    from dataplane.errors import DataplaneError as DataplaneError
    from dataplane.errors import DirectoryUnusable as DirectoryUnusable
    from dataplane.errors import Forked as Forked
    from dataplane.errors import Freed as Freed
    from dataplane.errors import KeyExists as KeyExists
    from dataplane.errors import LeaseExpired as LeaseExpired
    from dataplane.errors import LimitExceeded as LimitExceeded
    from dataplane.errors import Lost as Lost
    from dataplane.errors import Misuse as Misuse
    from dataplane.errors import NotReady as NotReady
    from dataplane.errors import OutcomeUnknown as OutcomeUnknown
    from dataplane.errors import OwnerDied as OwnerDied
    from dataplane.errors import PeerUnavailable as PeerUnavailable
    from dataplane.errors import ProtocolMismatch as ProtocolMismatch
    from dataplane.errors import Rejected as Rejected
    from dataplane.errors import Retryable as Retryable
    from dataplane.errors import SchemaMismatch as SchemaMismatch
    from dataplane.errors import Unauthenticated as Unauthenticated
    from dataplane.observe.stats import Stats as Stats
    from dataplane.stream.sampler import Candidates as Candidates
    from dataplane.stream.sampler import Choice as Choice
    from dataplane.stream.sampler import CompleteGroups as CompleteGroups
    from dataplane.stream.sampler import Fifo as Fifo
    from dataplane.stream.sampler import Freshest as Freshest
    from dataplane.stream.sampler import Sampler as Sampler
    from dataplane.stream.sampler import TokenBalanced as TokenBalanced
    from dataplane.stream.sampler import Weighted as Weighted

__version__ = "0.1.0"

# The module of each public name. Names are imported at their first use: a node's process, and a tool that only
# needs the errors, do not wait for unused modules.
_HOMES = {
    "batch.batch": ("Batch", "Column"),
    "batch.concat": ("concat",),
    "batch.field": ("Field",),
    "batch.ref": ("BatchRef",),
    "batch.slicing": ("packed_share",),
    "client.draft": ("dense", "ragged"),
    "observe.stats": ("Stats",),
    "client.loader": ("Loader", "loader"),
    "client.recorder": ("Recording",),
    "client.sync": (
        "Appender",
        "Delivery",
        "Draft",
        "History",
        "Plane",
        "Row",
        "Stream",
        "Table",
        "Taken",
        "Weights",
        "connect",
    ),
    "stream.sampler": (
        "Candidates",
        "Choice",
        "CompleteGroups",
        "Fifo",
        "Freshest",
        "Sampler",
        "TokenBalanced",
        "Weighted",
    ),
    "config": ("NodeConfig",),
    "errors": (
        "Backpressure",
        "Closed",
        "Corrupt",
        "DataplaneError",
        "DirectoryUnusable",
        "Forked",
        "Freed",
        "KeyExists",
        "LeaseExpired",
        "LimitExceeded",
        "Lost",
        "Misuse",
        "NotReady",
        "OutcomeUnknown",
        "OwnerDied",
        "PeerUnavailable",
        "ProtocolMismatch",
        "Rejected",
        "Retryable",
        "SchemaMismatch",
        "Unauthenticated",
    ),
}
_HOME_OF = {name: f"dataplane.{home}" for home, names in _HOMES.items() for name in names}

__all__ = ["aio", "collective", *sorted(_HOME_OF)]  # modules, and names from the table above


def __getattr__(name: str) -> Any:
    if name in ("aio", "collective"):
        return importlib.import_module(f"dataplane.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dataplane' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
