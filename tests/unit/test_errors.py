"""The tree of errors: what each is, what it carries, and that it survives a pickle and a message."""

from __future__ import annotations

import copy
import pickle

import msgspec

from dataplane import errors
from dataplane.coordinator.base import Unavailable
from dataplane.errors import DataplaneError, Freed, Rejected, describe, revive
from tests.cases import each_case


def subclasses(root: type[DataplaneError]) -> list[type[DataplaneError]]:
    own = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]  # doors have more of theirs
    return [root, *(found for child in own for found in subclasses(child))]


EVERY = subclasses(DataplaneError)
every = each_case("kind", EVERY)


def test_the_error_hierarchy_is_split_by_the_reaction_of_the_caller() -> None:
    tree = {root.__name__: sorted(leaf.__name__ for leaf in EVERY if leaf.__bases__[0] is root) for root in EVERY}
    assert {root: leaves for root, leaves in tree.items() if leaves} == {
        "DataplaneError": ["LeaseExpired", "Lost", "Misuse", "OutcomeUnknown", "Rejected", "Retryable"],
        "Retryable": ["Backpressure", "NotReady", "PeerUnavailable"],
        "Lost": ["Corrupt", "Freed", "OwnerDied"],
        "Rejected": ["DirectoryUnusable", "LimitExceeded", "ProtocolMismatch", "Unauthenticated"],
        "Misuse": ["Closed", "Forked", "KeyExists", "SchemaMismatch"],
    }


@every
def test_each_error_survives_pickling_copying_and_encoding(kind: type[DataplaneError]) -> None:
    error = kind("no luck")
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error)))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), revive(*message)):
        assert type(again) is kind
        assert str(again) == "no luck"
        assert {name: getattr(again, name) for name in kind.FIELDS} == {
            name: list(value) if isinstance(value, tuple) and again.fields[name] == [] else value
            for name, value in kind.FIELDS.items()
        }


def test_an_error_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    again = revive("Freed", "gone", {"shard": 7, "since": "yesterday"})
    assert isinstance(again, Freed)
    assert again.fields == {**Freed.FIELDS, "shard": 7}
    unknown = revive("Evicted", "gone", {"shard": 7})
    assert type(unknown) is Rejected
    assert str(unknown) == "gone"


def test_an_internal_error_is_decoded_as_its_nearest_public_base() -> None:
    again = revive(*describe(Unavailable("the coordinator is away")))
    assert type(again) is errors.Retryable
    assert str(again) == "the coordinator is away"
