"""`python -m dataplane.integrations.openrlhf`: OpenRLHF's own command with the hook installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF: make test-integrations")

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]

_RUN = """
import runpy, sys
from examples.openrlhf_rollout.absent import stood_in
with stood_in():
    import openrlhf.cli.train_ppo_ray
    sys.argv = ["train", "--help"]
    try:
        runpy.run_module("dataplane.integrations.openrlhf", run_name="__main__")
    finally:
        from dataplane.integrations.openrlhf import hook
        print("installed:", hook.installed())
"""


def test_it_takes_the_options_of_openrlhf() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _RUN], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "--train.agent_func_path" in run.stdout
    assert run.stdout.rstrip().endswith("installed: True")


def test_importing_the_door_imports_nothing_of_openrlhf() -> None:
    code = "import sys, dataplane.integrations.openrlhf; print(sorted({'openrlhf', 'ray', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
