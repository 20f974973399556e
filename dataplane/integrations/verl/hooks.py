"""Where TransferQueue's client asks its storage manager too little, and where it is made to ask.

What always holds: a client whose storage manager is another's does what it did; a hook that this TransferQueue does not
need is not there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from dataplane.integrations.verl import face

_MARK = "__wrapped_by_dataplane__"


def attach() -> None:
    """Have clients ask `replace_state` of their storage manager around the load of the controller's state, which is the
    last step of a load and has nothing of the storage's after it; and `look` before the controller forgets rows, where
    it does so before they are freed. Idempotent."""
    from transfer_queue.client import AsyncTransferQueueClient as Client

    if face.has_checkpoints():
        _wrap(Client, "async_load_controller_checkpoint", _loading)
    if face.forgets_first():
        _wrap(Client, "async_clear_samples", _clearing)


async def _loading(theirs: Any, client: Any, *arguments: Any, **named: Any) -> None:
    replace = getattr(getattr(client, "storage_manager", None), "replace_state", None)
    if replace is None:
        await theirs(client, *arguments, **named)
    else:
        await replace(lambda: theirs(client, *arguments, **named))


async def _clearing(theirs: Any, client: Any, metadata: Any) -> None:
    look = getattr(getattr(client, "storage_manager", None), "look", None)
    if look is not None:
        await look(metadata)
    await theirs(client, metadata)


def _wrap(owner: type, name: str, around: Any) -> None:
    theirs = getattr(owner, name)
    if hasattr(theirs, _MARK):
        return

    @wraps(theirs)
    async def call(self: Any, *arguments: Any, **named: Any) -> None:
        await around(theirs, self, *arguments, **named)

    setattr(call, _MARK, True)
    setattr(owner, name, call)
