"""The processor as a platform of verl, and the made-up parts where verl looks for them.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES`), before it asks for the platform
(`VERL_PLATFORM=cpu`). Ray calls the places of trainer ranks GPUs; here they are a number that `ray.init` was told.
"""

from __future__ import annotations

import contextlib
import random
import runpy
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from . import hang

hang.watch_if_asked()
runpy.run_path(str(Path(__file__).parents[2] / "ray_workers.py"))["use"]()  # `tests` may be another package here


class _Module(types.ModuleType):
    """What `torch.cuda` is where there is a GPU: no memory of its own, and nothing to wait for."""

    def is_available(self) -> bool:
        return False

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def _nothing(self, *_: Any) -> int:
        return 0

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _nothing
    empty_cache = synchronize = set_device = current_device = _nothing

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0


def _ranged(own: Callable[..., None]) -> Callable[..., None]:
    """verl's choice of a port, of those that the system gives to no connection before the port is used."""

    def chosen(self: Any, group: Any, bundle_index: int = 0, master_port_range: Any = None) -> None:
        first = random.randrange(10_000, 32_000)
        own(self, group, bundle_index, [first, first + 100])

    return chosen


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Module("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def _nothing(self, *_: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def get_device_uuid(self, device_id: Any) -> str:
        return str(device_id)

    def ray_resource_name(self) -> str:
        from verl.single_controller.ray.base import RayWorkerGroup

        own = RayWorkerGroup._get_master_addr_port
        if own.__module__ != __name__:  # not done before
            RayWorkerGroup._get_master_addr_port = _ranged(own)
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False
