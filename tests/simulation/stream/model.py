"""A partition's rows as its committed commands make them, one after the other, in the plainest way: what the stream's
own state machine, with its pages and arrays, has to agree with."""

from __future__ import annotations

from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.progress import ACKED, PENDING
from tests.simulation.stream.machine import LABEL, MAX_DELIVERIES, TASKS


class Row:
    """A row that is there. `holders`: by column, the nodes' lives that have it; `shards`: where it is stored."""

    __slots__ = ("done", "dropped", "group", "holders", "key", "label", "nacks", "pieces", "reward", "shards", "token")

    def __init__(
        self, label: str, group: str | int | None, key: str, holders: frozenset[bytes], shard: tuple[bytes, int]
    ) -> None:
        self.shards = {"x": shard}
        self.label = label
        self.group = group
        self.key = key
        self.holders = {"x": holders}
        self.reward = 0  # the shard
        self.done: set[int] = set()
        self.nacks = [0] * len(TASKS)
        self.dropped = False
        self.token = 0
        """Of a row in progress, who brings it."""
        self.pieces: list[tuple[bytes, int]] = []


class Model:
    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.next = 0
        self.keys: dict[str, int] = {}
        self.acked: set[tuple[int, int]] = set()
        self.dropped: set[int] = set()
        self.expired: set[int] = set()
        self.lost: dict[int, str] = {}  # -> key
        self.gone: set[bytes] = set()
        self.closed = False

    def groups(self) -> dict[str | int, list[int]]:
        """The rows of each group, but for those that were dropped."""
        found: dict[str | int, list[int]] = {}
        for offset, row in self.rows.items():
            if row.group is not None and not row.dropped:
                found.setdefault(row.group, []).append(offset)
        return found

    def dead(self, offset: int, task: int) -> bool:
        return self.rows[offset].nacks[task] >= MAX_DELIVERIES

    def applied(self, command: c.AnyCommand, result: r.StreamResult) -> list[int]:
        """A command that was not done before; the rows of which leases are over by it."""
        if isinstance(result, r.CommandRefused):
            return []
        if isinstance(command, r.Append):
            self._append(command, result)
        elif isinstance(command, r.Extend):
            holders = frozenset((command.ref.shards()[0][0], *command.nodes))
            for offset in command.rows.tolist():
                self.rows[offset].holders["reward"] = holders
                self.rows[offset].shards["reward"] = command.ref.shards()[0]
                self.rows[offset].reward = command.ref.shards()[0][1]
        elif isinstance(command, r.ExtendRow):
            self._grow(command, result)
        elif isinstance(command, r.ResumeRow):
            self.rows[command.row].token = command.token
        elif isinstance(command, r.AbandonRow):
            if command.row in self.rows and self.rows[command.row].token == command.token:
                self.rows[command.row].dropped = True
                self.dropped.add(command.row)
        elif isinstance(command, c.SettleCommand):
            self._settle(command)
        elif isinstance(command, r.Drop):
            for offset in command.rows.tolist():
                if offset in self.rows:
                    self.rows[offset].dropped = True
                    self.dropped.add(offset)
        elif isinstance(command, r.Retry):
            self._retry(command, result)
        elif isinstance(command, c.RemoveCommand):
            for offset in command.rows.tolist():
                if offset in self.rows:
                    self._remove(offset)
        elif isinstance(command, r.Lose):
            return self._lose(command.node)
        elif isinstance(command, r.Close):
            self.closed = True
        return []

    def _append(self, command: r.Append, result: r.StreamResult) -> None:
        assert isinstance(result, r.AppendResult)
        if not result.new:
            return
        for i in range(len(command.ref)):
            key = command.keys[i] if command.keys else ""
            group = command.groups[i] if command.groups else None
            (shard,) = command.ref[i : i + 1].shards()
            holders = frozenset((shard[0], *command.nodes))
            self.rows[self.next] = Row(str(command.tags[LABEL][i]), group, key, holders, shard)
            self.rows[self.next].token = command.begin[0] if command.begin else 0
            if key:
                self.keys[key] = self.next
            self.next += 1

    def _grow(self, command: r.ExtendRow, result: r.StreamResult) -> None:
        assert isinstance(result, r.AppendResult)
        if not result.new:
            return
        row, shard = self.rows[command.row], command.ref.shards()[0]
        name = f"y{len(row.pieces)}"
        row.holders[name], row.shards[name] = frozenset((shard[0], *command.nodes)), shard
        row.pieces.append(shard)
        if command.piece.last:
            row.token = 0

    def _settle(self, command: c.SettleCommand) -> None:
        for offset in command.rows.tolist():
            row = self.rows.get(offset)
            if row is None or command.task in row.done:
                continue
            if command.state == PENDING:
                row.nacks[command.task] += 1
                continue
            row.done.add(command.task)
            if command.state == ACKED:
                self.acked.add((command.task, offset))
            else:
                self.expired.add(offset)
            if len(row.done) == len(TASKS) and not row.dropped:
                self._remove(offset)

    def _retry(self, command: r.Retry, result: r.StreamResult) -> None:
        task = TASKS.index(command.task)
        there = [o for o in command.rows.tolist() if o in self.rows and not self.rows[o].dropped]
        dead = [offset for offset in there if self.dead(offset, task)]
        assert isinstance(result, r.RetryResult)
        assert result.rows == len(dead)
        for offset in dead:
            self.rows[offset].nacks[task] = 0

    def _lose(self, node: bytes) -> list[int]:
        """Rows that lack a column now go."""
        self.gone.add(node)
        lost = [
            offset
            for offset, row in self.rows.items()
            if not row.dropped and any(of <= self.gone for of in row.holders.values())
        ]
        for offset in lost:
            self.lost[offset] = self.rows[offset].key
            self._remove(offset)
        return lost

    def _remove(self, offset: int) -> None:
        row = self.rows.pop(offset)
        if row.key and self.keys.get(row.key) == offset:
            del self.keys[row.key]
