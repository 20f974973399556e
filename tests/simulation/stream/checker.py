"""The invariants of a run, checked at each step that could break one. Numbers are those of `docs/testing.md`."""

from __future__ import annotations

from random import Random

from dataplane.batch.ref import BatchRef
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.progress import PENDING
from dataplane.stream.sampler import CompleteGroups
from dataplane.stream.settings import MAX_TASKS
from tests.simulation.checker import LogChecker, Violation
from tests.simulation.stream.columns import Columns, Shard
from tests.simulation.stream.machine import LABEL, TASKS, decoded, decoded_result
from tests.simulation.stream.model import Model
from tests.simulation.world import World


class Checker(LogChecker):
    """What was told to clients, the one log that all replicas have to have, and what it makes (`model`)."""

    def __init__(self, world: World, partition: int, max_rows: int, stored: Columns) -> None:
        super().__init__(world)
        self._partition = partition
        self._max_rows = max_rows  # 0: any number
        self._stored = stored
        self.model = Model()
        self._granted: dict[tuple[int, int], tuple[int, float]] = {}  # (task, row) -> (grant, true time it ends)
        self._grants: dict[int, tuple[int, list[int]]] = {}  # -> task and rows
        self._readers: dict[Shard, list[int]] = {}  # grants whose rows are read from it
        self._done: dict[tuple[str, int], tuple[bytes, int]] = {}  # sequences -> result and command
        self.acked: set[tuple[int, int]] = set()
        self.labels: dict[int, str] = {}  # of rows whose append was answered
        self._named: set[int] = set()  # lost rows that somebody was told of

    # Called by machines and nodes

    def applied(self, count: int, command: bytes, result: bytes, rows: int) -> None:
        if not self.is_new(count, command, result):
            return
        made = decoded(command)
        known = [self._known(key, each, count) for key, each in _results(made, result)]
        if not any(known):
            self._first(made, decoded_result(result))
        elif not all(known):
            raise Violation(f"5: {made} is done though some of it was")
        self._have(made, rows)

    def _known(self, key: tuple[str, int], result: bytes, count: int) -> bool:
        """Whether this was done before, by another command."""
        before = self._done.setdefault(key, (result, count))
        if before[0] != result:
            raise Violation(f"5: {key} has the results {before[0]} and {result}")
        return before[1] != count

    def _have(self, command: c.AnyCommand, rows: int) -> None:
        if rows != len(self.model.rows):
            raise Violation(f"1: {command} leaves {rows} rows, and {len(self.model.rows)} by the log")
        if self._max_rows and rows > self._max_rows:
            raise Violation(f"6: there are {rows} rows, of {self._max_rows} that may be there")

    def _first(self, command: c.AnyCommand, result: r.StreamResult) -> None:
        model = self.model
        if isinstance(command, r.Append) and isinstance(result, r.AppendResult):
            there = model.keys.get(command.keys[0]) if command.keys else None
            if result.first != (model.next if there is None else there) or result.new != (there is None):
                raise Violation(f"5: {command.keys} is row {there}, and this append was told {result}")
        if isinstance(command, r.Extend) and isinstance(result, r.Succeeded):
            for offset, hold in zip(command.rows.tolist(), command.holds.tolist(), strict=True):
                held = self._granted.get((hold % MAX_TASKS, offset))
                if hold % MAX_TASKS in model.rows[offset].done:
                    continue  # the task is done with it: nobody's columns are in the way
                if held is None or held[0] != hold // MAX_TASKS:
                    raise Violation(f"3: {command.client} extends row {offset} under {hold // MAX_TASKS} after {held}")
        if isinstance(command, r.ExtendRow) and isinstance(result, r.AppendResult) and result.new:
            row, piece = model.rows.get(command.row), command.piece
            if row is None or row.dropped or row.token != piece.token or len(row.pieces) != piece.number:
                raise Violation(
                    f"7: {command.client} brings {piece} of row {command.row}, which another brings, or has"
                )
        if isinstance(command, r.ResumeRow) and isinstance(result, r.UnfinishedRows):
            told = BatchRef.decode(result.rows[0].columns)
            pieces = model.rows[command.row].pieces
            if pieces and told.select("y").shards() != tuple(pieces):
                raise Violation(f"7: row {command.row} has the pieces {pieces}, and {told.shards()} are told")
        lost = model.applied(command, result)
        for offset in lost:
            over = {self._granted.get((task, offset), (0, 0.0))[0] for task in range(len(TASKS))} - {0}
            for grant in over:  # all of its rows go to others
                self._give_up(*self._grants[grant], grant)
        if isinstance(command, c.SettleCommand) and command.state == PENDING and isinstance(result, r.Succeeded):
            for offset in command.rows.tolist():
                self._granted.pop((command.task, offset), None)
        if isinstance(command, r.TakeLost) and isinstance(result, r.LostRowsResult):
            self._tell_lost(result)

    def _give_up(self, task: int, offsets: list[int], grant: int) -> None:
        for offset in offsets:
            held = self._granted.get((task, offset), (0, 0.0))
            if held[0] == grant and (task, offset) not in self.model.acked:
                del self._granted[task, offset]

    def _tell_lost(self, told: r.LostRowsResult) -> None:
        for offset, key, _, _, acked in told.rows:
            if self.model.lost.get(offset) not in (key, "") or offset in self._named:
                raise Violation(f"1: row {offset} is told lost, and it is not, or was told before")
            if acked != sum(1 << task for task in range(len(TASKS)) if (task, offset) in self.model.acked):
                raise Violation(f"2: row {offset} is told lost, and other tasks had acked it than is said")
            self._named.add(offset)

    def answering(self, request: r.StreamRequest, outcome: bytes, node: str, epoch: int, rate: float) -> None:
        self.one_answers(node, epoch)
        result = decoded_result(outcome)
        if isinstance(request, r.Consume) and isinstance(result, r.Delivered):
            self.delivering(request, result, node, epoch, rate)
        elif isinstance(request, r.Append) and isinstance(result, r.AppendResult):
            self._appended(request, result)
        elif isinstance(request, r.Ack) and isinstance(result, r.Succeeded):
            self._acked(request.grant)
        elif isinstance(result, r.CommandRefused) and isinstance(request, r.TakeLost | r.Close | r.Drop | r.Lose):
            raise Violation(f"6: {request} is refused: {result}")

    def delivering(self, request: r.Consume, given: r.Delivered, node: str, epoch: int, rate: float) -> None:
        """A leader is about to tell a client of rows that it holds."""
        self.newest_answers(node, epoch)
        now, model, task = self._world.now, self.model, TASKS.index(request.task)
        offsets: list[int] = given.rows.tolist()
        for at, offset in enumerate(offsets):
            key, row = (task, offset), model.rows.get(offset)
            if key in self.acked:
                raise Violation(f"2: {node} delivers {key} in epoch {epoch}, and it was acked")
            if row is None or row.dropped or task in row.done or model.dead(offset, task):
                raise Violation(f"2: {node} delivers {key}, which is gone, done, dropped or dead")
            if row.token:
                raise Violation(f"7: {node} delivers {key}, which is in progress")
            before, until_s = self._granted.get(key, (0, 0.0))
            if before > given.grant or (before >> 32 == given.grant >> 32 and now < until_s - 1e-6):
                raise Violation(f"3: {node} leases {key} as {given.grant} while {before} lives until {until_s:.3f}")
            if given.tags[LABEL][at] != row.label or given.groups[at] != row.group:
                raise Violation(f"1: row {offset} is {given.tags[LABEL][at]}, and was appended as {row.label}")
            if "reward" in request.columns and given.ref[[at]].select("reward").shards()[0][1] != row.reward:
                raise Violation(f"1: row {offset} has another reward than its holder brought last")
            self._granted[key] = given.grant, now + request.lease_s / rate
        self._grants[given.grant] = task, offsets
        for shard in set(given.ref.shards()):
            self._readers.setdefault(shard, []).append(given.grant)
        if isinstance(request.sampler, CompleteGroups):
            self._whole(task, offsets)

    def _whole(self, task: int, offsets: list[int]) -> None:
        """5: groups are delivered whole, each once."""
        rows, groups = self.model.rows, self.model.groups()
        for group in {rows[offset].group for offset in offsets}:
            all_of_it = set(groups[group]) if group is not None else set()
            left = {offset for offset in all_of_it if task not in rows[offset].done}
            left -= {offset for offset in left if self.model.dead(offset, task)}
            if not left or not left <= set(offsets):
                raise Violation(f"5: the group {group!r} has the rows {left}, and {offsets} are delivered")

    def _appended(self, request: r.Append, result: r.AppendResult) -> None:
        for at, label in enumerate(request.tags[LABEL]):
            if self.labels.setdefault(result.first + at, str(label)) != label:
                raise Violation(f"1: {label} and {self.labels[result.first + at]} were both answered as one row")

    def _acked(self, grant: int) -> None:
        task, offsets = self._grants[grant]
        for offset in offsets:
            held = self._granted.get((task, offset))
            if held is None or held[0] != grant:
                raise Violation(f"3: the ack of {(task, offset)} by {grant} was taken, and {held} came after")
            self.acked.add((task, offset))

    def freeing(self, shard: Shard) -> None:
        """1: a node is about to free a shard, which no row needs, and no holder of one."""
        for offset, row in self.model.rows.items():
            if shard in row.shards.values():
                raise Violation(f"1: {shard} is freed, and row {offset} needs it")
        for grant in self._readers.get(shard, ()):
            task, offsets = self._grants[grant]
            for key in ((task, offset) for offset in offsets):
                held, until_s = self._granted.get(key, (0, 0.0))
                live = held == grant and grant >> 32 == self._term and self._world.now < until_s
                if live and key not in self.model.acked:
                    raise Violation(f"1: {shard} is freed, and {grant} of {key} lives until {until_s:.3f}")

    @property
    def _term(self) -> int:
        """The epoch in which who leads began."""
        last = self.configurations[-1]
        term = last.epoch
        for each in reversed(self.configurations):
            if each.leader != last.leader:
                break
            term = each.epoch
        return term

    # For clients

    def dead_letters(self) -> list[int]:
        tasks = range(len(TASKS))
        return [
            o for o, row in self.model.rows.items() if not row.dropped and any(self.model.dead(o, t) for t in tasks)
        ]

    def some(self, rng: Random) -> list[int]:
        """A row that is there, if there are any."""
        there = [offset for offset, row in self.model.rows.items() if not row.dropped]
        return [rng.choice(there)] if there else []

    @property
    def unnamed(self) -> bool:
        """Whether rows are lost that nobody was told of."""
        return len(self._named) < len(self.model.lost)

    # At the end

    def drained(self) -> bool:
        """1: every row is done, or dropped, or lost, and who was lost is named."""
        return not self.model.rows and not self.unnamed

    def missing(self) -> str:
        left = {o: (row.done, row.nacks, row.dropped) for o, row in self.model.rows.items()}
        return f"{left} and {set(self.model.lost) - self._named} to be named"

    def final(self) -> None:
        """1: what was answered is what the log has; what a task was told that it acked counts; what is lost was only on
        nodes that died."""
        model = self.model
        if not self.acked <= model.acked:
            raise Violation(f"2: the acks of {self.acked - model.acked} were answered, and are in no log")
        for offset in self.labels:
            gone = offset in model.lost or offset in model.dropped or offset in model.expired
            if not gone and not all((task, offset) in model.acked for task in range(len(TASKS))):
                raise Violation(f"1: row {offset}, answered as {self.labels[offset]}, was not done by each task")
        if not model.gone <= self._stored.dead:
            raise Violation(f"1: {model.gone - self._stored.dead} were taken for dead")


def _results(command: c.AnyCommand, result: bytes) -> list[tuple[tuple[str, int], bytes]]:
    """By client and sequence, what a command has made: of appends that came together, those of each."""
    if not isinstance(command, r.Append) or not command.parts:
        return [((command.client, command.sequence), result)] if command.sequence else []
    told = decoded_result(result)
    if not isinstance(told, r.AppendResult):
        return []
    found, first = [], told.first
    for client, sequence, rows in command.parts:
        found.append(((client, sequence), r.encode_result(r.AppendResult(first, rows, True))))
        first += rows
    return found
