"""For the site: a synchronous call whose docstring only refers to the asynchronous one is shown with that one's."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: The asynchronous classes that docstrings refer to, by name, and where they are.
_MODULES = {
    "AsyncPlane": "client.plane",
    "AsyncStream": "client.streams",
    "AsyncAppender": "client.appender",
    "AsyncTable": "client.tables",
    "AsyncHistory": "client.histories",
    "AsyncWeights": "client.weights",
    "AsyncRow": "client.unfinished",
}
_REFERS = re.compile(r"See `(?:dataplane\.(?P<module>[\w.]+)\.)?(?P<name>\w+)(?:\.(?P<call>\w+))?`")


class Docstrings(griffe.Extension):
    """Replaces the docstrings of `dataplane.client.sync*` as the module says. Raises KeyError where one refers to a
    name that is not there."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name != "dataplane":
            return
        for name, module in pkg["client"].modules.items():
            if name.startswith("sync"):
                for kind in module.classes.values():
                    self._replace(pkg, kind)
                    for call in kind.functions.values():
                        self._replace(pkg, call)

    def _replace(self, package: griffe.Module, shown: griffe.Object) -> None:
        if shown.docstring is None or (refers := _REFERS.search(shown.docstring.value)) is None:
            return
        module = _MODULES.get(refers["name"], refers["module"])
        if module is None:  # it names something else to look at
            return
        meant = package[f"{module}.{refers['name']}" + (f".{refers['call']}" if refers["call"] else "")]
        if meant.docstring is not None:
            shown.docstring = griffe.Docstring(meant.docstring.value, parent=shown)
