"""The display of the running job: three bars on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import dataplane as dp
from dataplane.config import format_size
from examples.multimodal_grpo.job import Failed, Finished, Job, Killed, Step

LINE_S = 3.0
MIB = 1 << 20


class Watch:
    """Shows and records all reports and statistics. A context manager: the bars are shown in its block."""

    def __init__(self, job: Job, console: Console) -> None:
        self._job = job
        self._console = console
        self._began = time.monotonic()
        self._said = 0.0
        self._introduced = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
        )
        self._reward = self._progress.add_task("reward", total=job.target, figures="starting")
        self._memory = self._progress.add_task("memory", total=None, figures="")
        self._stream = self._progress.add_task("stream", total=None, figures="")
        self._streamed: Mapping[str, Any] = {}
        self.steps: list[tuple[float, Step]] = []
        self.samples: list[tuple[float, dp.Stats]] = []
        self.killed: list[Killed] = []
        self.finished: Finished | None = None
        self.failed: Failed | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def report(self, report: Any) -> None:
        """Take a report: `job.Step`, `job.Killed`, `job.Finished` or `job.Failed`."""
        match report:
            case Step():
                self.steps.append((self.seconds, report))
            case Killed():
                self.killed.append(report)
                said = f"{report.process} was killed at step {report.step}, as planned, and is started again"
                self._console.print(said, highlight=False)
            case Finished():
                self.finished = report
            case Failed():
                self.failed = report
        self._show()

    def figures(self, stats: dp.Stats, stream: Mapping[str, Any]) -> None:
        """Take the present statistics of the node and of the stream."""
        self.samples.append((self.seconds, stats))
        self._streamed = stream
        self._show()

    def _show(self) -> None:
        if not self.samples:
            return
        _, now = self.samples[-1]
        reward = self.steps[-1][1].average if self.steps else 0.0
        learning = "starting"
        if self.steps:
            step = self.steps[-1][1]
            learning = f"{reward:.2f} of {self._job.target:g}, step {step.number}, {self.seconds:.0f} s"
        used, budget = now.memory_used / MIB, now.memory_budget / MIB
        memory = f"{used:.0f}/{budget:.0f} MiB, {format_size(now.spilled_bytes)} spilled"
        memory += f", {now.waits} waits, {now.waiting} now"
        held, limit = self._streamed["bytes"], self._streamed["max_bytes"]
        stream = f"{held / MIB:.0f}/{limit / MIB:.0f} MiB, {self._streamed['rows']:,} rows"
        stream += f", {self._streamed['waiting']} appends wait"
        if self._console.is_terminal:
            self._progress.update(self._reward, completed=reward, figures=learning)
            self._progress.update(self._memory, completed=used, total=budget, figures=memory)
            self._progress.update(self._stream, completed=held, total=limit, figures=stream)
        elif not self.steps:
            if not self._introduced:
                self._introduced = True
                self._console.print("The processes start; the first step comes in some seconds.", highlight=False)
        elif self.seconds - self._said > LINE_S:
            self._said = self.seconds
            said = f"reward {learning} | memory {memory} | stream {stream}"
            self._console.print(said, highlight=False, soft_wrap=True)

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
