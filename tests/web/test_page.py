"""The page in a real browser: it loads, follows what nodes do, and can be used by keyboard and by screen readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from bench.cluster_figures import GeneratedPlane
from dataplane.web.feed import Feed
from tests.integration.test_hosts import Host, together
from tests.processes import StandingNode
from tests.web.conftest import served

Tab = Callable[..., Any]

pytestmark = pytest.mark.leaks(reason="Playwright keeps a process and pipes of its own while the tests run")


def generated(*ill: str, hosts: int = 4, streams: int = 3) -> Callable[[], Feed]:
    """The feed of a cluster that is not there, with what is wrong in it."""

    def feed() -> Feed:
        plane = GeneratedPlane(hosts, streams, seed=2, ill=ill)
        return Feed(plane.address, lambda address: plane)

    return feed


def live(page: Any) -> Any:
    """The page, once it shows what is."""
    page.locator("#live[data-state=live]").wait_for()
    return page


def test_the_page_shows_node_activity_live(tmp_path: Path, tab: Tab) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane, served(lambda: Feed(node.address)) as url:
        page = live(tab(url))
        page.get_by_text("No stream is open.").wait_for()
        stream = plane.stream("rollouts", tasks=["reward", "actor"])
        stream.append({"id": [1, 2, 3]}, version=5)
        row = page.locator(".stream")
        row.get_by_text("3 rows").wait_for()
        assert [stage.split("\n")[0] for stage in row.locator(".stage .task").all_inner_texts()] == [
            "producers",
            "reward",
            "actor",
        ]
        row.get_by_text("3 pending").first.wait_for()
        with stream.consume("reward", rows=3, columns=["id"]):
            row.get_by_text("3 leased").wait_for()
        assert "1 host · 1 stream" in page.locator("#summary").inner_text()


def test_the_death_of_a_host_shows(tmp_path: Path, tab: Tab) -> None:
    with Host(tmp_path / "0") as one, Host(tmp_path / "1", one) as two:
        with dp.connect(one.address) as here, dp.connect(two.address) as there:
            together(here, there)
        with served(lambda: Feed(one.address)) as url:
            page = live(tab(url))
            page.locator("#host-rows tr").nth(1).wait_for()
            two.kill()
            page.locator("#alerts .critical").first.wait_for()
            assert "need" in page.locator("#summary").inner_text()
            assert page.title().startswith("(")
            one.kill()
            page.get_by_text("does not answer").first.wait_for()
            page.locator("#live[data-state=lost]").wait_for()


def test_the_page_reports_the_loss_of_its_server(tab: Tab) -> None:
    with served(generated()) as url:
        page = live(tab(url))
    page.locator("#live[data-state=lost]").wait_for()
    page.get_by_text("The page has lost its server").first.wait_for()


def test_faults_are_marked_with_a_tag(tab: Tab) -> None:
    with served(generated("task", "disk")) as url:
        page = live(tab(url))
        page.locator("#alerts .tag", has_text="disk error").wait_for()
        page.locator("#alerts .tag", has_text="slow").wait_for()
        page.locator("#host-rows tr:first-child .tag", has_text="disk error").wait_for()
        stage = page.locator(".stage.warning")
        assert "reward" in stage.inner_text()
        assert "slow" in stage.inner_text()
        assert page.locator(".stream").first.locator(".name").inner_text() == "rollouts"
        page.locator("#alerts a", has_text="reward holds up").click()
        assert "#task-rollouts" in page.url
        page.locator("#wait-rows tr", has_text="producers of rollouts").wait_for()


def test_a_steps_timeline_is_of_the_stream_that_is_chosen(tab: Tab) -> None:
    with served(generated()) as url:
        page = live(tab(url))
        page.locator(".stream .name", has_text="prompts").click()
        assert page.locator("#step-stream").inner_text() == "prompts"
        page.locator("#step-table tbody th", has_text="reference").wait_for()
        drawn = "() => { const c = document.getElementById('lane-canvas'); return c.getContext('2d')"
        drawn += ".getImageData(0, 0, c.width, c.height).data.some((v) => v) }"
        page.wait_for_function(drawn)


def test_partitions_are_shown_as_a_map_and_as_a_table(tab: Tab) -> None:
    with served(generated()) as url:
        page = live(tab(url))
        page.locator("#partitions").scroll_into_view_if_needed()
        page.get_by_text("12 partitions, all led.").wait_for()
        page.get_by_text("The same as a table").click()
        assert page.locator("#partition-rows tr").count() == 12


def test_the_page_can_be_used_by_keyboard(tab: Tab) -> None:
    with served(generated(streams=20)) as url:
        page = live(tab(url))
        page.locator(".stream").first.wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("j")
        chosen = page.locator("#step-stream").inner_text()
        page.keyboard.press("j")
        assert page.locator("#step-stream").inner_text() != chosen
        page.keyboard.press("k")
        assert page.locator("#step-stream").inner_text() == chosen
        assert page.locator(".stream[data-chosen]").count() == 1
        page.keyboard.press("/")
        page.keyboard.type("judged")
        assert page.locator(".stream").count() == 1
        page.keyboard.press("Escape")
        assert page.locator(".stream").count() == 12
        page.keyboard.press("p")
        assert page.locator("#live").inner_text() == "paused"
        page.keyboard.press("p")
        live(page)
        page.keyboard.press("4")
        assert page.evaluate("document.activeElement.id") == "hosts"
        page.keyboard.press("?")
        assert page.locator("#help").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#help").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_passes_accessibility_checks(scheme: str, width: int, tab: Tab) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="needs axe-core-python: make test-web")
    with served(generated("task", "disk", "left")) as url:
        page = live(tab(url, color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"))
        page.locator("#alerts .warning").first.wait_for()
        page.locator("#partitions").scroll_into_view_if_needed()
        page.get_by_text("The same as a table").click()
        found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
        told = [
            (each["id"], each["help"], [node["html"] for node in each["nodes"]][:3]) for each in found["violations"]
        ]
        assert told == []
        assert len(found["passes"]) > 15
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is beyond the screen"
        assert page.locator("[aria-live]").count() == 1, "alerts alone are announced"


def test_alerts_are_announced_once(tab: Tab) -> None:
    with served(generated("disk")) as url:
        page = live(tab(url))
        page.locator("#announce", has_text="disk error").wait_for()
        page.evaluate("document.getElementById('announce').textContent = ''")
        before = page.evaluate("document.querySelector('.totals .figure span').textContent")
        page.wait_for_function("(b) => document.querySelector('.totals .figure span').textContent !== b", arg=before)
        assert page.locator("#announce").inner_text() == ""


def test_untrusted_names_are_shown_as_plain_text(tmp_path: Path, tab: Tab) -> None:
    name = "<img src=x onerror=alert(1)>"
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane, served(lambda: Feed(node.address)) as url:
        plane.stream(name, tasks=["<script>alert(2)</script>"]).append({"id": [1]}, group=['"><b>'])
        page = live(tab(url))
        page.locator(".stream .name").wait_for()
        assert page.locator(".stream .name").inner_text() == name
        assert page.locator("main img").count() == 0
        page.locator("#step-table tbody tr").nth(1).wait_for()


def test_the_token_is_asked_for_once(tab: Tab) -> None:
    with served(generated(), token="correct-horse-battery") as url:
        page = tab(url)
        page.get_by_label("Token").fill("wrong-horse-battery")
        page.keyboard.press("Enter")
        page.get_by_text("This is not the token.").wait_for()
        page.get_by_label("Token").fill("correct-horse-battery")
        page.get_by_role("button", name="Open the page").click()
        live(page)
        page.reload()
        live(page)
        assert page.evaluate("document.cookie") == "", "no script can read it"
        other = tab(f"{url}#correct-horse-battery")
        live(other)
        assert "correct" not in other.url
