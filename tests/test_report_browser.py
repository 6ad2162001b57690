"""The report in a real browser: headless Chromium, driven like a reader would."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.report import NamedPlan, make_report, render
from tests.test_replay_result import REPLAY
from tests.test_report import DIGEST, skewed_loads

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="no chromium here (Debian: apt-get install chromium chromium-driver)"
)

# Bokeh draws inside shadow roots, which CSS selectors do not enter.
TOOLTIP = """
    const walk = (node) => [...(node.shadowRoot?.children ?? []), ...node.children].flatMap(walk).concat(node);
    return walk(document.body).filter((node) => node.classList.contains("bk-tooltip-content")
      && node.getBoundingClientRect().width > 0).map((node) => node.textContent).join(" ");
"""
CANVAS = """
    const find = (node) => node.tagName === "CANVAS" ? node
      : [...(node.shadowRoot?.children ?? []), ...node.children].map(find).find(Boolean);
    return find(document.getElementById(arguments[0])).toDataURL();
"""
NAMELESS = """
    const named = (it) => it.closest("label") || it.getAttribute("aria-label")
      || document.getElementById(it.getAttribute("aria-labelledby"))?.textContent.trim();
    return [...document.querySelectorAll("select, input, button, [role=img], [role=region]")]
      .filter((it) => !named(it)).map((it) => it.outerHTML);
"""
PLACE_OF = """
    const view = document.getElementById(arguments[0]).view;
    const box = view.el.getBoundingClientRect();
    return [box.left + view.frame.x_scale.compute(arguments[1]), box.top + view.frame.y_scale.compute(arguments[2])];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,1000",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Whatever the data folder, the crash reporter has one of its own in the user's configuration.
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("config"))}
    service = webdriver.ChromeService(CHROMEDRIVER, env=environment)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loads = skewed_loads()
    plans = [
        NamedPlan("<b>first</b>.json", make_plan(loads, PlanRequest(4, 4), DIGEST).placement),
        NamedPlan("second.json", make_plan(loads, PlanRequest(8, 8, strategy="mean"), DIGEST).placement),
    ]
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render(make_report(loads, plans, profile="loads.st", profile_sha256=DIGEST, replayed=REPLAY)))
    return file


@pytest.fixture
def reader(browser: Any, page: Path) -> Any:
    """The browser with the page freshly open and drawn."""
    emulate(browser, "light")
    browser.get_log("performance")
    browser.get(page.as_uri())
    wait_for(browser, "return document.documentElement.dataset.drawn")
    return browser


def emulate(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait_for(browser: Any, script: str, *arguments: object) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60, poll_frequency=0.1).until(lambda it: it.execute_script(script, *arguments))


def text(browser: Any, element: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).textContent", element))


