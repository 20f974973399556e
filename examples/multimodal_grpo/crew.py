"""The processes of the job: started, watched, one of them killed on the way, and stopped.

The main process starts the node, stores the pictures once, makes the stream and hands out the node's address. After
that it only watches: no batch passes through it, in whatever form.

What always holds: when `run` returns or raises, its processes have ended. It drops the stream, and each stops when it
next uses it; what has not after `STOP_S` is ended by force. What a process holds in shared memory, and the rows that it
was delivered and has not acked, the node takes back when the process's connection ends. What it has put and not yet
appended stays: nobody else knows of it. For a worker that is killed that is one batch, until the node ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import dataplane as dp
from examples.multimodal_grpo import digits, reward
from examples.multimodal_grpo.board import Board
from examples.multimodal_grpo.job import Failed, Finished, Job, Killed, Step
from examples.multimodal_grpo.watch import Watch

TRAINED_ON = 1500  # digits; the other 297 are for the examination
LOOK_S = 0.1  # between two looks at the node's figures
GRACE_S = 30.0  # beyond the job's own time, before the main process ends it
STOP_S = 5.0
CONTEXT = multiprocessing.get_context("spawn")  # what processes are started by


def run(job: Job, watch: Watch) -> None:
    """Run the job; `watch` has seen all of it afterwards. Raises DataplaneError where the node fails, ValueError where
    a batch does not fall into shares of whole groups."""
    if job.ranks < 1 or job.prompts % job.ranks:
        raise ValueError(f"{job.prompts} prompts a batch can not be shared among {job.ranks} ranks")
    kept = None if job.data_dir is None else Path(job.data_dir, "node")
    config = dp.NodeConfig(memory=job.memory, spill=job.spill, spill_dir=job.spill_dir, data_dir=kept)
    with tempfile.TemporaryDirectory() as directory, dp.connect(config=config) as plane:
        pictures = plane.put(digits.load(job.seed))
        limits = {"max_bytes": job.in_flight, "max_lag": job.max_lag}
        rollouts = plane.stream("rollouts", tasks=["reward", "actor"], durable=kept is not None, **limits)
        if job.data_dir is not None and not rollouts.stats()["appended"]:  # of a stream that a job dropped at its end
            Path(job.data_dir, "trainer").unlink(missing_ok=True)
        board = Board(Path(directory, "newest"))
        learn, examine = pictures[:TRAINED_ON], pictures[TRAINED_ON:]
        deadline = time.monotonic() + job.seconds
        with Crew() as crew:

            def start_rollout(worker: int, life: int) -> None:
                crew.start(f"rollout {worker}", roll_out, job, plane.address, worker, life, learn, board)

            try:
                store = str(Path(directory, "ranks"))
                crew.start("trainer", train, job, plane.address, deadline, examine, board, store)
                for rank in range(1, job.ranks):
                    crew.start(f"trainer {rank}", follow, job, plane.address, rank, store)
                for worker in range(len(job.pauses)):
                    start_rollout(worker, 2 * job.life)
                crew.start("reward", verify, plane.address)
                for report in _reports(crew, deadline + GRACE_S, plane, rollouts, watch):
                    if isinstance(report, Step) and report.number == job.kill_at:
                        crew.kill(f"rollout {job.killed}")
                        start_rollout(job.killed, 2 * job.life + 1)
                        watch.report(Killed(f"rollout {job.killed}", report.number))
            finally:
                rollouts.drop()


def _reports(crew: Crew, deadline: float, plane: dp.Plane, rollouts: dp.Stream, watch: Watch) -> Iterator[Any]:
    """Watch until the trainer has finished, a process has failed, or the time is over; what was reported."""
    while time.monotonic() < deadline:
        watch.figures(plane.stats(), rollouts.stats())
        for report in crew.reports(LOOK_S):
            watch.report(report)
            yield report
            if isinstance(report, Finished | Failed):
                watch.figures(plane.stats(), rollouts.stats())
                return
    watch.report(Failed("job", f"not over {GRACE_S:.0f} s after its time"))


# What the processes run. They import it when they run: the main process and the reward worker need no torch.


def roll_out(reports: Connection, *args: Any) -> None:
    from examples.multimodal_grpo import rollout

    rollout.work(*args)


def train(reports: Connection, *args: Any) -> None:
    from examples.multimodal_grpo import trainer

    trainer.work(reports, *args)


def follow(reports: Connection, *args: Any) -> None:
    from examples.multimodal_grpo import trainer

    trainer.follow(*args)


def verify(reports: Connection, *args: Any) -> None:
    reward.work(*args)


class Crew:
    """Processes, by name. A context manager: they have ended when it is left."""

    def __init__(self) -> None:
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}  # by what they report over

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process. It does not hear Ctrl-C: this one does, and stops it."""
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_live, args=(name, target, theirs, *args), name=name, daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()
        self._processes[ours] = process

    def kill(self, name: str) -> None:
        """End the process of this name (SIGKILL), wherever it is in its work."""
        for pipe, process in list(self._processes.items()):
            if process.name == name:
                del self._processes[pipe]
                process.kill()
                process.join()
                process.close()
                pipe.close()

    def reports(self, timeout: float) -> Iterator[Any]:
        """What processes report within the timeout, in seconds; for one that others killed, that they did."""
        for ready in wait(list(self._processes), timeout):
            if ready not in self._processes:
                continue  # killed since
            try:
                yield ready.recv()
            except (EOFError, ConnectionError):
                process = self._processes.pop(ready)
                ready.close()
                process.join(STOP_S)
                if process.is_alive():  # its work is over, and its end takes long
                    process.kill()
                    process.join()
                elif process.exitcode != 0:
                    yield Failed(process.name, f"ended with exit code {process.exitcode}")  # a signal's, if negative

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + STOP_S
        for pipe, process in self._processes.items():
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()


def _live(name: str, target: Callable[..., None], reports: Connection, *args: Any) -> None:
    """A process's life: it works until the stream is closed, or says what went wrong."""
    try:
        target(reports, *args)
    except dp.Closed:
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
