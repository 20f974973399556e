"""The tensor transport `DATAPLANE` of Ray: tensors that an actor returns are put into the plane, and the actors that
receive them read them there.

    dataplane.integrations.ray_tensors.register()      # before the classes that name it

    class Rollout:
        @ray.method(tensor_transport="DATAPLANE")
        def generate(self): return {"input_ids": tensor, ...}

    ray.init()
    dataplane.integrations.ray.up()

This module owns the rows of the tensors that this process returned, from the return until Ray has no reference to them.

Invariants: the tensors of one object are stored by one put, as one row with a column for each tensor, and Ray sends
only the reference. Receivers get the values at the time of the return; later writes to the tensors do not reach them. A
receiver reads in place, and its writes are private. The rows are freed when Ray drops its last reference, or when the
process that returned them ends, as with Ray's other transports. No tensors are sent between actors, so a failed
transfer ends no actor.

Rejected: a scope for each object, which would never be freed after the death of its actor. The node frees the staged
columns of a client that is gone, so all tensors of a process are staged under one scope.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.client.ownership import ending_scope
from dataplane.errors import DataplaneError, Misuse, SchemaMismatch
from dataplane.integrations import process
from dataplane.integrations.process import with_plane

NAME = "DATAPLANE"
"""The name for `ray.method(tensor_transport=...)`."""

DEVICES = ("cpu", "cuda")

_NO_RAY = "Ray with tensor transports is needed (tested with 2.60): pip install 'rollout-dataplane[ray]'"

try:
    from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
except ImportError as error:
    raise Misuse(_NO_RAY) from error


@dataclass
class Metadata(TensorTransportMetadata):  # type: ignore[misc]
    """The message from the actor that returned tensors to their receivers.

    ref: a reference to one row; None if there are no tensors.
    columns: the column of each tensor; a repeated tensor is stored once.
    """

    ref: BatchRef | None = None
    columns: tuple[int, ...] = ()


class PlaneTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport of one process. Several threads of Ray call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put: dict[str, Metadata] = {}

    def tensor_transport_backend(self) -> str:
        """The name of the transport."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """True: only the receiver takes part in a transfer, because the plane has the bytes."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """True: a failed transfer needs no cleanup, so Ray ends no actor for it."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """True for every actor. If an actor finds no node, its call raises an error that says so."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        """Put the tensors. Returns their location; the same for a task that is repeated.

        Raises Misuse if no node is known or the tensors are on several kinds of devices, SchemaMismatch for a tensor
        that is not strided, and as `Plane.put`.
        """
        with self._lock:
            known = self._put.get(obj_id)
        if known is not None:
            return known
        made = self._store(rdt_object)
        with self._lock:
            self._put[obj_id] = made
        return made

    def _store(self, tensors: list[Any]) -> Metadata:
        if not tensors:
            return Metadata(tensor_meta=[], tensor_device=None)
        kinds = sorted({tensor.device.type for tensor in tensors})
        if len(kinds) > 1:
            raise Misuse(f"the tensors of one object are on one kind of device, not on {' and '.join(kinds)}")
        columns: dict[tuple[Any, ...], int] = {}
        rows: dict[str, Any] = {}
        found = []
        for tensor in tensors:
            _check(tensor)
            column = columns.setdefault(_identity(tensor), len(columns))
            found.append(column)
            rows.setdefault(str(column), tensor.detach().resolve_conj().resolve_neg().unsqueeze(0))
        ref = with_plane(lambda plane: plane.put(rows, scope=ending_scope("ray")))
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return Metadata(tensor_meta=shapes, tensor_device=kinds[0], ref=ref, columns=tuple(found))

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Empty: the two sides need no agreement."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """The tensors, in place, or in the given buffers. Raises as `Plane.get`, and Misuse if no node is known."""
        found = tensor_transport_metadata
        if not isinstance(found, Metadata):
            raise Misuse(f"object {obj_id} was returned by another transport ({type(found).__name__})")
        if found.ref is None:
            return []
        device = None if found.tensor_device == "cpu" or target_buffers else found.tensor_device
        ref = found.ref
        batch = with_plane(lambda plane: plane.get(ref, device=device))
        tensors = [batch[str(column)].torch()[0] for column in found.columns]
        if not target_buffers:
            return tensors
        for buffer, tensor in zip(target_buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return list(target_buffers)

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Not called: Ray calls this for two-sided transports only."""
        raise NotImplementedError(f"{NAME} is one-sided: the receiver reads")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Free the rows; the tensors of receivers stay valid."""
        with self._lock:
            self._put.pop(obj_id, None)
        if tensor_transport_meta.ref is not None:
            with suppress(DataplaneError):  # their node has gone with them, or is away and gets the free later
                process.plane().free(tensor_transport_meta.ref)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Does nothing: a receive ends at its own deadline."""


def register() -> None:
    """Register the transport with Ray in this process, and in the actors that it creates later. Idempotent.

    Ray looks the name up when a class says `ray.method(tensor_transport="DATAPLANE")`: call this before such a class
    is defined.

    Raises Misuse if PyTorch is not installed.
    """
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.util import transport_manager_info

    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise Misuse("Ray's tensor transports carry tensors of PyTorch: install torch") from error
    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, list(DEVICES), PlaneTransport, torch.Tensor)


def _identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors of the same elements of the same memory; tensors without elements have no address."""
    place = (tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()) if tensor.numel() else ()
    return (*place, tensor.dtype, tuple(tensor.shape))


def _check(tensor: Any) -> None:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SchemaMismatch(f"a tensor of layout {tensor.layout} can not be passed by {NAME}: pass tensor.to_dense()")
