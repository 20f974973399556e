"""The examples' processes are forked from a server that has imported torch; how users start them, one test does too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import torches


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    from examples.multimodal_grpo import crew

    torches.warm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "CONTEXT", torches.torches)
        yield
