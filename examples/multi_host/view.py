"""The output of the job: a line every two seconds and for each event, and a summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from dataplane.config import format_size
from examples.multi_host.stages import Appended, Counted, MadeAgain, Named, Over
from examples.multimodal_grpo.job import Failed, Finished, Job, Step

LINE_S = 2.0
_BAR = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a host: bytes of memory, bytes received and sent by its link (by its node if it has no link), and
    requests to and from other nodes. All are 0 if it is dead."""

    used: int = 0
    budget: int = 0
    peak: int = 0
    came: int = 0
    went: int = 0
    requests: int = 0


class View:
    """Prints and keeps the reports of the processes and the figures of the hosts."""

    def __init__(self, job: Job, names: Sequence[str], out: TextIO) -> None:
        self._job = job
        self._names = names
        self._out = out
        self._began = self._said = time.monotonic()
        self._acked: list[tuple[float, int]] = [(self._began, 0)]
        self.steps: list[Step] = []
        self.made_again: list[str] = []
        self.appended: set[str] = set()
        self.counted: list[str] = []
        self.lost: set[str] = set()
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self._all_named = False
        self.last = [Figures()] * len(names)

    @property
    def over(self) -> bool:
        """Whether the trainer and the first rollout worker have finished, or a process has failed."""
        return self.failed is not None or (self.finished is not None and self._all_named)

    @property
    def exact(self) -> bool:
        """Whether each row that was reported as appended was either counted or lost, and none was counted twice. Rows
        may be counted without a report, if their host died between append and report."""
        once = set(self.counted)
        return len(once) == len(self.counted) and self.appended <= once | self.lost and not once & self.lost

    @property
    def enough(self) -> bool:
        """Whether the job's steps are made, or its target is reached."""
        job, made = self._job, len(self.steps)
        if job.steps is not None and made >= job.steps:
            return True
        return made >= job.averaged and self.steps[-1].average >= job.target

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def say(self, what: str) -> None:
        """Print a line with the time."""
        print(f"{self.seconds:5.1f} s  {what}", file=self._out, flush=True)

    def report(self, report: Any) -> None:
        """Keep the report of a process. `MadeAgain` is printed, too."""
        match report:
            case Step():
                self.steps.append(report)
            case MadeAgain():
                self.made_again += report.groups
                self.say(f"rollout {report.worker} makes {len(report.groups)} prompts with lost rows again")
            case Named():
                self.lost.update(report.keys)
            case Appended():
                self.appended.update(report.keys)
            case Counted():
                self.counted += report.keys
            case Over():
                self._all_named = True
            case Finished():
                self.finished = report
            case Failed():
                self.failed = report

    def figures(self, hosts: Sequence[Figures], stream: Mapping[str, Any] | None) -> None:
        """Keep the hosts' figures, and print a line every two seconds. stream: its statistics, None if unknown."""
        self.last = [now if now.budget else then for now, then in zip(hosts, self.last, strict=True)]
        if time.monotonic() - self._said < LINE_S:
            return
        self._said = time.monotonic()
        self.say(f"{self._learning()} | {self._flow(stream)} | {self._memory(hosts)}")

    def _learning(self) -> str:
        if not self.steps:
            return f"reward ---- {'.' * _BAR}"
        average = self.steps[-1].average
        full = round(average * _BAR)
        return f"reward {average:.2f} {'#' * full}{'.' * (_BAR - full)} step {self.steps[-1].number:3}"

    def _flow(self, stream: Mapping[str, Any] | None) -> str:
        if stream is None:
            return "the stream waits for new leaders of its partitions"
        now, acked = time.monotonic(), int(stream["task"]["actor"]["acked"])
        then, before = self._acked[-1]
        self._acked.append((now, acked))
        return f"{max(0, acked - before) / (now - then):5.0f} rows/s, {stream['rows']:5,} in the stream"

    def _memory(self, hosts: Sequence[Figures]) -> str:
        said = []
        for name, host in zip(self._names, hosts, strict=True):
            memory = f"{host.used >> 20}/{host.budget >> 20} MiB" if host.budget else "dead"
            said.append(f"{name}: {memory}, in {format_size(host.came)}, out {format_size(host.went)}")
        return "; ".join(said)

    def summary(self) -> int:
        """Print the results. Returns 0 if the target is reached and the count exact, 130 if interrupted, else 1."""
        if self.failed is not None:
            self.say(f"{self.failed.process} failed. Everything is stopped.\n{self.failed.error}")
            return 1
        if self.finished is None:
            self.say("interrupted. Everything is stopped.")
            return 130
        done, books = self.finished, self.finished.books
        counted = sum(books.counted.values())
        rate = sum(step.rows for step in self.steps) / self.seconds
        self.say(f"{len(self.steps)} updates, {rate:.0f} rows/s including start and end, {counted:,} rows counted")
        for name, host in zip(self._names, self.last, strict=True):
            over = f"{format_size(host.came)} received and {format_size(host.went)} sent"
            memory = f"memory {format_size(host.peak)} at most, of {format_size(host.budget)}"
            print(f"         host {name}: {over}; {memory}; {host.requests:,} requests", file=self._out)
        if self.made_again:
            print(f"         {len(self.made_again)} prompts with lost rows were made again", file=self._out)
        missing = len(self.appended - set(self.counted) - self.lost)
        unheard = len(set(self.counted) - self.appended)
        lost = len(self.lost & self.appended)
        known = (
            f"{counted - unheard:,} counted, {lost:,} named as lost, {missing} missing; counted twice: {books.again}"
        )
        verdict = "exact" if self.exact else "NOT exact"
        print(f"         {len(self.appended):,} rows appended: {known}: {verdict}", file=self._out)
        if unheard:
            print(f"         {unheard:,} more counted, whose host died before it reported them", file=self._out)
        print(f"         right on digits that were not trained on: {done.accuracy:.0%}", file=self._out)
        learnt = done.average >= self._job.target
        verdict = "reached" if learnt else "NOT reached"
        print(f"         reward {done.average:.2f} of {self._job.target:g}: {verdict}", file=self._out)
        return 0 if learnt and self.exact else 1
