"""The settings of a stream. Opening it with other settings is refused."""

from __future__ import annotations

import msgspec

from dataplane.errors import Misuse

MAX_TASKS = 64
MAX_REPLICAS = 8


class StreamSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings. No limit: 0 for `max_bytes` and `max_rows`, -1 for `max_lag`."""

    tasks: tuple[str, ...]
    max_bytes: int = 0
    max_rows: int = 0
    max_lag: int = -1
    max_deliveries: int = 5
    replicas: int = 1
    group_size: int = 0
    """The most rows of a group; an append of this number of rows is a whole group. 0: unknown."""
    durable: bool = False
    """Whether changes that were answered survive the end of every process."""

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks) or not all(self.tasks):
            raise Misuse(f"a stream has one or more tasks, each with a name of its own, not {list(self.tasks)}")
        if len(self.tasks) > MAX_TASKS:
            raise Misuse(f"a stream has at most {MAX_TASKS} tasks, not {len(self.tasks)}")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise Misuse(f"replicas is 1 to {MAX_REPLICAS} hosts, not {self.replicas}")
        if self.group_size < 0:
            raise Misuse(f"a group has a row or more, not {self.group_size}")
        if not 1 <= self.max_deliveries <= 255:
            raise Misuse(f"max_deliveries is 1 to 255, not {self.max_deliveries}")
        if self.max_bytes < 0 or self.max_rows < 0 or self.max_lag < -1:
            raise Misuse(f"max_bytes, max_rows and max_lag are not negative: {self}")

    def check_same(self, stream: str, asked: StreamSettings) -> None:
        """Raises Misuse if a stream with these settings was opened with others."""
        defaults = StreamSettings(asked.tasks)

        def unset(name: str, value: object) -> bool:
            return type(value) is int and value == getattr(defaults, name)

        other = [
            f"{f'the default {name}' if unset(name, there) else f'{name}={there!r}'}, and this asks for "
            f"{'the default' if unset(name, wanted) else repr(wanted)}"
            for name in self.__struct_fields__
            if (there := getattr(self, name)) != (wanted := getattr(asked, name))
        ]
        if other:
            raise Misuse(
                f"the stream {stream!r} was made with {'; with '.join(other)};"
                f" plane.stream({stream!r}) without tasks opens it as it is"
            )

    @property
    def limited(self) -> bool:
        """Whether any limit can delay appends."""
        return bool(self.max_bytes or self.max_rows or self.max_lag >= 0)

    def task(self, name: str) -> int:
        """The number of a task. Raises Misuse for an unknown name."""
        if name not in self.tasks:
            raise Misuse(f"this stream has no task {name!r}; it has {', '.join(self.tasks)}")
        return self.tasks.index(name)
