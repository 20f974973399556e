"""The code of a page, run as a program of its own: forked from a server that has imported torch, and forgotten."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
import traceback
import types
import warnings
from contextlib import suppress
from pathlib import Path

from tests import torches


def run(blocks: list[Path], directory: Path, environment: dict[str, str], limit_s: float) -> tuple[int, str, str]:
    """Run the blocks one after another in one namespace, each from its file, so that processes can be spawned from it.

    Returns the exit code, what it printed, and what it said besides. Raises AssertionError where it does not end.
    """
    out, said = directory / "stdout", directory / "stderr"
    process = torches.torches.Process(target=_program, args=(blocks, directory, environment, out, said))
    process.start()
    try:
        process.join(limit_s)
        assert process.exitcode is not None, f"it did not end within {limit_s} s: {said.read_text()}"
        return process.exitcode, out.read_text(), said.read_text()
    finally:
        if process.exitcode != 0:  # what it had started is there yet
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # if it has no group of its own yet
        process.join()
        process.close()


def _program(blocks: list[Path], directory: Path, environment: dict[str, str], out: Path, said: Path) -> None:
    os.setsid()
    for number, path in ((1, out), (2, said)):
        written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(written, number)
        os.close(written)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    for name in ("DATAPLANE_ADDRESS", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    os.environ |= environment
    tempfile.tempdir = None  # it was asked for before
    os.chdir(directory)
    warnings.simplefilter("always", ResourceWarning)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for block in blocks:
        main.__file__ = str(block)
        try:
            exec(compile(block.read_text(), str(block), "exec"), main.__dict__)
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
    atexit._run_exitfuncs()  # as an interpreter ends, which a fork does not: with what is warned of then
    main.__dict__.clear()
    gc.collect()
