"""Ray workers forked from one process that has imported torch: a worker that imports it itself takes six seconds of a
processor, and these tests start a hundred.

Ray runs this file where it would run its own `default_worker.py` (`use`). It hands its arguments, environment and
descriptors to the process that `preloaded` starts, which forks the worker, and waits until the worker has ended. The
worker runs Ray's own, and imports Ray: only what Ray is not part of is there before.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PRELOADED = [
    *("torch", "torch.distributed.tensor", "tensordict", "transformers", "transformers.models.auto.modeling_auto"),
    *("datasets", "accelerate", "fastapi", "hydra"),  # of verl's
]
VARIABLE = "PRELOADED_WORKERS"  # names the socket of the process that forks them


def use() -> None:
    """Have the Rays that this process starts run their workers so, if such a process runs."""
    from ray._private.parameter import RayParams

    given = RayParams.update_if_absent

    def update_if_absent(self: Any, **values: Any) -> None:
        if "worker_path" in values and VARIABLE in os.environ:
            values["worker_path"] = __file__
        given(self, **values)

    RayParams.update_if_absent = update_if_absent


@contextmanager
def preloaded() -> Iterator[str]:
    """The abstract name of the socket at which a process forks workers until the end of the context."""
    name = f"{VARIABLE}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{name}")
        listening.listen(64)
        command = [sys.executable, "-P", "-W", "ignore", __file__, VARIABLE, str(listening.fileno())]
        running = subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, pass_fds=[listening.fileno()], start_new_session=True
        )
    try:
        yield name
    finally:
        running.kill()
        running.wait(30)


def _hand_over() -> None:
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forking:
        forking.connect(f"\0{os.environ[VARIABLE]}")
        socket.send_fds(forking, [json.dumps(request).encode()], [0, 1, 2])
        forking.recv(1)  # nothing, when the worker has ended


def _fork(listening: socket.socket) -> None:
    import gc
    import signal

    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers that have ended
    while True:
        asking, _ = listening.accept()
        request, descriptors, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _run(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asking.close()


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    os.setpgid(0, 0)  # Ray ends what is left of the group of a worker that has ended
    for own, descriptor in enumerate(descriptors):
        os.dup2(descriptor, own)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = request["arguments"]
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1] == VARIABLE:
        _fork(socket.socket(fileno=int(sys.argv[2])))
    else:
        _hand_over()
