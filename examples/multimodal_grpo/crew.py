"""The processes of the job: starts, watches and stops them, and kills one of them during the job.

The main process starts the node, puts the pictures, makes the stream and passes on the node's address. From then on it
only watches: no batch passes through it.

Invariants: when `run` returns or raises, all processes have ended. `run` drops the stream, so each process stops at its
next use of the stream; those that still run after `STOP_S` are killed. When a process ends, the node releases its
shared memory and takes back the rows that it had not acked. A batch that a killed worker had put and not yet appended
stays in memory until the node ends.
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

TRAINED_ON = 1500  # digits; the other 297 are held out for the test
LOOK_S = 0.1  # between two reads of the node's statistics
GRACE_S = 30.0  # after the job's time limit, before the main process ends it
STOP_S = 5.0
CONTEXT = multiprocessing.get_context("spawn")


def run(job: Job, watch: Watch) -> None:
    """Run the job, and report it to `watch`. Raises DataplaneError if the node fails, ValueError if a batch cannot be
    divided into shares of whole groups."""
    if job.ranks < 1 or job.prompts % job.ranks:
        raise ValueError(f"{job.prompts} prompts a batch can not be shared among {job.ranks} ranks")
    kept = None if job.data_dir is None else Path(job.data_dir, "node")
    config = dp.NodeConfig(memory=job.memory, spill=job.spill, spill_dir=job.spill_dir, data_dir=kept)
    with tempfile.TemporaryDirectory() as directory, dp.connect(config=config) as plane:
        pictures = plane.put(digits.load(job.seed))
        limits = {"max_bytes": job.in_flight, "max_lag": job.max_lag}
        rollouts = plane.stream("rollouts", tasks=["reward", "actor"], durable=kept is not None, **limits)
        if (
            job.data_dir is not None and not rollouts.stats()["appended"]
        ):  # the state is that of an earlier job, which has dropped its stream
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
    """Watch until the trainer has finished, a process has failed, or the time is over. Yields the reports."""
    while time.monotonic() < deadline:
        watch.figures(plane.stats(), rollouts.stats())
        for report in crew.reports(LOOK_S):
            watch.report(report)
            yield report
            if isinstance(report, Finished | Failed):
                watch.figures(plane.stats(), rollouts.stats())
                return
    watch.report(Failed("job", f"not over {GRACE_S:.0f} s after its time"))


# The main functions of the processes. They import modules late: the main process and the reward worker need no torch.


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
    """Processes, by name. A context manager: at its end, all processes have ended."""

    def __init__(self) -> None:
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}  # by their pipe

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process. It ignores Ctrl-C, since the main process stops it then."""
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_live, args=(name, target, theirs, *args), name=name, daemon=True)
        with _interrupts_ignored():
            process.start()
        theirs.close()
        self._processes[ours] = process

    def kill(self, name: str) -> None:
        """Kill the process of this name (SIGKILL)."""
        for pipe, process in list(self._processes.items()):
            if process.name == name:
                del self._processes[pipe]
                process.kill()
                process.join()
                process.close()
                pipe.close()

    def reports(self, timeout: float) -> Iterator[Any]:
        """The reports that arrive within `timeout` seconds; `Failed` for a process that ended with an error."""
        for ready in wait(list(self._processes), timeout):
            if ready not in self._processes:
                continue  # killed since
            try:
                yield ready.recv()
            except (EOFError, ConnectionError):
                process = self._processes.pop(ready)
                ready.close()
                process.join(STOP_S)
                if process.is_alive():  # it closed its pipe, and does not end
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
    """Run the main function of a process until the stream is closed. Reports an error as `Failed`."""
    try:
        target(reports, *args)
    except dp.Closed:
        pass
    except BaseException:
        with suppress(ConnectionError):  # the main process has ended
            reports.send(Failed(name, traceback.format_exc()))
        raise SystemExit(1) from None


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started in this block ignore Ctrl-C from their first instruction on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
