"""The library that fails calls into the operating system (`shim.c`), and the rule that it follows."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

HANG = -1
EVERY = 1 << 30

_RULE = struct.Struct("4i32s64s3i")
_COUNTS = struct.Struct("3i")
_COUNTS_AT = _RULE.size - _COUNTS.size


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(directory: Path) -> Path:
    made, source, command = directory / "shim.so", Path(__file__).with_name("shim.c"), compiler()
    assert command is not None, "a C compiler"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-w"]
    subprocess.run([command, *flags, "-o", str(made), str(source), "-ldl", "-pthread"], check=True)
    return made


def name(error: int) -> str:
    return "hang" if error == HANG else errno.errorcode[error]


class Rule:
    """What is failed now, in a file that the process maps too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_RULE.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RULE.size)
        self._number = 0

    def arm(self, call: str, error: int, *, first: int = 1, count: int = 1, target: str = "") -> None:
        """Fail `count` of these calls from the `first` on (from 1), of those that are about `target`."""
        self.disarm()
        self._number += 1
        _RULE.pack_into(self._memory, 0, 0, error, first, count, call.encode(), target.encode(), 0, 0, 0)
        struct.pack_into("i", self._memory, 0, self._number)  # now it holds

    def disarm(self) -> None:
        """Fail nothing any more; what hangs goes on."""
        struct.pack_into("i", self._memory, 0, 0)

    @property
    def seen(self) -> int:
        return int(_COUNTS.unpack_from(self._memory, _COUNTS_AT)[0])

    @property
    def failed(self) -> int:
        return int(_COUNTS.unpack_from(self._memory, _COUNTS_AT)[1])

    @property
    def hung(self) -> int:
        return int(_COUNTS.unpack_from(self._memory, _COUNTS_AT)[2])

    def close(self) -> None:
        self.disarm()
        self._memory.close()
