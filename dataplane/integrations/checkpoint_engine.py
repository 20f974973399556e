"""A checkpoint engine: the trainer publishes weights by version, and rollouts map them from the plane.

For NeMo-RL, which makes it by its name, and for verl (`verl.checkpointing`), whose calls are others:

    policy.generation.refit_transport: "dataplane.integrations.checkpoint_engine:DataplaneCheckpointEngine"

Invariants: one rank of the trainer publishes and the others run through their weights, as gathering sharded ones
needs; the version of an update is one above the newest that any rank found, the same for all that take part; a reader
has one version whole, in place, and it stays as it is while newer ones come; nothing is sent to a reader, so one that
is slow or dead delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dataplane.client.sync_weights import Weights
from dataplane.errors import Misuse
from dataplane.integrations import process

TIMEOUT_S = 600.0
BUCKET_BYTES = 256 << 20

_FIRST = "prepare() and {} come before weights are sent or received: they say which version it is"


class DataplaneCheckpointEngine:
    """One for each rank of the trainer and of the rollouts. To be used by one thread or task at a time."""

    shard_expert_weights = False
    """Whether ranks are sent their own experts alone (NeMo-RL): each reads what it looks at anyway."""

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
        """bucket_size: bytes of a batch of `receive_weight_batches`, at most, or one tensor.
        is_master: what verl tells rank 0; ranks are told again where a group is made.
        name, keep, replicas: as of `plane.weights`; the same on all ranks.
        device: where received tensors are to be; None: in place, in the host's memory.
        timeout: seconds that a reader waits for a version, and a publisher for room.

        Connects to nothing yet.
        """
        self._bucket = bucket_size
        self._name, self._keep, self._replicas = name, keep, replicas
        self._device = device
        self._timeout = timeout
        self._publishes = is_master
        self._expected: int | None = None
        self._held: Mapping[str, Any] | None = None
        self.version: int | None = None
        """The version that was sent or received last."""

    @property
    def weights(self) -> Weights:
        """The versions, as everybody else sees them: `plane.weights(name)`. Raises as `process.plane`."""
        return process.plane().weights(self._name, keep=self._keep, replicas=self._replicas)

    # before an update, and after it

    def prepare(self) -> dict[str, Any]:
        """What the ranks tell each other: the newest version that this one sees. Raises Misuse where no node is known,
        PeerUnavailable."""
        return {"version": max(self.weights.versions(), default=0)}

    def expect(self, version: int, *, publishes: bool) -> None:
        """The update that follows is of this version, which this rank publishes, or not."""
        self._expected = version
        self._publishes = publishes

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """NeMo-RL's, of a rank of the trainer: it knows the version from what all ranks' `prepare` said."""
        self.expect(following(metadata), publishes=worker_rank == 0)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """As `init_policy_process_group`, of a rank of a rollout."""
        self.expect(following(metadata), publishes=False)

    def get_target_weight_layout(self) -> None:
        """None: whole tensors are published (NeMo-RL)."""
        return

    def finalize(self) -> None:
        """The update is over: what was received is let go as soon as nobody has a tensor of it."""
        self._expected, self._held = None, None

    # the update

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Publish (name, tensor) pairs, or run through them where another rank publishes. It returns once readers can
        have them; the tensors may be changed then.

        Blocks the event loop: the pairs may be made by collectives, which belong to its thread. Raises Misuse before a
        version is agreed on, and as `plane.weights(...).publish`.
        """
        if self._expected is None:
            raise Misuse(_FIRST.format("init_process_group()"))
        if hasattr(weights, "__aiter__"):
            weights = [pair async for pair in weights]
        if self._publishes:
            self.weights.publish(self._expected, weights, timeout=self._timeout)
        else:
            for _ in weights:
                pass
        self.version = self._expected

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The (name, tensor) pairs of the version that was agreed on, waited for, in the order of their publication.

        Raises Misuse before one is, NotReady, Freed where newer ones have come meanwhile, and as `plane.get`.
        """
        if self._expected is None:
            raise Misuse(_FIRST.format("init_process_group()"))
        async for pair in self._pairs(self._expected):
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """The pairs of the newest version that there is, at any time: the node of the host has it, or fetches it once.

        Raises NotReady where there is none yet.
        """
        async for pair in self._pairs(None):
            yield pair

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, Any]]]:
        """As `receive_weights`, in lists of `bucket_size` bytes at most (NeMo-RL)."""
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
    """The version of an update, of what the `prepare` of its ranks said. Raises Misuse for what another engine said."""
    found = [each["version"] for each in metadata if isinstance(each, Mapping) and "version" in each]
    if not found:
        raise Misuse("no rank says what versions there are: all ranks use this engine")
    return int(max(found)) + 1


def ranks_of(actors: int, rollouts: int, metadata: Sequence[Any]) -> Iterator[dict[str, list[Any]]]:
    """The arguments of `init_process_group` (verl) of the trainer's ranks, and those of the rollouts'."""
    version = following(metadata)
    yield {"version": [version] * actors, "rank": list(range(actors))}
    yield {"version": [version] * rollouts, "rank": list(range(actors, actors + rollouts))}
