"""Processes that have torch imported: forked from a server that has, as a fresh one takes two seconds of a processor.

The server runs nothing of torch, and so has none of its threads, which a fork would lose.
"""

from __future__ import annotations

from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from unittest.mock import patch

from tests.processes import FROZEN, PRELOADED

_server = forkserver.ForkServer()
_TORCH = ["torch", "torch.distributed", "examples.multimodal_grpo.trainer", "examples.multimodal_grpo.rollout"]
_server.set_forkserver_preload([*PRELOADED, *_TORCH, FROZEN])


class _Popen(Popen):
    def _launch(self, process_obj: ForkServerProcess) -> None:
        with patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            super()._launch(process_obj)  # type: ignore[misc]


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: ForkServerProcess) -> _Popen:  # type: ignore[override]
        return _Popen(process_obj)


class TorchContext(ForkServerContext):
    """As the context `forkserver`, of a server of its own."""

    Process = _Process  # type: ignore[assignment]


torches = TorchContext()


def _nothing() -> None:
    pass


def warm() -> None:
    """Start the server, so that no test is taken to have left it behind."""
    _server.ensure_running()
    process = torches.Process(target=_nothing)
    process.start()
    process.join()
    process.close()
