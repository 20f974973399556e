"""A registry for the processes of a Ray job: an actor with the name of TransferQueue's controller.

    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    ray.get(controller.get_config.remote())

The first `init()` of a Ray job creates the actor. Workers get the name and the address of the job from it, independent
of their environment; recipes get the configuration. A worker that uses TransferQueue itself finds a controller, asks it
for the configuration, and has its calls replaced when that arrives: by `init()`, as in verl, or by its first call.

Invariants: without Ray the registry does nothing; the actor of another Ray job is never used. A Ray cluster has at most
one actor of a name: if two Ray jobs run, the second has none, and its workers find it by their environment or Ray job.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataplane.config import environment, export_address
from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import module_patch
from dataplane.integrations.transfer_queue.settings import Job, at

log = logging.getLogger(__name__)

NAME, NAMESPACE = "TransferQueueController", "transfer_queue"
"""The name and namespace of TransferQueue's own controller."""

_OTHERS = (
    "the TransferQueue of this Ray cluster is that of another Ray job, whose rows are not there for this one: close"
    " that one first, or start a Ray for each job; or call transfer_queue.init() in the driver of this job with"
    " backend.storage_backend=Dataplane, and it has rows of its own"
)
_THEIRS = (
    "TransferQueue itself runs in this Ray cluster: what imports transfer_queue there reaches that, and what imports"
    " dataplane.integrations.transfer_queue reaches dataplane: they share no rows"
)
_WAIT_S = 60.0

_lock = threading.Lock()  # two threads may make their first calls at once
_posted: Any = None  # the actor's handle: it would end with its last
_said: Posted | None = None  # in the actor's process, its content: an actor cannot call itself while it answers


@dataclass(frozen=True, slots=True)
class Posted:
    """The content of the registry. address: the address of the job's node, if that is not one of the Ray job; place:
    the Ray node on which it runs."""

    job: Job
    address: str
    place: str

    def attach(self) -> None:
        """Attach this process to the job's plane. Raises Misuse if the plane's node is on another host."""
        own = environment().address
        if not self.address or own is not None:
            return
        if self.place != _place():
            raise Misuse(
                f"this job's node is at {self.address} on another host, and no node is known here: start one of its"
                " cluster here (`dataplane node`) and put its address into DATAPLANE_ADDRESS, or leave that out for the"
                " whole job, and each Ray node gets a node"
            )
        export_address(self.address)


class DataplaneController:
    def __init__(self, posted: Posted, config: Any) -> None:
        global _said
        _said = self._posted = posted
        self._config = config

    def posted(self) -> Posted:
        return self._posted

    def get_config(self) -> Any:
        """The configuration, as `init()` got it."""
        return _Config(self._config, process.ray_job())

    def list_partitions(self) -> list[str]:
        """The names of the job's partitions."""
        names: list[str] = self._client().get_partition_list()
        return names

    def get_partition_snapshot(self, partition_id: str) -> Any:
        """See `JobPartition.snapshot`."""
        from dataplane.integrations.transfer_queue.session import session

        return session().partition(partition_id).snapshot()

    def clear_partition(self, partition_id: str, clear_consumption: bool = True) -> None:
        """Delete all rows of the partition."""
        self._client().clear_partition(partition_id)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> None:
        """Mark the rows as not consumed by the task."""
        self._client().reset_consumption(partition_id, task_name)

    def _client(self) -> Any:
        from dataplane.integrations.transfer_queue.client import get_client

        return get_client()


class _Config:
    """A configuration that is unpickled to itself; if TransferQueue asked for it, its calls are replaced then."""

    def __init__(self, config: Any, job: Any) -> None:
        self._config = config
        self._job = job

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        return _arrived, (self._config, self._job)


def _arrived(config: Any, job: Any) -> Any:
    with _lock:
        if _theirs():
            from dataplane.integrations import ray as nodes

            if process.ray_job() != job and environment().address is None and not nodes.running():
                sys.modules["transfer_queue.interface"]._TQ_CONTROLLER = None  # type: ignore[attr-defined]  # its close() would end the actor
                raise Misuse(_OTHERS)
            module_patch.take_over(dense=bool(at(config, "backend.Dataplane.dense")))
    return config


def _theirs() -> bool:
    """Whether TransferQueue itself uses the actor in this process: it keeps the handle, and then calls it."""
    interface = sys.modules.get("transfer_queue.interface")
    return not module_patch.is_in() and getattr(interface, "_TQ_CONTROLLER", None) is not None


def read() -> Posted | None:
    """The registry of this Ray job; None without Ray, and before the first `init()`."""
    if _said is not None:
        return _said
    actor = _actor()
    if actor is None or not _is_own(actor):
        return None
    import ray
    from ray.exceptions import RayError

    try:
        posted: Posted = ray.get(actor.posted.remote(), timeout=_WAIT_S)
    except RayError:  # it has ended with the process that created it
        return None
    return posted


def check() -> None:
    """Raises Misuse if the calls of TransferQueue were replaced in this process while it runs in the Ray cluster."""
    actor = _actor()
    if actor is None or _class_of(actor) == DataplaneController.__name__:
        return
    if module_patch.is_in():
        raise Misuse(f"{_THEIRS}: call transfer_queue.close() where that was initialised, and then init() again")
    log.warning(_THEIRS)


def post(job: Job, config: Any) -> None:
    """Write the registry of this Ray job, unless the cluster has an actor of that name."""
    global _posted
    if process.ray_job() is None or _actor() is not None:
        return
    import ray

    posted = Posted(job, environment().address or "", _place())
    made = ray.remote(DataplaneController).options(name=NAME, namespace=NAMESPACE, num_cpus=0)
    with suppress(ValueError):  # another process was first, with the same
        _posted = made.remote(posted, config)


def clear() -> None:
    """Delete the registry if this process created it. Idempotent."""
    global _posted
    actor, _posted = _posted, None
    if actor is not None and process.ray_job() is not None and _is_own(actor):
        import ray

        ray.kill(actor)


def _actor() -> Any:
    if process.ray_job() is None:
        return None
    import ray

    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:  # there is none
        return None


def _is_own(actor: Any) -> bool:
    """Whether the actor is a registry of this Ray job."""
    own = process.ray_job()
    return _class_of(actor) == DataplaneController.__name__ and own is not None and actor._actor_id.job_id == own[1]


def _class_of(actor: Any) -> str:
    return str(actor._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]


def _place() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
