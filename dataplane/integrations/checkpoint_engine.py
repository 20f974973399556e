"""A checkpoint engine: the trainer publishes weights by version, and rollouts map them from the plane.

For NeMo-RL, which loads it by its name, and for verl (`verl.checkpointing`), which calls other methods:

    policy.generation.refit_transport: "dataplane.integrations.checkpoint_engine:DataplaneCheckpointEngine"

Invariants: one rank of the trainer publishes; the others only iterate over their weights, because that gathers sharded
weights. All participants use the same version for an update: one more than the newest that any rank has found. A
reader has one complete version, in place, which does not change when newer ones are published. Nothing is sent to
readers, so a slow or dead one delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from dataplane.client.sync import Weights
from dataplane.errors import Misuse
from dataplane.integrations import process

TIMEOUT_S = 600.0
BUCKET_BYTES = 256 << 20

_FIRST = "prepare() and init_process_group() come before weights are sent or received: they say which version it is"


class DataplaneCheckpointEngine:
    """The engine of one rank of the trainer or of a rollout. Used by one thread or task at a time."""

    shard_expert_weights = False
    """Whether ranks are sent their own experts alone (NeMo-RL). False: each rank reads only the tensors it accesses."""

    def __init__(
        self,
        bucket_size: int = BUCKET_BYTES,
        is_master: bool = False,
        *,
        name: str = "actor",
        keep: int = 2,
        replicas: int = 1,
        device: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """bucket_size: the largest number of bytes of a batch of `receive_weight_batches`, or one tensor.
        is_master: set by verl for rank 0; ignored, because ranks are assigned when a group is created.
        name, keep, replicas: as of `plane.weights`; the same on all ranks.
        device: the device of received tensors; None: in place, in the host's memory.
        timeout: seconds that a reader waits for a version, and a publisher for room.

        Does not connect yet.
        """
        self._bucket = bucket_size
        self._name, self._keep, self._replicas = name, keep, replicas
        self._device = device
        self._timeout = timeout
        self._publishes = is_master
        self._expected: int | None = None
        self._held: Mapping[str, Any] | None = None
        self.version: int | None = None
        """The version that was last sent or received."""

    @property
    def weights(self) -> Weights:
        """The versions: `plane.weights(name)`. Raises as `process.plane`."""
        return process.plane().weights(self._name, keep=self._keep, replicas=self._replicas)

    # before an update, and after it

    def prepare(self) -> dict[str, Any]:
        """The message of this rank to the others: the newest version that it sees. Raises Misuse if no node is known,
        PeerUnavailable if it does not answer."""
        return {"version": max(self.weights.versions(), default=0)}

    def expect(self, version: int, *, publishes: bool) -> None:
        """Set the version of the next update, and whether this rank publishes it."""
        self._expected = version
        self._publishes = publishes

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """NeMo-RL's call for a rank of the trainer: determines the version from the `prepare` messages of all ranks."""
        self.expect(following(metadata), publishes=worker_rank == 0)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """As `init_policy_process_group`, for a rank of a rollout."""
        self.expect(following(metadata), publishes=False)

    def get_target_weight_layout(self) -> None:
        """None: whole tensors are published (NeMo-RL)."""
        return

    def finalize(self) -> None:
        """End the update: the received version is released with the last of its tensors."""
        self._expected, self._held = None, None

    # the update

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Publish (name, tensor) pairs, or iterate over them if another rank publishes. Returns once readers can read
        them; the tensors may be changed then.

        Blocks the event loop: the pairs may be produced by collectives, which belong to its thread. Raises Misuse
        before a version is agreed on, and as `plane.weights(...).publish`.
        """
        if self._expected is None:
            raise Misuse(_FIRST)
        if hasattr(weights, "__aiter__"):
            weights = [pair async for pair in weights]
        if self._publishes:
            self.weights.publish(self._expected, weights, timeout=self._timeout)
        else:
            for _ in weights:
                pass
        self.version = self._expected

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Wait for the agreed version, and iterate over its (name, tensor) pairs, in the order of their publication.

        Raises Misuse before a version is agreed on, NotReady, Freed if newer versions have replaced it, and as
        `plane.get`.
        """
        if self._expected is None:
            raise Misuse(_FIRST)
        async for pair in self._pairs(self._expected):
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """Iterate over the pairs of the newest version, at any time: the node of the host has that version, or fetches
        it once.

        Raises NotReady if there is none yet.
        """
        async for pair in self._pairs(None):
            yield pair

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, Any]]]:
        """As `receive_weights`, in lists of at most `bucket_size` bytes (NeMo-RL)."""
        batch: list[tuple[str, Any]] = []
        nbytes = 0
        async for name, tensor in self.receive_weights():
            if batch and nbytes + tensor.nbytes > self._bucket:
                yield batch
                batch, nbytes = [], 0
            batch.append((name, tensor))
            nbytes += tensor.nbytes
        if batch:
            yield batch

    async def _pairs(self, version: int | None) -> AsyncIterator[tuple[str, Any]]:
        tensors = await asyncio.to_thread(self.weights.get, version, timeout=self._timeout)
        self._held = tensors
        for name in tensors:
            yield name, tensors[name] if self._device is None else tensors[name].to(self._device)
        self.version = tensors.version


def following(metadata: Iterable[Any]) -> int:
    """The version of an update, from the `prepare` messages of its ranks. Raises Misuse for messages of another
    engine."""
    found = [each["version"] for each in metadata if isinstance(each, Mapping) and "version" in each]
    if not found:
        raise Misuse("no rank can list the versions: all ranks of this process group use this engine")
    return int(max(found)) + 1
