"""verl's checkpoint engine `dataplane`: rollouts load new weights when they are ready, and no request is aborted.

    actor_rollout_ref.rollout.checkpoint_engine.backend=dataplane
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=dataplane.integrations.verl.checkpointing

With this setting, verl imports the module in the trainer, its ranks and the rollout workers. The import registers the
engine, and replaces the update of verl's `CheckpointEngineManager` for it: an update only publishes the weights. verl's
own update aborts all requests first, and makes the trainer wait until each rollout has loaded the weights. Here a
thread for each replica loads the newest version as soon as the replica has loaded the previous one; a slow replica
skips versions.

Invariants: all ranks of a replica load the same version; a replica loads one version at a time; the error of a replica
is raised by the next update. Managers of other backends are unchanged.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from functools import wraps
from typing import Any

import ray
from verl.checkpoint_engine import base as theirs
from verl.utils.ray_utils import auto_await

from dataplane.config import environment
from dataplane.errors import Freed, NotReady
from dataplane.integrations import checkpoint_engine as engines

log = logging.getLogger(__name__)

NAME = "dataplane"

_MARK = "__wrapped_by_dataplane__"


@theirs.CheckpointEngineRegistry.register(NAME)
class DataplaneCheckpointEngine(engines.DataplaneCheckpointEngine, theirs.CheckpointEngineWithCache):  # type: ignore[misc]
    """The engine as verl calls it. `engine_kwargs.dataplane` are the arguments of its base class, and

    abort: use verl's own update, which aborts all requests and waits until each rollout has loaded.
    wait: an update returns once each replica has loaded it; no request is aborted.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, abort: bool = False, wait: bool = False, **how: Any):
        super().__init__(bucket_size, is_master, **how)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of each rank's `init_process_group`: the version, and its rank."""
        version, actors = engines.following(metadata), actor_wg_world_size
        ranks = range(actors), range(actors, actors + rollout_world_size)
        trainer, rollouts = ({"version": [version] * len(own), "rank": list(own)} for own in ranks)
        return trainer, rollouts

    def init_process_group(self, version: int, rank: int) -> None:
        """Set the version of the next update; the trainer's rank 0 publishes it."""
        self.expect(version, publishes=rank == 0)


class ReplicaLoader:
    """Loads the newest version into one replica of verl's, in a thread of its own, until it is closed."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._group = theirs.RayWorkerGroup(
            worker_handles=list(workers), ray_cls_with_init=theirs.RayClassWithInitArgs(cls=theirs._worker_cls)
        )
        self._changed = threading.Condition()
        self._offered: tuple[int, int | None] | None = None
        self._taken = 0
        self._failed: BaseException | None = None
        self._closed = False
        threading.Thread(target=self._run, name="dataplane-weights", daemon=True).start()

    def offer(self, version: int, global_steps: int | None) -> None:
        """Load this version when the replica is ready, unless a newer one is offered before. Raises an earlier
        error."""
        with self._changed:
            failed, self._failed = self._failed, None
            self._offered = version, global_steps
            self._changed.notify_all()
        if failed is not None:
            raise failed

    def wait(self, version: int, timeout_s: float) -> None:
        """Wait until the replica has loaded this version or a newer one. Raises NotReady, and an earlier error."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken >= version or self._failed is not None, timeout_s):
                raise NotReady(f"a replica has version {self._taken}, and not yet {version}")
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Offer no more versions. Idempotent; does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._offered is not None or self._closed)
                if self._closed or self._offered is None:
                    return
                (version, steps), self._offered = self._offered, None
            try:
                self._hand(version, steps)
            except Exception as error:  # Ray may raise anything; the next update tries again
                with self._changed:
                    if not (isinstance(error, Freed) and self._offered is not None):  # too slow, and a newer one exists
                        self._failed = error
                    self._changed.notify_all()
                continue
            with self._changed:
                self._taken = version
                self._changed.notify_all()

    def _hand(self, version: int, steps: int | None) -> None:
        count = self._group.world_size
        named = {"version": [version] * count, "rank": [-1] * count}
        ray.get(self._group.execute_checkpoint_engine(["init_process_group"] * count, **named))
        ray.get(self._group.update_weights(global_steps=steps))
        ray.get(self._group.execute_checkpoint_engine(["finalize"] * count))


class _Replicas:
    """The replicas of one manager, by identity: verl adds and removes them."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[Any, ReplicaLoader]] = {}

    def of(self, replicas: Sequence[Any]) -> list[ReplicaLoader]:
        """A `ReplicaLoader` for each, created for new ones; those that verl removed are closed."""
        here = {id(replica) for replica in replicas}
        for gone in self._all.keys() - here:
            self._all.pop(gone)[1].close()
        for replica in replicas:
            if id(replica) not in self._all:
                self._all[id(replica)] = replica, ReplicaLoader(replica.workers)
        return [self._all[id(replica)][1] for replica in replicas]

    def close(self) -> None:
        for _, replica in self._all.values():
            replica.close()


_replicas: weakref.WeakKeyDictionary[Any, _Replicas] = weakref.WeakKeyDictionary()


def settle(manager: Any, version: int, timeout: float = engines.TIMEOUT_S) -> None:
    """Wait until each replica of the manager has loaded this version or a newer one. Raises NotReady, and the error
    of a replica."""
    end = time.monotonic() + timeout
    for replica in _replicas[manager].of(manager.replicas):
        replica.wait(version, max(0.0, end - time.monotonic()))


async def _update(manager: Any, global_steps: int | None) -> dict[str, Any]:
    """Publish the weights and offer them to the replicas. Replaces `update_weights` of the manager."""
    actors, count = manager.actor_wg, manager.actor_wg.world_size
    metadata = ray.get(actors.execute_checkpoint_engine(["prepare"] * count))
    ranks, _ = manager.backend_cls.build_topology(count, 0, metadata)
    ray.get(actors.execute_checkpoint_engine(["init_process_group"] * count, **ranks))
    results = ray.get(actors.update_weights(global_steps=global_steps, mode=manager.backend))
    ray.get(actors.execute_checkpoint_engine(["finalize"] * count))
    if manager not in _replicas:
        _replicas[manager] = made = _Replicas()
        weakref.finalize(manager, made.close)
    version = ranks["version"][0]
    errors = []
    for replica in _replicas[manager].of(manager.replicas):
        try:
            replica.offer(version, global_steps)
        except Exception as error:  # of an earlier version; the other replicas get this one
            errors.append(error)
    if errors:
        raise errors[0]
    if _settings(manager).get("wait"):
        settle(manager, version)
    return {key: value for result in results if isinstance(result, dict) for key, value in result.items()}


def _settings(manager: Any) -> Any:
    return manager.config.engine_kwargs.get(NAME, {})


def _have_nodes() -> None:
    if environment().address is None and ray.is_initialized():
        from dataplane.integrations import ray as nodes

        nodes.up()


def attach() -> None:
    """Replace the update of verl's managers for this backend. Idempotent."""
    own = theirs.CheckpointEngineManager.update_weights
    if hasattr(own, _MARK):
        return

    @wraps(own)
    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        if self.backend != NAME:
            return await own(self, global_steps)
        _have_nodes()
        if _settings(self).get("abort"):
            return await own(self, global_steps)
        return await _update(self, global_steps)

    awaiting = auto_await(update_weights)
    setattr(awaiting, _MARK, True)
    theirs.CheckpointEngineManager.update_weights = awaiting


attach()
log.info("registered the checkpoint engine %s", NAME)
