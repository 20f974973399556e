"""Every error that crosses the public interface, split by what the caller does next.

    DataplaneError
    ├── Retryable              try again, later or elsewhere; nothing was changed
    │   ├── Backpressure       no room before the deadline; names the holders of the bytes
    │   ├── NotReady           no rows, or no version of weights, were ready before the deadline
    │   └── PeerUnavailable    the node does not answer or has gone
    ├── OutcomeUnknown         it may have been done, or may still be; the same request again settles it
    ├── LeaseExpired           the rows or memory went to another process; the same call fails again
    ├── Lost                   the data are gone; make them again
    │   ├── OwnerDied          the node that held them has died, or is not in the cluster
    │   ├── Corrupt            the bytes are not those that were written
    │   └── Freed              they were freed, or replaced in a table
    ├── Rejected               refused; the same call will be refused again
    │   ├── Unauthenticated    the peer may not use this node
    │   ├── ProtocolMismatch   the two sides use different versions, or a message is invalid
    │   └── LimitExceeded      larger than a configured limit, whatever the load
    └── Misuse                 the calling code is wrong
        ├── Closed             the plane, or an object from it, was closed before
        ├── Forked             a plane was used in a child of the process that connected it
        ├── KeyExists          a stream has a row with this key, of another append
        └── SchemaMismatch     values do not form a column, or a column does not exist

An error is a message and fields: `error.fields` is a dict of plain values, each of which is an attribute too. So any
error of this tree is picklable, and can cross a socket as a message (`describe`) and be raised again on the other side
(`revive`) without unpickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class DataplaneError(Exception):
    """The root. Not raised itself."""

    #: The fields of errors of this class, with their defaults.
    FIELDS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        unknown = fields.keys() - self.FIELDS.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(message)
        self.fields: dict[str, Any] = {**self.FIELDS, **fields}

    def __getattr__(self, name: str) -> Any:
        if name in type(self).FIELDS and "fields" in self.__dict__:
            return self.fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return revive, (type(self).__name__, str(self), self.fields)


class Retryable(DataplaneError):
    """Try again, later or elsewhere; nothing was changed."""


class Backpressure(Retryable):
    """There was no room, or spilled data were not read back, before the deadline.

    `needed`: the requested bytes; `waited_s`: the seconds waited. `holders`: the processes that hold memory, the
    largest first, then those that hold the disk: dicts of `holder` (text), `bytes`, `how` ("pinned", "reserved",
    "stored" or "spilled"), `owner` (the stream, table or scope, or empty) and `oldest_s` (the age of the oldest of
    these shards). `spill_error` says why spilling did not help, or is empty.
    """

    FIELDS = {"needed": 0, "waited_s": 0.0, "holders": (), "spill_error": ""}


class NotReady(Retryable):
    """Before the deadline, after `waited_s` seconds, no rows of `stream` were ready for `task`. Also raised for a table
    with too few rows, and for weights without the wanted version; `stream` is then the name of the table or the
    weights."""

    FIELDS = {"stream": "", "task": "", "waited_s": 0.0}


class PeerUnavailable(Retryable):
    """The node at `address` does not answer, or has gone; the request was not sent, or has no lasting effect. A request
    with a lasting effect raises OutcomeUnknown instead."""

    FIELDS = {"address": ""}


class LeaseExpired(DataplaneError):
    """The lease of the rows, or of the memory, ended after `lease_s` seconds, and others have them. The same call fails
    again: go on with other rows, or put again."""

    FIELDS = {"lease_s": 0.0}


class OutcomeUnknown(DataplaneError):
    """A request that changes something was sent and not answered: it may have been executed, or may yet be. The same
    request again settles it: a claim with the same id and an ack are executed once, as is an append with the same keys
    while its rows exist. An extend is repeated with `replace`. A request that cannot be repeated, such as a nack, is
    refused if it was executed. `epoch`: that of the partition, if its leader did not answer."""

    FIELDS = {"epoch": 0}


class Lost(DataplaneError):
    """The data are gone. Make them again."""


class OwnerDied(Lost):
    """The data were held by `node`, which has died or is not in the cluster."""

    FIELDS = {"node": ""}


class Corrupt(Lost):
    """The bytes of `shard` are not those that were written. They were not served."""

    FIELDS = {"shard": -1, "path": ""}


class Freed(Lost):
    """The rows were freed. `shard`: the number of the first shard with such rows. `columns`: the requested columns that
    are stored in it. If the whole shard was freed recently: `scope`, under which it was put; `age_s`, the seconds since
    it was freed; `freed_by`, the client that freed it, or the last stream that needed it. Unknown fields are empty, or
    -1."""

    FIELDS = {"shard": -1, "columns": (), "scope": "", "freed_by": "", "age_s": -1.0}


class Rejected(DataplaneError):
    """Refused. The same call will be refused again."""


class Unauthenticated(Rejected):
    """The other side is not permitted to connect to this one."""

    FIELDS = {"peer": ""}


class ProtocolMismatch(Rejected):
    """The two sides speak different major versions, or a message is invalid."""

    FIELDS = {"ours": "", "theirs": ""}


class DirectoryUnusable(Rejected):
    """A node cannot use its data directory, or cannot write there any more. The message says what to do.

    `reason`: "in use", "another node's", "another cluster's", "another program's", "another version's", "another
    user's", "read-only", "no permission", "file system", "failed" or "closed", or "used up" if no shard numbers are
    left.
    """

    FIELDS = {"path": "", "reason": ""}


class LimitExceeded(Rejected):
    """`asked` is more than `limit`, the bound called `what`; waiting would not help."""

    FIELDS = {"what": "", "asked": 0, "limit": 0}


class Misuse(DataplaneError):
    """The calling code is wrong."""


class Closed(Misuse):
    """The object was closed before. `drained`: a stream has no more rows for the task, which has done all except `dead`
    letters, dropped rows and `expired` ones."""

    FIELDS = {"drained": False, "dead": 0, "expired": 0}


class Forked(Misuse):
    """A plane was used in a child of the process that connected it. The child must connect by itself."""

    FIELDS = {"connected_in": 0}


class KeyExists(Misuse):
    """A stream has a row with this `key` already, of another append. If an append is repeated after a kill, some of its
    rows were appended then."""

    FIELDS = {"key": ""}


class SchemaMismatch(Misuse):
    """Values do not form a column, or a column does not exist.

    `column`: its name; `row`: the first row that does not fit (-1 if none is wrong); `expected` and `found`:
    descriptions of the two sides.
    """

    FIELDS = {"column": "", "row": -1, "expected": "", "found": ""}


def _tree(root: type[DataplaneError]) -> dict[str, type[DataplaneError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(DataplaneError)


def describe(error: DataplaneError) -> tuple[str, str, dict[str, Any]]:
    """The error as plain values: its class's name, its message, its fields. For a class of another module, the name is
    that of its nearest base class in this one, which the other side raises."""
    kind = next(each for each in type(error).__mro__ if each.__name__ in _BY_NAME)
    return kind.__name__, str(error), error.fields


def revive(name: str, message: str, fields: Mapping[str, Any]) -> DataplaneError:
    """The error from the values of `describe`. Names and fields that this version lacks are left out."""
    kind = _BY_NAME.get(name, Rejected)
    known = {k: v for k, v in fields.items() if k in kind.FIELDS}
    return kind(message, **{k: tuple(v) if isinstance(kind.FIELDS[k], tuple) else v for k, v in known.items()})
