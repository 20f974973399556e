"""Jobs that benchmarks ask for rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.jobs import Job

PROGRAM = """
import sys
from bench.jobs import serve

_, _, what = sys.argv
print("a line of somebody else's", flush=True)

def measured(how):
    print("another", flush=True)
    if how == "end":
        sys.exit(3)
    return {"what": what, "how": how}

serve(measured)
"""


def test_rounds_of_several_jobs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Job("served", "a") as one, Job("served", "b") as other:
        for how in ("", "at once"):
            assert one.round(how) == {"what": "a", "how": how}
            assert other.round(how) == {"what": "b", "how": how}
        with pytest.raises(RuntimeError, match="the job ended with 3"):
            other.round("end")


def test_a_job_that_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="the job ended with 1"), Job("nowhere", "a"):
        pass
