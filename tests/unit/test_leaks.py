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


WIDE = """
@pytest.fixture(scope="module", autouse=True)
def wide():
    {made}
    yield kept
"""


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture needs none, and to import them takes longer than all else here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def made(body: str, marker: str = "") -> str:
    """A module with a test that does so, and keeps what it `kept`, and a test behind it."""
    test = f"{marker}\ndef test_it():\n    {body}\n    held.append(kept)\n"
    return f"import pytest\nheld = []\n\n{test}\n\ndef test_next():\n    pass\n"


def run(pytester: pytest.Pytester, **modules: str) -> pytest.RunResult:
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    pytester.makeconftest(conftest.replace("SETTLE_S = 5.0", "SETTLE_S = 0.2"))
    pytester.makeini("[pytest]\nmarkers = leaks(reason): exempt\n")
    pytester.makepyfile(**{f"test_{name}": text for name, text in modules.items()})
    return pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider")


def test_a_leaking_test_fails_unless_it_is_exempt_with_a_reason(pytester: pytest.Pytester) -> None:
    leaks = {kind: made(body) for kind, body in LEAKS.items()}
    exempt = made(LEAKS["descriptors"], "@pytest.mark.leaks(reason='on purpose')")
    unreasoned = made(LEAKS["descriptors"], "@pytest.mark.leaks")
    before = made("kept = 1", WIDE.format(made=LEAKS["mappings"]))
    result = run(pytester, clean=made("kept = 1"), before=before, exempt=exempt, unreasoned=unreasoned, **leaks)
    result.assert_outcomes(passed=2 + 2 + 2 + 1 + 2 * len(leaks), errors=1 + len(leaks))
    for kind in LEAKS:
        result.stdout.fnmatch_lines_random([f"test_{kind}.py::test_it PASSED *", f"test_{kind}.py::test_it ERROR *"])
        result.stdout.fnmatch_lines(["*ERROR at teardown of test_it*", "left behind after the test:", f"  {kind}: *"])
    result.stdout.fnmatch_lines(["test_unreasoned.py::test_it ERROR *"])
