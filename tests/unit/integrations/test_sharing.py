"""The index of what a process has put: who may put, who waits, what is forgotten; and the keys of values."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataplane.batch.put_plan import values_of
from dataplane.integrations import process
from dataplane.integrations.transfer_queue.sharing import LEAST, LocationCache, keys_of
from tests.cases import each_case
from tests.processes import WAIT_S

# Keys


def test_equal_bytes_of_different_values_have_different_keys() -> None:
    values = np.arange(2 * LEAST, dtype=np.uint8)
    forms = [
        [{"x": values}],
        [{"y": values}],
        [{"x": values.view(np.int8)}],
        [{"x": values.reshape(2, -1)}],
        [{"x": values.reshape(-1, 2)}],
        [{"x": values, "y": values[:0]}],
        [bytes(values)],
        ["a" * 2 * LEAST],
        [{"x": b"a" * 2 * LEAST}],
    ]
    keys = [keys_of(values_of("c", form), tensors=False) for form in forms]
    assert all(key is not None for key in keys)
    assert len({key[0] for key in keys if key}) == len(forms)


def test_cached_locations_are_known_until_they_are_forgotten() -> None:
    known: LocationCache[str] = LocationCache()
    with known.claim([b"a", b"b"], WAIT_S) as there:
        assert there == {}
        known.learn({b"a": "here"})
    with known.claim([b"a", b"b"], WAIT_S) as there:
        assert there == {b"a": "here"}
    known.forget({b"a": "".join(["he", "re too"])})  # which somebody has put elsewhere meanwhile
    assert len(known) == 1
    known.forget(there)
    assert len(known) == 0


@each_case("keys", [(b"a",), (b"a", b"b", b"c")])
def test_one_of_many_threads_puts_each_key(keys: tuple[bytes, ...]) -> None:
    known: LocationCache[int] = LocationCache()
    put: list[bytes] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> list[int]:
        mine = [keys[(number + at) % len(keys)] for at in range(len(keys))]  # each in another order
        barrier.wait(WAIT_S)
        with known.claim(mine, WAIT_S) as there:
            fresh = [key for key in mine if key not in there]
            put.extend(fresh)
            known.learn(dict.fromkeys(fresh, number))
            return [{**there, **dict.fromkeys(fresh, number)}[key] for key in keys]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert sorted(put) == sorted(keys)
    assert all(each == found[0] for each in found)


def test_a_thread_that_waited_for_a_failed_put_puts_the_value() -> None:
    known: LocationCache[int] = LocationCache()
    begun, may_fail = threading.Event(), threading.Event()

    def fails() -> None:
        with pytest.raises(ZeroDivisionError), known.claim([b"a"], WAIT_S):
            begun.set()
            assert may_fail.wait(WAIT_S)
            raise ZeroDivisionError

    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(fails)
        assert begun.wait(WAIT_S)
        with known.claim([b"a"], 0.05) as there:  # it takes long: this one puts as well
            assert there == {}
        may_fail.set()
        failed.result(WAIT_S)
    with known.claim([b"a"], WAIT_S) as there:
        assert there == {}
    assert not known._coming


def test_a_forked_child_waits_for_no_thread_of_its_parents() -> None:
    known: LocationCache[int] = LocationCache()
    known.learn({b"b": 1})
    with known.claim([b"a"], WAIT_S):
        known._lock.acquire()
        pid = os.fork()
        if not pid:
            with known.claim([b"a", b"b"], WAIT_S) as there:
                os._exit(0 if there == {b"b": 1} else 1)
        known._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_keeps_the_address_of_its_parent_when_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `init()` of TransferQueue that fails closes the plane; a retry has to find the parent's node again."""
    monkeypatch.setenv(process._INHERITED, "/run/of/the/parent")
    process.close()
    assert os.environ[process._INHERITED] == "/run/of/the/parent"
