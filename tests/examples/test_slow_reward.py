"""The example with a slow reward: what ends it before it has anything to diagnose."""

from __future__ import annotations

import sys

import pytest

from examples import slow_reward


def broken(address: str) -> None:
    """A trainer that ends at once."""


def test_a_role_that_ends_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", ["slow_reward"])
    monkeypatch.setattr(slow_reward, "train", broken)
    with pytest.raises(SystemExit, match="broken ended with exit code 0"):
        slow_reward.main()