def choose(browser: Any, element: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", element)).select_by_value(value)


def point_at(browser: Any, chart: str, x: float, y: float, *, click: bool = False) -> None:
    """Move the real mouse to a place in a chart's own coordinates."""
    from selenium.webdriver.common.action_chains import ActionChains

    browser.execute_script("document.getElementById(arguments[0]).scrollIntoView({block: 'center'})", chart)
    left, top = browser.execute_script(PLACE_OF, chart, x, y)
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(int(left), int(top))
    if click:
        actions.click()
    actions.perform()


def pixels(browser: Any, chart: str) -> str:
    """What a chart's canvas shows, as a PNG data URL."""
    return str(browser.execute_script(CANVAS, chart))


def test_every_chart_is_drawn_and_the_console_stays_silent(reader: Any) -> None:
    for chart in ("heat", "ranks", "experts", "layers", "windows", "redundancy", "replay"):
        assert len(base64.b64decode(pixels(reader, chart).split(",")[1])) > 2000, chart
    wait_for(reader, "return document.documentElement.dataset.printable")
    assert [entry for entry in reader.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")] == []


def test_nothing_is_fetched(reader: Any) -> None:
    wait_for(reader, "return document.documentElement.dataset.printable")
    sent = [
        entry["message"] for entry in reader.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert all("report.html" in message for message in sent)
    assert reader.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_hovering_a_cell_reads_layer_expert_tokens_and_share(reader: Any) -> None:
    loads = skewed_loads()
    tokens = int(loads.counts[:, 2, 5].sum())
    share = tokens / int(loads.counts[:, 2].sum())
    point_at(reader, "heat", 5, 2)
    shown = wait_for(reader, TOOLTIP)
    assert f"layer 5, expert 5: {tokens:,} tokens; {100 * share:.2f} % of the layer" in shown


def test_hovering_a_window_reads_every_line(reader: Any) -> None:
    point_at(reader, "windows", 3, 0.8)
    shown = wait_for(reader, TOOLTIP)
    assert "103" in shown and "<b>first</b>.json" in shown and "second.json" in shown and "held out" in shown


def test_clicking_a_cell_opens_its_layer(reader: Any) -> None:
    point_at(reader, "heat", 9, 3, click=True)
    wait_for(reader, "return document.getElementById('layer').value === '3'")
    assert text(reader, "cell").startswith("layer 7, expert 9:")
    assert text(reader, "layer-summary").startswith("Layer 7.")


def test_layers_are_switched_by_keyboard(reader: Any) -> None:
    choose(reader, "layer", "1")
    assert text(reader, "layer-summary").startswith("Layer 3.")
    before = pixels(reader, "ranks")
    reader.find_element("id", "layer-next").send_keys("\ue007")
    assert text(reader, "layer-summary").startswith("Layer 5.")
    assert "in layer 5" in text(reader, "rank-table")
    wait_for(reader, "return !!document.getElementById('ranks').view")
    assert pixels(reader, "ranks") != before


def test_the_last_layer_has_no_next_one(reader: Any) -> None:
    choose(reader, "layer", "3")
    assert not reader.find_element("id", "layer-next").is_enabled()
    assert reader.find_element("id", "layer-previous").is_enabled()


def test_a_cell_is_read_by_keyboard_alone(reader: Any) -> None:
    choose(reader, "cell-layer", "1")
    field = reader.find_element("id", "cell-expert")
    field.clear()
    field.send_keys("12")
    assert text(reader, "cell").startswith("layer 3, expert 12:")
    field.send_keys("3")
    assert text(reader, "cell") == "Experts are 0 to 15."


def test_another_layout_is_shown_with_its_own_ranks(reader: Any) -> None:
    choose(reader, "layout", "4")
    reader.execute_script("document.querySelector('#rank-table').closest('details').open = true")
    assert len(reader.find_elements("css selector", "#rank-table tbody tr")) == 8


def test_copies_are_shown_in_the_heat_map(reader: Any) -> None:
    choose(reader, "heat-mode", "3")
    wait_for(reader, "return !!document.getElementById('heat').view")
    point_at(reader, "heat", 0, 0)
    assert "cop" in wait_for(reader, TOOLTIP)


def test_sorting_puts_the_hottest_expert_first(reader: Any) -> None:
    hottest = int(skewed_loads().counts.sum(0)[0].argmax())
    choose(reader, "heat-order", "load")
    wait_for(reader, "return !!document.getElementById('heat').view")
    point_at(reader, "heat", 0, 0)
    assert f"layer 1, expert {hottest}:" in wait_for(reader, TOOLTIP)


def test_the_phase_of_replayed_steps_is_chosen(reader: Any) -> None:
    point_at(reader, "replay", 2.8, 0.8)
    assert "p.json, hash, vllm:1/2" in wait_for(reader, TOOLTIP)
    before = pixels(reader, "replay")
    choose(reader, "replay-phase", "1")
    wait_for(reader, "return !!document.getElementById('replay').view")
    assert pixels(reader, "replay") != before


def background(reader: Any) -> str:
    return str(reader.execute_script("return getComputedStyle(document.body).backgroundColor"))


def test_the_system_decides_light_or_dark_and_charts_follow(reader: Any) -> None:
    assert background(reader) == "rgb(255, 255, 255)"
    light = pixels(reader, "layers")
    emulate(reader, "dark")
    wait_for(reader, "return document.documentElement.dataset.theme === 'dark'")
    wait_for(reader, "return !!document.getElementById('layers').view")
    assert background(reader) != "rgb(255, 255, 255)"
    assert pixels(reader, "layers") != light


def test_the_reader_may_overrule_the_system(reader: Any) -> None:
    choose(reader, "theme", "dark")
    assert background(reader) != "rgb(255, 255, 255)"
    choose(reader, "theme", "light")
    assert background(reader) == "rgb(255, 255, 255)"


def test_paper_is_light_whatever_the_screen(reader: Any) -> None:
    choose(reader, "theme", "dark")
    wait_for(reader, "return document.documentElement.dataset.printable")
    reader.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert background(reader) == "rgb(255, 255, 255)"
    shown = reader.execute_script(
        "return [...document.querySelectorAll('.paper')].map((it) => it.getBoundingClientRect().left >= 0)"
    )
    reader.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert shown == [True] * 7


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_width_makes_the_page_scroll_sideways(reader: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    reader.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    reader.refresh()
    wait_for(reader, "return document.documentElement.dataset.drawn")
    overflow = reader.execute_script("return document.documentElement.scrollWidth - innerWidth")
    reader.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert overflow <= 0


def test_every_control_and_picture_has_a_name(reader: Any) -> None:
    assert reader.execute_script(NAMELESS) == []
