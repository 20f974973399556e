"""The house: who may import whom.

Two wings, `node` and `client`, stand on one ground floor. A module imports from its own package and from
floors below it, never from its own floor's neighbours. Imports inside functions count as well.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.cases import each_case

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "dataplane").rglob("*.py"))

#: From the ground up. Neighbours on a floor do not know each other.
FLOORS = [
    {"errors", "log_lines"},
    {"background_tasks", "config", "clock", "closing", "file_errors", "threads", "waiting", "device"},
    {"batch", "replication", "coordinator"},
    {"store", "stream"},
    {"table", "history", "recording", "weights"},
    {"wire"},
    {"transport"},
    {"cluster"},
    {"observe", "diagnosis"},
    {"collective"},
    {"node", "client"},
    {"aio"},
    {"dataplane"},  # the public names
    {"pipeline"},
    {"integrations", "web", "testing"},
    {"cli", "__main__"},
]
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}

#: Those of the node's wing; what lies in none of its packages is above them.
NODE_FLOORS = [{"shards", "partitions"}, {"sessions"}, {"local"}, {"clustered"}, {"node"}]
NODE_FLOOR = {room: number for number, rooms in enumerate(NODE_FLOORS) for room in rooms}

#: Doors into other systems stand on the client alone.
NARROWER = {"integrations": {"client", "history", "batch", "errors", "config", "clock", "threads", "aio", "dataplane"}}

#: A batch is a value; a replica is handed its events and the time: these would let them reach out
#: of the process.
PURE = {"batch", "replication", "history", "weights"}
#: A replica reads no clock and draws nothing either, so a run of many is a seed.
DRAWN = {"time", "random", "secrets", "uuid", "datetime"}
IMPURE = {"os", "socket", "asyncio", "subprocess", "mmap", "multiprocessing", "threading", "shutil", "tempfile"}

#: Optional, heavy, or both: imported where they are used, never where a module is.
LAZY = {
    "torch",
    "tensordict",
    "ray",
    "ucxx",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "aiohttp",
    "cryptography",
    "uvloop",
    "prometheus_client",
    "opentelemetry",
    "matplotlib",
    "transformers",
    "pytest",
}

#: What derives from classes of those, and is itself imported where it is used.
DERIVED = {
    "dataplane.integrations.transfer_queue.streaming",
    "dataplane.integrations.drafting.huggingface",
    "dataplane.integrations.ray_tensors",
    "dataplane.testing.samplers",
}

#: Those that only what is imported inside of verl or TransferQueue imports: they have all of these.
INSIDE = {
    f"dataplane.integrations.verl.{name}"
    for name in (
        *("dispatch", "proto", "columns"),
        *("neo", "neo_plane", "checkpointing"),
    )
}

#: What unpickles does what the bytes tell it to.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}

#: What a node runs on is free of Arrow: it moves bytes and never looks into them.
ARROWLESS = ["store", "wire", "node", "stream", "replication", "coordinator", "errors", "config", "clock"]
ARROWLESS_MODULES = [
    "dataplane.batch.field",
    "dataplane.batch.layout",
    "dataplane.batch.dtypes",
    "dataplane.batch.rows",
    "dataplane.batch.ref",
    "dataplane.batch.locations",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A module. Several tests ask for its imports, and to parse it takes longer than the rest."""
    return ast.parse(path.read_text())


