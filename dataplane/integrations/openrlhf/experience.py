"""An `Experience` of OpenRLHF, or several, into the plane and back.

    there = put(experience)              # or put([experience, ...]); picklable, a few hundred bytes
    experience = get(there)              # as it was
    experience = get(there, fields=["sequences", "action_mask"])      # nothing else is read
    free(there)

Every field is returned as it was: tensors with their shapes and dtypes, on the CPU; None; prompts, labels, images
and index; `info` with its content. `mm_train_inputs` are dicts again, or with `lazy=True` handles to them
(`integrations.rows`). Equal inputs are stored once, as those of the responses of one prompt. The stored rows stay
until they, or their scope, are freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.integrations.openrlhf.remote import RemoteList, SentRows, is_experience
from dataplane.integrations.process import plane as plane_of_process

#: OpenRLHF's class, which is not imported here: it takes seconds.
Experience = Any


class RemoteExperience:
    """The result of `put`: a stored Experience, or a list of them. Picklable."""

    def __init__(self, items: RemoteList, several: bool) -> None:
        self.items = items
        self.several = several

    @property
    def refs(self) -> list[BatchRef]:
        """References to the columns: named as the fields, with one row an Experience, and those of the inputs."""
        return self.items.refs

    def __len__(self) -> int:
        """The number of Experiences."""
        return len(self.items)

    def __repr__(self) -> str:
        return f"RemoteExperience({len(self)} of them, {sum(ref.nbytes for ref in self.refs)} bytes)"


def put(
    experience: Experience | Sequence[Experience], *, scope: str | None = None, timeout: float = 60.0
) -> RemoteExperience:
    """Store an Experience, or several.

    Raises SchemaMismatch with the field for a value that no column represents: tensors on a device or with
    requires_grad, functions. Raises Misuse for anything but Experiences, and as `Plane.put`.
    """
    several = isinstance(experience, Sequence)
    items = list(experience) if several else [experience]
    for item in items:
        if not is_experience(item):
            raise Misuse(f"put takes an openrlhf Experience or a list of them, not {type(item).__name__}")
    sent = SentRows(plane_of_process(), remembers=False, scope=scope, timeout=timeout)
    return RemoteExperience(RemoteList.of("experience", items, sent, strict=True), several)


def get(
    there: RemoteExperience, *, fields: Collection[str] | None = None, lazy: bool = False, device: Any = None
) -> Experience:
    """The Experience, or the list of them.

    fields: read these; the others have the values of a new Experience. None: all.
    device: the device of its tensors, instead of a later `experience.to_device(device)`.
    lazy: return `mm_train_inputs` as handles that read them at the first access.

    Raises as `Plane.get`.
    """
    items = there.items[:]  # items stay mapped only while they are used, not as long as `there`
    found = [items.item(index, fields, lazy=lazy) for index in range(len(items))]
    for each in found if device is not None else ():
        each.to_device(device)
    return found if there.several else found[0]


def free(there: RemoteExperience) -> None:
    """Free the stored rows; idempotent. Batches that were read stay valid."""
    for ref in there.refs:
        plane_of_process().free(ref)
