"""Words that were retired do not come back: one word for one thing, and it is the field's.

The pages that users read, the docstrings and the comments are checked, without their code and addresses. Records of
decisions and the changelog say what was said in their day.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.cases import each_case

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")])
PAGES = [page for page in PAGES if page.parent.name != "decisions"]
MODULES = sorted((ROOT / "dataplane").rglob("*.py"))

#: What was said for a thing, and the word for it now. Words that are also plain English are retired as names of these
#: things alone, where an article or a verb gives them away.
RETIRED = {
    r"(?:a|an|its|the|their|one|own) homes?\b(?! director)": "leader, or partition",
    r"rehom\w+": "failover",
    r"(?:a|its|the) (?:mirror|spare)s?\b|\bmirror(?:s|ed|ing)?\b": "follower, or replica nodes",
    r"spreading|cluster spread": "cluster streams, router, session",
    r"adopting": "failover",
    r"beg[aiu]n anew": "reset",
    r"bringers?|bringing": "producer, producer router",
    r"limits keeper|keepers?": "quota owner, or what it is: a thread, an actor",
    r"tellings?": "ack outbox",
    r"books": "partition state",
    r"row facts|facts of (?:a|the) rows?": "row metadata",
    r"lanes?": "channel, or track",
    r"stretch(?:es)?": "byte range",
    r"hollow(?:ed|s)?": "punch holes",
    r"thin(?:ned)? shards?": "release cells",
    r"doors?": "listener, resolver, or integration",
    r"wholes": "stream directory",
    r"(?:is|are|was|were) not asked any more": "cancelled",
    r"far side": "RPC server",
    r"dead of (?:a|the) node": "departed",
}
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\([^)]*\)|<[^>\n]+>", re.MULTILINE | re.DOTALL)

#: A comment that begins with a clause in place of a noun.
CLAUSE = re.compile(r"^(?:.*  )? *(#:? ?(?:who|whoever|what|of which)\b(?!.*\?).*)$", re.MULTILINE)


def found(text: str) -> list[str]:
    """The retired words of a page, each with what to write."""
    prose = _CODE.sub(" ", text)
    return [
        f"{match[0]!r}: write {better}"
        for word, better in RETIRED.items()
        for match in re.finditer(rf"\b(?:{word})\b", prose, re.IGNORECASE)
    ]


@each_case("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_retired_word_is_used(page: Path) -> None:
    assert found(page.read_text()) == []


def docstrings(module: Path) -> str:
    """Those of the module, its classes, functions and attributes."""
    return "\n\n".join(re.findall(r'^ *"""(.*?)"""', module.read_text(), re.MULTILINE | re.DOTALL))


@each_case("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_no_docstring_has_a_retired_word(module: Path) -> None:
    assert found(docstrings(module)) == []


@each_case("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_comment_begins_with_a_noun_or_a_verb(module: Path) -> None:
    """A clause in place of a noun, as in "who waits is told", has to be read twice."""
    assert CLAUSE.findall(module.read_text()) == []
