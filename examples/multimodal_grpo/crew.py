"""The processes of the job: started, tied together, watched and stopped.

The main process starts the node, stores the pictures once and hands out references of them. After that it only
watches: no batch passes through it, in whatever form.

What always holds: when `run` returns or raises, its processes have ended. It lets go of the leash and each stops at
its next look at a wire; what has not after `STOP_S` is ended by force. What a process leaves in shared memory, the node
takes back when the process's connection ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import dataplane as dp
from examples.multimodal_grpo import digits, reward
from examples.multimodal_grpo.job import Failed, Finished, Job
from examples.multimodal_grpo.watch import Watch
from examples.multimodal_grpo.wires import Board, Stopped, wires

TRAINED_ON = 1500  # digits; the other 297 are for the examination
LOOK_S = 0.1  # between two looks at the node's figures
GRACE_S = 30.0  # beyond the job's own time, before the main process ends it
STOP_S = 5.0


def run(job: Job, watch: Watch) -> None:
    """Run the job; `watch` has seen all of it afterwards. Raises DataplaneError where the node fails."""
    config = dp.NodeConfig(memory=job.memory, spill=job.spill, spill_dir=job.spill_dir)
    with dp.connect(config=config) as plane:
        pictures = plane.put(digits.load(job.seed))
        with Crew() as crew:
            _start(crew, job, plane.address, pictures)
            _look_on(crew, job, plane, watch)
        watch.figures(plane.stats(), crew.passed_bytes)


def _start(crew: Crew, job: Job, address: str, pictures: dp.BatchRef) -> None:
    """rollout workers -> reward worker -> trainer -> (weights) -> rollout workers"""
    outlets, answered = crew.wires(job.rollout_workers, job.wire_depth)
    [rewarded], batches = crew.wires(1, job.wire_depth)
    board = crew.board()
    learn, examine = pictures[:TRAINED_ON], pictures[TRAINED_ON:]
    deadline = time.monotonic() + job.seconds

    crew.start("trainer", train, job, address, deadline, examine, board, batches)
    for worker, outlet in enumerate(outlets):
        crew.start(f"rollout {worker}", roll_out, job, address, worker, learn, board, outlet)
    crew.start("reward", verify, address, answered, rewarded)


def _look_on(crew: Crew, job: Job, plane: dp.Plane, watch: Watch) -> None:
    """Watch until the trainer has finished, a process has failed, or the time is over."""
    deadline = time.monotonic() + job.seconds + GRACE_S
    while time.monotonic() < deadline:
        watch.figures(plane.stats(), crew.passed_bytes)
        for report in crew.reports(LOOK_S):
            watch.report(report)
            if isinstance(report, Finished | Failed):
                return
    watch.report(Failed("job", f"not over {GRACE_S:.0f} s after its time"))


# What the processes run. They import it when they run: the main process and the reward worker need no torch.


def roll_out(reports: Connection, *args: Any) -> None:
    from examples.multimodal_grpo import rollout

    rollout.work(*args)


def train(reports: Connection, *args: Any) -> None:
    from examples.multimodal_grpo import trainer

    trainer.work(*args, reports)


def verify(reports: Connection, *args: Any) -> None:
    reward.work(*args)


class Crew:
    """Processes and what ties them together. A context manager: they have ended when it is left."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._leash, self._hand = self._context.Pipe(duplex=False)
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}  # by what they report over
        self._given: list[Any] = []  # ends of wires that a process will have, and nobody else
        self._boards: list[Board] = []  # kept: a process that starts looks for the lock by its name
        self._passed: list[Any] = []

    @property
    def passed_bytes(self) -> int:
        """Bytes that have passed over the wires and the board."""
        return sum(counter.value for counter in self._passed)

    def wires(self, count: int, depth: int) -> tuple[list[Any], Any]:
        """`count` wires of `depth` references each, and the inlet that they lead to."""
        outlets, inlet = wires(self._context, self._leash, depth, [self._counter() for _ in range(count)])
        self._given += [*outlets, inlet]
        return outlets, inlet

    def board(self) -> Board:
        """A board for the newest weights."""
        self._boards.append(Board(self._context, self._counter()))
        return self._boards[-1]

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process. It does not hear Ctrl-C: this one does, and stops it."""
        theirs, ours = self._context.Pipe()
        process = self._context.Process(target=_live, args=(name, target, theirs, *args), name=name, daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()
        self._processes[ours] = process

    def reports(self, timeout: float) -> Iterator[Any]:
        """What processes report within the timeout, in seconds; for one that was killed, that it was."""
        self._keep_no_ends()
        for ready in wait(list(self._processes), timeout):
            try:
                yield ready.recv()
            except (EOFError, ConnectionError):
                process = self._processes.pop(ready)
                ready.close()
                process.join(STOP_S)
                if process.exitcode != 0:
                    yield Failed(process.name, f"ended with exit code {process.exitcode}")  # a signal's, if negative

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_no_ends()
        self._hand.close()
        deadline = time.monotonic() + STOP_S
        for process in self._processes.values():
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in (*self._processes, self._leash):
            pipe.close()

    def _counter(self) -> Any:
        self._passed.append(self._context.RawValue("q"))
        return self._passed[-1]

    def _keep_no_ends(self) -> None:
        """Close our copies, so that the end of a process is seen at the other end of its wires."""
        while self._given:
            self._given.pop().close()


def _live(name: str, target: Callable[..., None], reports: Connection, *args: Any) -> None:
    """A process's life: it works until it is done or stopped, or says what went wrong."""
    try:
        target(reports, *args)
    except Stopped:
        pass
    except BaseException:
        with suppress(ConnectionError):  # the main process has died, and the node with it: there is nobody to tell
            reports.send(Failed(name, traceback.format_exc()))
        raise SystemExit(1) from None


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """What is started in here ignores Ctrl-C from its first instruction on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
