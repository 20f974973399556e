"""The site has every page once, and the map of `CONTRIBUTING.md` leads somewhere. `make docs` builds the site."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dataplane
from dataplane import cli
from tests.cases import each_case
from tests.optional import needs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def navigation() -> Any:
    """The `nav` of the site, whose other settings are for MkDocs to load."""
    import yaml

    text = (ROOT / "mkdocs.yml").read_text()
    return yaml.safe_load(text[text.index("\nnav:") :])["nav"]


def pages_of(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries:
        for below in entry.values():
            yield from pages_of(below)


@needs("yaml")
def test_every_page_is_in_the_navigation_once() -> None:
    named = list(pages_of(navigation()))
    there = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    records = [page for page in there if re.match(r"decisions/\d", page)]  # their table lists them
    assert sorted(named) == sorted(set(there) - set(records))


def test_pages_link_to_pages_of_the_site_alone() -> None:
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            assert "://" in target or (page.parent / target).resolve().is_relative_to(DOCS), f"{page.name}: {target}"


def test_the_site_is_built_strictly() -> None:
    """MkDocs counts the warnings that it prints: with --quiet there are none, and nothing fails."""
    [command] = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert command == "mkdocs build --strict"


def test_every_picture_is_shown_and_has_a_title() -> None:
    shown = " ".join(page.read_text() for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
    for picture in (DOCS / "pictures").iterdir():
        assert f"pictures/{picture.name}" in shown, picture.name
        assert re.search(r"<title id=\"title\">\S", picture.read_text()), picture.name


def named_calls() -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "CONTRIBUTING.md").read_text())


@each_case(("path", "name"), named_calls())
def test_names_in_the_contributing_map_exist(path: str, name: str) -> None:
    defined = rf"^\s*(?:(?:async )?def {name}\(|class {name}\b|{name}\b.*=)"
    assert re.search(defined, (ROOT / "dataplane" / path).read_text(), re.MULTILINE), f"{path}: {name}"


@needs("yaml")
@each_case("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_yaml_without_secrets(path: Path) -> None:
    import yaml

    assert isinstance(yaml.safe_load(path.read_text()), dict)
    assert "secrets." not in path.read_text()


def commands() -> list[tuple[str, str]]:
    """(page, what follows `dataplane`) of each command in a console block, its line joined, without comment and end."""
    found = []
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if page.parent.name == "decisions":
            continue
        for block in re.findall(r"^ *```console\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.sub(r"\s{2,}#.*|\s#\s.*|\s&$", "", line)
                found += [(page.name, call) for call in re.findall(r"(?:^\$|--|&&) dataplane ([^|&;'\">]+)", text)]
    return found


@each_case(("page", "command"), commands())
def test_documented_commands_are_accepted_by_the_parser(page: str, command: str) -> None:
    cli._parser().parse_args(shlex.split(command))


def test_repository_paths_named_in_tutorials_exist() -> None:
    for page in (DOCS / "tutorials").glob("*.md"):
        text = page.read_text()
        for path in re.findall(r"\b(?:deploy|examples)/[\w/.-]*\w", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for module in re.findall(r"python -m (dataplane[\w.]*|examples[\w.]*)", text):
            there = ROOT / module.replace(".", "/")
            assert there.with_suffix(".py").exists() or (there / "__main__.py").exists(), f"{page.name}: {module}"


def test_the_settings_of_the_verl_tutorial_are_settings() -> None:
    text = (DOCS / "tutorials/verl.md").read_text()
    named = set(re.findall(r"backend\.Dataplane\.(\w+)=", text))
    assert named >= {"memory", "spill", "spill_dir"}
    own = {"transports", "key", "dense", "job"}
    assert named <= own | {each.name for each in dataclasses.fields(dataplane.NodeConfig)}
