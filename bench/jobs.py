"""Jobs of a benchmark: processes that measure a round on request, one for each compared system, so that all systems
are measured alternately in one run.

A job reads a line for each round and answers with a line of "@" and JSON. Other lines are ignored. It ends with its
input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BACKENDS = ("SimpleStorage", "Dataplane")
"""TransferQueue's own storage backend, and ours."""
_LAST_LINES = 20
"""Lines of a failed job's standard error that an error has."""


class Job:
    """The process `python -m program --serve what`. It is ready when the `with` block begins."""

    def __init__(self, program: str, what: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.pop("DATAPLANE_ADDRESS", None)
        command = [sys.executable, "-m", program, "--serve", what]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 it is closed at the end of the block
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def round(self, how: str = "") -> Any:
        """Measure a round. Returns its figures. Raises RuntimeError with the job's last lines if it has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and there is no answer
            self._process.stdin.write(f"{how}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        ended = f"the job ended with {self._process.wait()}: {self._process.args}"
        self._log.seek(0)
        raise RuntimeError("\n".join([ended, *self._log.read().splitlines()[-_LAST_LINES:]]))

    def __enter__(self) -> Job:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(measured: Callable[[str], Any]) -> None:
    """Answer each line of standard input with the result of `measured` for it."""
    print("@{}", flush=True)
    for line in sys.stdin:
        print("@" + json.dumps(measured(line.strip())), flush=True)


@contextmanager
def transfer_queue(backend: str, memory: str, objects: int) -> Iterator[Any]:
    """Run TransferQueue with this backend in a Ray of its own. objects: bytes of Ray's object store."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    import dataplane.integrations.verl.plugin  # noqa: F401  # registers our backend

    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=objects, log_to_driver=False)
    try:
        settings = {"storage_backend": backend, "Dataplane": {"memory": memory, "spill": 0}}
        tq.init(OmegaConf.create({"backend": settings}))
        yield tq
    finally:
        tq.close()
        ray.shutdown()


def by_turns(program: str, doors: Sequence[str], rounds: int) -> dict[str, list[Any]]:
    """The figures of `rounds` rounds of a job for each of `doors`, alternately. One more round warms up before."""
    found: dict[str, list[Any]] = {name: [] for name in doors}
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(Job(program, name)) for name in doors}
        for number in range(rounds + 1):
            for name, job in jobs.items():
                figures = job.round()
                if number:
                    found[name].append(figures)
    return found


def actors(kind: type, count: int = 2) -> list[Any]:
    """`count` Ray actors of this class, once all are ready."""
    import ray

    made = [ray.remote(num_cpus=0)(kind).remote() for _ in range(count)]
    ray.get([each.__ray_ready__.remote() for each in made])
    return made
