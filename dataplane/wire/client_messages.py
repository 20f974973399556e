"""The decoders of all messages between a client and its node. Messages are typed and validated as they are decoded, and
never unpickled."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from dataplane.stream.packing import unhook
from dataplane.wire import messages, row_messages, shard_messages


def _union(base: type[messages.Message]) -> Any:
    """The messages of a base class."""
    found = [each for module in (messages, row_messages, shard_messages) for each in vars(module).values()]
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, base)]
    return reduce(or_, [kind for kind in kinds if kind.__struct_config__.tag is not None])


AnyRequest = _union(messages.FromClient)
"""The messages of a client, to decode one."""

AnyReply = _union(messages.Reply)
"""The messages of a node, to decode one."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of these messages, including the arrays and references in them."""
    return msgspec.msgpack.Decoder(kind, dec_hook=unhook)
