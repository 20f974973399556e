"""The decoders of all messages between a client and its node. Messages are typed and validated as they are decoded, and
never unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.stream.packing import unhook, union
from dataplane.wire import messages, row_messages, shard_messages

_names = {**vars(messages), **vars(row_messages), **vars(shard_messages)}

AnyRequest = union(_names, messages.FromClient)
"""The messages of a client, to decode one."""

AnyReply = union(_names, messages.Reply)
"""The messages of a node, to decode one."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of these messages, including the arrays and references in them."""
    return msgspec.msgpack.Decoder(kind, dec_hook=unhook)
