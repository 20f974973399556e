"""An `Experience` of OpenRLHF, or several, in the plane and back.

    there = put(experience)              # or put([experience, ...]); picklable, a few hundred bytes
    experience = get(there)              # tensors in place
    experience = get(there, fields=["sequences", "action_mask"])      # nothing else is read
    free(there)

Every field comes back as it was: tensors with their shapes and dtypes, on the CPU; None; prompts, labels, images and
index; `info` with what is in it. `mm_train_inputs` are dicts again, or with `lazy=True` handles to them
(`integrations.rows`). Equal inputs are stored once, as those of a prompt's responses are. What was put stays until it
is freed, or with its scope.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.integrations.openrlhf.ledger import Ledger
from dataplane.integrations.openrlhf.outline import is_experience
from dataplane.integrations.openrlhf.remote import RemoteList
from dataplane.integrations.process import plane as plane_of_process

#: OpenRLHF's class, which is not imported here: it takes seconds.
Experience = Any


class RemoteExperience:
    """What `put` gave: an Experience, or a list of them, that is in the plane. Picklable."""

    def __init__(self, items: RemoteList, several: bool) -> None:
        self.items = items
        self.several = several

    @property
    def refs(self) -> list[BatchRef]:
        """Where it is: columns named as the fields are, with a row a sample."""
        return self.items.refs

    def __len__(self) -> int:
        """How many Experiences it is."""
        return len(self.items)

    def __repr__(self) -> str:
        return f"RemoteExperience({len(self)} of them, {sum(ref.nbytes for ref in self.refs)} bytes)"


def put(
    experience: Experience | Sequence[Experience], *, scope: str | None = None, timeout: float = 60.0
) -> RemoteExperience:
    """Store an Experience, or several.

    Raises SchemaMismatch, naming the field, for what no column holds: tensors on a device or that require grad,
    pictures. Raises Misuse for what is no Experience, and as `Plane.put`.
    """
    several = isinstance(experience, Sequence)
    items = list(experience) if several else [experience]
    for item in items:
        if not is_experience(item):
            raise Misuse(f"put takes an openrlhf Experience or a list of them, not {type(item).__name__}")
    ledger = Ledger(plane_of_process(), remembers=False, scope=scope, timeout=timeout)
    return RemoteExperience(RemoteList.of("experience", items, ledger, strict=True), several)


def get(
    there: RemoteExperience, *, fields: Collection[str] | None = None, lazy: bool = False, device: Any = None
) -> Experience:
    """The Experience, or the list of them.

    fields: read these, and give the others as a new Experience has them. None: all.
    device: where its tensors are to be, in place of `experience.to_device(device)` afterwards.
    lazy: leave `mm_train_inputs` where they are, and give handles that read them when somebody looks into those.

    Raises as `Plane.get`.
    """
    items = there.items[:]  # what is read stays in place only for as long as it is used, not as long as `there`
    found = [items.item(index, fields, lazy=lazy, device=device) for index in range(len(items))]
    return found if there.several else found[0]


def free(there: RemoteExperience) -> None:
    """Free it; idempotent. What was read of it stays."""
    for ref in there.refs:
        plane_of_process().free(ref)