def imports_of(path: Path, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    return imported(parsed(path), package_of(path), top_level=top_level)


def imported(source: str | ast.Module, package: str, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import; `from a import b` gives `a.b`. `top_level`: only those run on import."""
    pending: list[ast.AST] = [ast.parse(source) if isinstance(source, str) else source]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif top_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if not isinstance(node, ast.expr):  # an import is a statement
            pending.extend(ast.iter_child_nodes(node))


def unit_of(name: str) -> str | None:
    """The unit of the house that a name of this package belongs to; None for other packages."""
    parts = name.split(".")
    if parts[0] != "dataplane":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else "dataplane"


def room_of(name: str) -> str:
    """The package of the node's wing that a name there belongs to, or the wing itself."""
    parts = name.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in NODE_FLOOR else "node"


def violations(module: str, imports: Iterable[tuple[int, str]]) -> list[str]:
    """What the module imports and should not, a line each."""
    own = unit_of(module) or ""
    found = []
    for line, name in imports:
        unit = unit_of(name)
        if unit == own == "node":
            here, there = room_of(module), room_of(name)
            if here != there and NODE_FLOOR[there] >= NODE_FLOOR[here]:
                found.append(f"{module}:{line}: {own}.{here} imports {name}")
        if unit is None or unit == own:
            continue
        if FLOOR[unit] >= FLOOR[own] or unit not in NARROWER.get(own, FLOOR):
            found.append(f"{module}:{line}: {own} imports {name}")
    return found


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def roots(path: Path, *, top_level: bool) -> set[str]:
    return {name.split(".")[0] for _, name in imports_of(path, top_level=top_level)}


def found_in(modules: Iterable[Path], unwanted: set[str], *, top_level: bool = False) -> dict[str, set[str]]:
    """What these modules import of what they should not, by module."""
    found = {module_name(path): roots(path, top_level=top_level) & unwanted for path in modules}
    return {name: imports for name, imports in found.items() if imports}


def test_every_module_has_a_layer() -> None:
    assert len(MODULES) > 200
    names = [module_name(path).split(".") for path in MODULES]
    without = [".".join(parts) for parts in names if len(parts) > 1 and parts[1] not in FLOOR]
    assert without == [], "DESIGN section 10 has no place for them"


def test_modules_import_only_lower_layers() -> None:
    assert [line for path in MODULES for line in violations(module_name(path), imports_of(path))] == []


def test_optional_packages_are_imported_only_at_their_point_of_use() -> None:
    elsewhere = [path for path in MODULES if module_name(path) not in INSIDE | DERIVED]
    assert found_in(elsewhere, LAZY, top_level=True) == {}


def test_the_package_unpickles_nothing() -> None:
    assert found_in(MODULES, UNPICKLERS) == {}


def test_value_modules_import_nothing_impure() -> None:
    assert found_in([path for path in MODULES if unit_of(module_name(path)) in PURE], IMPURE) == {}


@each_case("path", [p for p in MODULES if unit_of(module_name(p)) == "replication"], ids=module_name)
def test_replicated_modules_read_neither_time_nor_randomness(path: Path) -> None:
    assert not roots(path, top_level=False) & DRAWN


def arrowless() -> list[str]:
    names = [module_name(path) for path in MODULES]
    return [name for name in names if name in ARROWLESS_MODULES or unit_of(name) in ARROWLESS]


def test_node_modules_do_not_import_arrow() -> None:
    assert found_in([path for path in MODULES if module_name(path) in arrowless()], {"pyarrow"}) == {}


def loaded_after(statement: str) -> set[str]:
    """The top-level packages that a new interpreter has loaded after the statement."""
    report = "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{statement}\n{report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_loading_node_modules_does_not_load_arrow() -> None:
    importable = [name for name in arrowless() if not name.endswith("__main__")]  # those run when imported
    loaded = loaded_after("".join(f"import {name}\n" for name in importable))
    assert "dataplane" in loaded
    assert not loaded & {"pyarrow", *LAZY}


def test_importing_the_package_is_light() -> None:
    assert not loaded_after("import dataplane") & {"pandas", "sklearn", "matplotlib", *LAZY}


@each_case(
    ("module", "source"),
    [
        ("dataplane.batch.rows", "from ..store.arena import Arena"),
        ("dataplane.batch.rows", "def f():\n    import dataplane.wire.messages"),
        ("dataplane.store.arena", "from dataplane import stream"),
        ("dataplane.stream.leased_rows", "import dataplane.store"),
        ("dataplane.client.plane", "from dataplane.node import node"),
        ("dataplane.node.node", "from dataplane.client.plane import Plane"),
        ("dataplane.node.node", "import dataplane"),
        ("dataplane.node.shards.fetch", "from dataplane.node.sessions import checks"),
        ("dataplane.node.clustered.open_streams", "from dataplane.node import node"),
        ("dataplane.integrations.verl", "from dataplane.wire import local"),
        ("dataplane.clock", "from .config import NodeConfig"),
    ],
)
def test_an_import_of_a_higher_layer_is_detected(module: str, source: str) -> None:
    assert len(violations(module, imported(source, module.rpartition(".")[0]))) == 1
