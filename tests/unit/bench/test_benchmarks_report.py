"""The report, from small files: what is in it, what is said to be missing, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report.__main__ import main
from bench.report.markdown import BEGIN, END, between, text
from bench.report.results import EXPECTED, read

MACHINE = {
    "cpu": "A processor", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "python": "3.11.7",
    "versions": {"numpy": "2.0"}, "commit": "abc1234", "when": "2026-01-01T00:00:00Z",
}  # fmt: skip
ROW = {
    "name": "put | get", "value": 1.5, "bound": 2.0, "unit": "x", "below": False, "runs": [1.25, 1.5, 1.75],
    "detail": "", "met": False,
}  # fmt: skip


def _measured(step: float) -> dict[str, Any]:
    return {
        "put_s": [step / 2] * 3, "get_s": [step / 2] * 3, "step_s": [step, step, step * 1.5], "read_s": [step * 2] * 3,
        "cpu_s": [0.25] * 3, "moved_bytes": 10**9, "peak_bytes": 512 << 20, "memory": [[0.0, 1e6], [0.1, 5e8]],
    }  # fmt: skip


PEERS = {
    "machine": MACHINE, "rows": [ROW], "scale": 0.03125, "runs": 3, "load": [0.5, 1.25],
    "workloads": {
        name: {"what": "rows", "nbytes": 10**9, "reads": 1} for name in ("video", "dense 1 MiB", "dense 18 MiB")
    },
    "faster": [{"workload": "dense 1 MiB", "system": "ray", "what": "put and get", "ours_s": 0.5, "theirs_s": 0.25}],
    "systems": {
        "dataplane": {"title": "dataplane", "versions": {"rollout-dataplane": "0.1.0"}, "how": "", "errors": {},
                      "workloads": {"video": _measured(0.5), "dense 1 MiB": _measured(0.5)}},
        "ray": {"title": "Ray", "versions": {"ray": "2.60.0"}, "how": "pip install ray==2.60.0",
                "workloads": {"video": _measured(1.0), "dense 1 MiB": _measured(0.25)},
                "errors": {"dense 18 MiB": "a producer ended: out of <memory>"}},
        "mooncake": {"title": "Mooncake Store", "how": "apt-get install libibverbs1", "workloads": {}, "errors": {},
                     "error": "libibverbs.so.1: cannot open shared object file"},
    },
}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    (tmp_path / "local.json").write_text("{ not json")
    (tmp_path / "stream.json").write_text("[]")
    return tmp_path


def test_a_file_that_is_missing_or_wrong_is_said_and_nothing_invented(results: Path) -> None:
    found = read(results)
    assert list(found.files) == ["peers"]
    assert len(found.missing) == len(EXPECTED) - 1
    made = text(found)
    assert "- A training step: there is no replay.json; `python -m bench.replay` makes it" in made
    assert "- One host: local.json is not JSON" in made
    assert "- Streams: stream.json has no machine and rows" in made
    assert "### One host" not in made


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n"
    once = between(page, "new")
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    assert between(once, "new") == once


@pytest.mark.leaks(reason="matplotlib keeps the fonts open that it has used")
def test_both_are_written(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = results / "page.md"
    docs.write_text(f"{BEGIN}\n{END}\n")
    assert main(["--results", str(results), "--docs", str(docs)]) == 0
    assert "### Other systems" in docs.read_text()
    assert (results / "report.html").read_text().startswith("<!doctype html>")
    assert "there is no hosts.json" in capsys.readouterr().out
