"""Standing in for the module `transfer_queue` and ceasing to, with verl imported before it and after."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType

import pytest
import transfer_queue as real
from verl.utils import transferqueue_utils

from dataplane.errors import Misuse
from dataplane.integrations import transfer_queue as ours
from dataplane.integrations.transfer_queue.standing import VARIABLE
from tests.integrations.marks import SYSTEMS
from tests.integrations.nursery import Nursery

pytestmark = SYSTEMS


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    ours.uninstall()


def known_to_verl() -> list[object]:
    return [transferqueue_utils.tq, transferqueue_utils.BatchMeta, transferqueue_utils.KVBatchMeta]


def test_verl_that_was_imported_before_is_given_ours_and_then_its_own_again() -> None:
    """The classes too: `tqbridge` takes what it does not know for data."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transfer_queue"}
    assert known_to_verl() == [real, real.BatchMeta, real.KVBatchMeta]
    for _ in range(2):
        ours.install()
    import transfer_queue

    assert transfer_queue is ours
    assert known_to_verl() == [ours, ours.BatchMeta, ours.KVBatchMeta]
    assert os.environ[VARIABLE] == "nested"
    for _ in range(2):
        ours.uninstall()
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transfer_queue"}
    assert after == before
    assert known_to_verl() == [real, real.BatchMeta, real.KVBatchMeta]
    assert VARIABLE not in os.environ


def test_verl_that_was_imported_meanwhile_has_its_own_afterwards(nursery: Nursery) -> None:
    """Also where nobody had imported TransferQueue before. In a process of its own: a module is imported once."""
    program = """
        from dataplane.integrations import transfer_queue as ours
        ours.install()
        from verl.utils import transferqueue_utils
        assert transferqueue_utils.tq is ours
        ours.uninstall()
        import transfer_queue
        assert transfer_queue is not ours
        assert transferqueue_utils.tq is transfer_queue
        assert transferqueue_utils.KVBatchMeta is transfer_queue.KVBatchMeta
        tell("all is well")
    """
    with nursery.process(textwrap.dedent(program)) as process:
        assert process.hear() == "all is well"


def test_who_imported_transferqueue_before_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, others = ModuleType("users_trainer"), ModuleType("another_module")
    users.KVBatchMeta = real.KVBatchMeta  # type: ignore[attr-defined]
    others.tq = "a name of its own"  # type: ignore[attr-defined]
    for module in (users, others):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with caplog.at_level(logging.WARNING, "dataplane"):
        ours.install()
        ours.install()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "users_trainer" in said
    assert "another_module" not in said
    assert "call install() before that import" in said.lower()


def test_a_meta_that_nobody_bridges_says_what_is_missing() -> None:
    """As in a worker whose verl knows TransferQueue's own."""

    @transferqueue_utils.tqbridge()
    def compute_log_prob(data: ours.KVBatchMeta) -> object:
        return data["input_ids"]

    with pytest.raises(Misuse, match=r"'input_ids'.*install\(\) in it.*DATAPLANE_TRANSFER_QUEUE=nested"):
        compute_log_prob(ours.KVBatchMeta(keys=["a"], tags=[{}], partition_id="train"))
