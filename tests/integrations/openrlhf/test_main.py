"""`python -m dataplane.integrations.openrlhf`: OpenRLHF's own command with the hook installed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.integrations.openrlhf import hook
from examples.openrlhf_rollout.absent import stood_in
from tests.integrations.marks import SYSTEMS

pytestmark = SYSTEMS

ROOT = Path(__file__).parents[3]


def test_the_command_accepts_the_options_of_openrlhf(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    assert not hook.installed()
    try:
        with stood_in(), pytest.raises(SystemExit) as ended:
            runpy.run_module("dataplane.integrations.openrlhf", run_name="__main__")
        assert ended.value.code == 0
        assert "--train.agent_func_path" in capsys.readouterr().out
        assert hook.installed()
    finally:
        hook.uninstall()


def test_importing_the_integration_does_not_import_openrlhf() -> None:
    code = "import sys, dataplane.integrations.openrlhf; print(sorted({'openrlhf', 'ray', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
