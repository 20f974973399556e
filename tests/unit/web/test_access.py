"""Who may look."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dataplane.web.access import PageAccess, read_token
from tests.cases import each_case

TOKEN = "correct-horse-battery"


@each_case("host", ["localhost", "localhost:8642", "127.0.0.1:1", "127.9.9.9", "[::1]:8642", "[::1]"])
def test_without_a_token_requests_for_this_host_are_answered(host: str) -> None:
    assert PageAccess(None).allows(host=host)


@each_case("host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]", "10.0.0.1"])
def test_requests_for_other_host_names_are_refused_without_a_token(host: str) -> None:
    assert not PageAccess(None).allows(host=host)


def test_a_token_is_accepted_in_a_header_or_as_a_derived_cookie() -> None:
    access = PageAccess(TOKEN)
    assert access.allows(host="any", authorization=f"Bearer {TOKEN}")
    assert access.allows(host="any", authorization=f"bearer  {TOKEN} ")
    assert access.allows(host="any", cookie=access.cookie)
    assert TOKEN not in access.cookie
    assert PageAccess(TOKEN + "x").cookie != access.cookie


def test_a_token_file_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token, made = read_token(path)
    assert made
    assert len(token) >= 24
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == (token, False)


@each_case("text", ["", "short", "x" * 5000, "two\nlines of some length", "nicht ganz richtig: ä"])
def test_an_invalid_token_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="a token is one line"):
        read_token(tmp_path / "token")
