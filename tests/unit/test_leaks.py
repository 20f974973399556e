"""The leak fixture itself: it must fail a test that leaks, and only that one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "descriptors": "import os; kept = os.dup(1)",
    "threads": "import threading; kept = threading.Event(); threading.Thread(target=kept.wait, daemon=True).start()",
    "children": "import subprocess; kept = subprocess.Popen(['sleep', '5'])",
    "mappings": "import mmap, os; fd = os.memfd_create('dataplane-x'); os.ftruncate(fd, 4096); "
    "kept = mmap.mmap(fd, 4096); os.close(fd)",
}


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture needs none, and to import them takes longer than all else here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, body: str, marker: str = "") -> pytest.RunResult:
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    pytester.makeconftest(conftest.replace("SETTLE_S = 5.0", "SETTLE_S = 0.2"))
    pytester.makeini("[pytest]\nmarkers = leaks(reason): exempt\n")
    test = f"{marker}\ndef test_it():\n    {body}\n    held.append(kept)\n"
    pytester.makepyfile(f"import pytest\nheld = []\n\n{test}\n\ndef test_next():\n    pass\n")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.parametrize("kind", LEAKS)
def test_what_a_test_leaves_behind_fails_it(pytester: pytest.Pytester, kind: str) -> None:
    result = run(pytester, LEAKS[kind])
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["left behind after the test:", f"  {kind}: *"])


def test_a_clean_test_passes(pytester: pytest.Pytester) -> None:
    run(pytester, "kept = 1").assert_outcomes(passed=2)


def test_an_exempt_test_passes(pytester: pytest.Pytester) -> None:
    run(pytester, LEAKS["descriptors"], "@pytest.mark.leaks(reason='on purpose')").assert_outcomes(passed=2)


def test_an_exemption_without_a_reason_fails(pytester: pytest.Pytester) -> None:
    run(pytester, LEAKS["descriptors"], "@pytest.mark.leaks").assert_outcomes(errors=1, passed=1)
