"""For the site: a synchronous class is shown with its compiled methods, in the order of the asynchronous class."""

from __future__ import annotations

from typing import Any

import griffe

_LINES = 10_000  # more than a module has


class Docstrings(griffe.Extension):
    """Copies the methods of the stub `dataplane.client.blocking_calls` into the classes of `dataplane.client.sync*`. A
    method that is there has the docstring of the stub, if it has none of its own."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name != "dataplane":
            return
        compiled = pkg["client.blocking_calls"]
        for name, module in pkg["client"].modules.items():
            for kind in module.classes.values() if name.startswith("sync") else ():
                if not kind.is_alias and f"{kind.name}Calls" in compiled.classes:
                    self._complete(kind, compiled[f"{kind.name}Calls"])

    def _complete(self, kind: griffe.Class, compiled: griffe.Class) -> None:
        for line, (name, call) in enumerate(compiled.members.items(), _LINES):  # members are shown in order of lines
            call.lineno = line
            own = kind.members.get(name)
            if own is None:
                kind.set_member(name, call)
                continue
            own.lineno = line
            if own.docstring is None and call.docstring is not None:
                own.docstring = griffe.Docstring(call.docstring.value, parent=own)
