"""Each TransferQueue and verl that a job is said to work with."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integrations.marks import KEPT, long
from tests.integrations.nursery import ROOT, Nursery

pytestmark = [pytest.mark.timeout(300), KEPT]

#: Puts, gets, tags, clears and a checkpoint; first, that the packages are those that are meant.
JOB = """
    from importlib.metadata import version
    import ray
    if os.environ["FIRST"] == "verl":
        import verl
    import dataplane.integrations.verl.plugin as plugin
    import transfer_queue as tq
    from omegaconf import OmegaConf

    assert plugin.loaded
    for name in ("TransferQueue", "verl"):
        assert version(name) == os.environ.get(name, version(name)), (name, version(name))
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    backend = {"storage_backend": "Dataplane", "Dataplane": {"memory": "64MiB", "spill": 0, "prewarm": 0}}
    tq.init(OmegaConf.create({"backend": backend}))

    @ray.remote(num_cpus=0)
    class Other:
        def get(self, keys):
            import transfer_queue as tq
            tq.init()
            got = tq.kv_batch_get(keys, "p")
            return [row.tolist() for row in got["x"].unbind()], got.get("text").tolist()

    for number in range(3):
        row = {"x": torch.arange(number + 1), "text": f"row {number}"}
        tq.kv_put(f"k{number}", "p", row, {"number": number})
    more = TensorDict({"x": torch.ones(2, 4, dtype=torch.int64), "text": NonTensorStack("a", "b")}, batch_size=2)
    tq.kv_batch_put(["k3", "k4"], "p", more, tags=[{}, {}])
    tq.kv_put("k0", "p", {"x": torch.zeros(2, dtype=torch.int64)}, {"number": 7})
    tags = tq.kv_list("p")["p"]
    assert [tags[f"k{number}"].get("number") for number in range(5)] == [7, 1, 2, None, None], tags
    other = Other.remote()
    got = ray.get(other.get.remote(["k2", "k0", "k4"]))
    assert got == ([[0, 1, 2], [0, 0], [1, 1, 1, 1]], ["row 2", "row 0", "b"]), got
    client = tq.get_client()
    client.put(TensorDict({"x": torch.ones(4, 2)}, batch_size=4), partition_id="q")
    meta = client.get_meta(["x"], 4, "q", "fetch", "task")
    assert len(client.get_data(meta)["x"].unbind()) == 4
    tq.kv_put("k1", "p", {"only": torch.ones(5000)}, {"number": 1})
    tq.kv_clear(["k1", "k2"], "p")
    tq.kv_put("k1", "p", {"x": torch.ones(1, dtype=torch.int64), "text": "new"}, {"number": 1})
    if hasattr(tq, "save_checkpoint"):
        tq.save_checkpoint(os.environ["WHERE"])
        tq.kv_clear(["k1"], "p")
        tq.load_checkpoint(os.environ["WHERE"])
        assert tq.kv_batch_get("k1", "p")["x"].sum() == 1
    tq.close()
    ray.shutdown()
    tell("done")
"""


def installed(config: pytest.Config, package: str, version: str) -> Path:
    """A directory with this version of a package, and nothing else; it is installed once."""
    target = Path(config.cache.mkdir("packages")) / f"{package}-{version}"  # type: ignore[union-attr]  # it is enabled
    if not target.is_dir():
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(fresh), f"{package}=={version}"], check=True, timeout=240)
        fresh.rename(target)
    return target


@pytest.mark.parametrize(
    "package", long("TransferQueue==0.1.8", "TransferQueue==0.1.9", "TransferQueue==0.1.10", "verl==0.9.0")
)
def test_a_job_runs_with_each_supported_version(
    package: str, nursery: Nursery, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Those that the other tests run with are not among them."""
    name, version = package.split("==")
    where = os.pathsep.join([str(installed(pytestconfig, name, version)), str(ROOT)])
    told = {name: version, "WHERE": str(tmp_path / "checkpoint"), "FIRST": name}
    with nursery.process(textwrap.dedent(JOB), PYTHONPATH=where, **told) as running:
        assert running.hear() == "done"
        running.wait()
