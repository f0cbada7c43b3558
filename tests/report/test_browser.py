"""The report and the live page in a real browser: they are drawn without errors, and react.

The tests need Chromium with its driver (Debian: ``chromium`` and ``chromium-driver``) and Selenium,
and are skipped without them. Nothing is downloaded.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from pages import HOSTILE, contents_of, hostile_contents, named_clients

from fedgmm.report.contents import AdaptationRecord, Example, ExampleGroup
from fedgmm.report.examples import thumbnail
from fedgmm.report.page import write_report
from fedgmm.runs.folder import RunFolder, write_history, write_json
from fedgmm.runs.watch import WatchServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Elements that a chart has once it is drawn.
MARKS = {
    "accuracy": ".scatterlayer .point",
    "convergence": ".scatterlayer .js-line",
    "calibration": ".barlayer .point path",
    "columns": ".barlayer .point path",
    "weights": ".heatmaplayer image",
    "projection": ".scatterlayer .point",
    "densities": ".scatterlayer .point",
    "adaptation": ".scatterlayer .point",
}
WAIT = 20.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    pytest.importorskip("selenium", reason="Selenium is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium or its driver is missing; install chromium and chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    os.environ["SE_OFFLINE"] = "true"  # Selenium must not download a browser
    window = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield Window(window)
    window.quit()


class Window:
    """A browser, with the actions that the tests need."""

    def __init__(self, driver):
        self.driver, self.unchanged = driver, None

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def open(self, path, width=1200, scheme="light"):
        """Load a page and wait until its charts are drawn."""
        self.emulate(width, scheme)
        self.driver.get(path.as_uri())
        self.until("return document.documentElement.dataset.drawn === 'yes'")

    def open_again(self, path, scheme="light"):
        """Load a page unless it is there and no test has changed it."""
        if self.unchanged != (path, scheme):
            self.open(path, scheme=scheme)
            self.unchanged = path, scheme

    def emulate(self, width, scheme):
        self.unchanged = None
        command = self.driver.execute_cdp_cmd
        feature = {"name": "prefers-color-scheme", "value": scheme}
        command("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        command("Emulation.setDeviceMetricsOverride", size)

    def until(self, script, *arguments):
        """Wait until a script returns a true value, and return it."""
        end = time.monotonic() + WAIT
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"still waiting for: {script}"
            time.sleep(0.05)
        return found

    def errors(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def pictures(self, selectors):
        """Return the elements as pixels, ``(height, width, 3)`` each, from one screenshot."""
        from PIL import Image

        width, height = self.run(
            "return [innerWidth, document.documentElement.scrollHeight].map(Math.ceil)"
        )
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        boxes = self.run(
            "window.scrollTo(0, 0); return arguments[0].map(one => {"
            "const box = document.querySelector(one).getBoundingClientRect();"
            "return [box.left, box.top, box.right, box.bottom].map(Math.round) })",
            selectors,
        )
        whole = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        return [np.asarray(whole.crop(box)) for box in boxes]

    def point_at(self, chart, selector):
        """Move the mouse onto a mark of a chart and return the text that appears."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        x, y = self.run(
            """
            const chart = document.getElementById(arguments[0]);
            chart.scrollIntoView({ block: "center", behavior: "instant" });
            const box = chart.querySelector(arguments[1]).getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
            """,
            f"chart-{chart}",
            selector,
        )
        for step in (3, 0):  # a move, not a jump
            pointer = ActionBuilder(self.driver, duration=20)
            pointer.pointer_action.move_to_location(round(x) + step, round(y))
            pointer.perform()
        return self.until(
            "return document.querySelector('#chart-' + arguments[0] + ' .hoverlayer').textContent",
            chart,
        )

    def column(self, number):
        """Return a column of the table, without hidden rows."""
        return self.run(
            "return [...document.querySelectorAll('#table tbody tr')].filter(row => !row.hidden)"
            ".map(row => row.cells[arguments[0]].textContent)",
            number,
        )

    def sort_by(self, number):
        self.run("document.querySelectorAll('#table thead button')[arguments[0]].click()", number)
        return self.run(
            "return document.querySelectorAll('#table thead th')[arguments[0]]"
            ".getAttribute('aria-sort')",
            number,
        )


@pytest.fixture(scope="module")
def contents():
    names = [f"client {k}" for k in (10, 2, 1, 33, 4, 5)]
    return contents_of(named_clients(names, rows=60), baselines=("fedavg", "local"))


@pytest.fixture(scope="module")
def page(contents, tmp_path_factory):
    return write_report(contents, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def window(browser, page):
    """The page, for tests that only look at it."""
    browser.open_again(page)
    return browser


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture
def table(window):
    """The table of clients, with all rows and no order."""
    window.run(
        "document.querySelectorAll('#table th').forEach(one => one.setAttribute('aria-sort', 'none'));"
        "const filter = document.getElementById('filter'); filter.value = '';"
        "filter.dispatchEvent(new Event('input'))"
    )
    return window


# ---------------------------------------------------------------------- drawing


def test_every_chart_has_marks_and_there_are_no_errors(window):
    for chart, mark in MARKS.items():
        count = window.run(
            "return document.querySelectorAll('#chart-' + arguments[0] + ' ' + arguments[1]).length",
            chart,
            mark,
        )
        assert count > 0, chart
    assert window.errors() == []
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_no_chart_offers_to_send_the_data_away(window):
    titles = window.run(
        "return [...document.querySelectorAll('.modebar-btn')].map(one => one.dataset.title)"
    )
    assert titles
    assert all("PNG" in title.upper() or "Reset" in title for title in titles), set(titles)
    assert window.run("return document.querySelectorAll('a:not([href^=\"#\"])[href]').length") == 0


# ---------------------------------------------------------------------- hovering


def test_hovering_shows_values(window):
    expected = (
        ("accuracy", ".scatterlayer .trace:last-child .point", "FedGMM: "),
        ("convergence", ".scatterlayer .point:nth-child(2)", "round 2"),
        ("calibration", ".barlayer .point path", " rows"),
        ("columns", ".barlayer .point path", " on average"),
        ("weights", ".heatmaplayer image", "weight 0."),
        ("projection", ".scatterlayer .trace:last-child .point", "of all rows"),
        ("densities", ".scatterlayer .point", "log P(x) "),
        ("adaptation", ".scatterlayer .point:nth-child(2)", "accuracy "),
    )
    assert {chart for chart, _, _ in expected} == set(MARKS)
    for chart, mark, words in expected:
        shown = window.point_at(chart, mark)
        assert words in shown, chart
        assert any(sign.isdigit() for sign in shown), chart


def test_hovering_over_a_client_shows_its_accuracy(window, contents):
    shown = window.point_at("accuracy", ".scatterlayer .trace:last-child .point")
    worst = contents.worst_client
    low, high = contents.clients.interval[worst]
    assert shown == (
        f"{contents.clients.names[worst]}FedGMM: {contents.clients.accuracy[worst]:.1%}"
        f"95% interval {low:.1%} to {high:.1%}"
    )


# ---------------------------------------------------------------------- the table


def test_sorting_text_both_ways(table):
    rising = [f"client {k}" for k in (1, 2, 4, 5, 10, 33)]  # as people count
    assert table.sort_by(0) == "ascending"
    assert table.column(0) == rising
    assert table.sort_by(0) == "descending"
    assert table.column(0) == rising[::-1]


def test_sorting_numbers_both_ways(table):
    for number in (3, 4, 9, 10):
        start = numbers_of(table, number)
        assert table.sort_by(number) == "ascending"
        assert numbers_of(table, number) == sorted(start)
        assert table.sort_by(number) == "descending"
        assert numbers_of(table, number) == sorted(start)[::-1]
    marked = "return document.querySelectorAll('#table th:not([aria-sort=none])[aria-sort]').length"
    assert table.run(marked) == 1


def numbers_of(table, column):
    return [float(cell.rstrip("%")) for cell in table.column(column)]


def test_sorting_by_keyboard(table):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    table.driver.find_element(By.CSS_SELECTOR, "#table thead button").send_keys(Keys.ENTER)
    assert table.column(0)[0] == "client 1"


def test_filtering(table):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    box = table.driver.find_element(By.ID, "filter")
    box.send_keys("CLIENT 3")
    assert table.column(0) == ["client 33"]
    count = "return document.getElementById('count').textContent"
    assert table.run(count) == "1 of 6 clients"
    table.sort_by(0)
    assert table.column(0) == ["client 33"]  # sorting keeps the filter
    box.send_keys(Keys.CONTROL, "a", Keys.NULL, "no such client")
    assert table.column(0) == []
    box.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE)
    assert table.run(count) == "6 clients"
    assert len(table.column(0)) == 6


def test_numbers_are_not_sorted_as_text(table):
    """Nine is less than a thousand, and unknown values come last."""
    table.unchanged = None
    table.run(
        "[...document.querySelectorAll('#table tbody tr')].forEach((row, k) => "
        "{ row.cells[1].textContent = ['1,000', '9', '–', '20', '3', '100'][k]; })"
    )
    table.sort_by(1)
    assert table.column(1) == ["3", "9", "20", "100", "1,000", "–"]
    table.sort_by(1)
    assert table.column(1) == ["1,000", "100", "20", "9", "3", "–"]


# ---------------------------------------------------------------------- light, dark, narrow


def colours_of(window):
    return window.run(
        "const of = (node, name) => getComputedStyle(node)[name];"
        "return [of(document.body, 'backgroundColor'),"
        " of(document.querySelector('#chart-accuracy .ytick text'), 'fill')]"
    )


def brightness(colour):
    return np.mean([int(part) for part in colour.strip("rgba()").split(",")[:3]])


def test_pictures_are_not_empty(browser, page, scheme):
    browser.open_again(page, scheme)
    pictures = browser.pictures([f"#chart-{chart}" for chart in MARKS])
    for chart, pixels in zip(MARKS, pictures, strict=True):
        colours = np.unique(pixels.reshape(-1, 3) @ [1 << 16, 1 << 8, 1])  # a number each
        background = (pixels == pixels[0, 0]).all(-1).mean()
        assert len(colours) > 30, chart
        assert background < 0.995, chart
        assert (pixels[0, 0].mean() > 128) == (scheme == "light")


def test_the_page_follows_the_readers_choice(browser, page, scheme):
    browser.open_again(page, scheme)
    browser.unchanged = None
    before = colours_of(browser)[1]
    ground, ink = map(brightness, colours_of(browser))
    assert (ground > 200 and ink < 80) if scheme == "light" else (ground < 60 and ink > 180)
    # the button switches the page and its charts
    browser.run("document.getElementById('theme').click()")
    browser.until(
        "return getComputedStyle(document.querySelector('#chart-accuracy .ytick text')).fill"
        " !== arguments[0]",
        before,
    )
    ground, ink = map(brightness, colours_of(browser))
    assert (ground < 60 and ink > 180) if scheme == "light" else (ground > 200 and ink < 80)


def test_a_change_of_the_systems_scheme_reaches_the_charts(window):
    window.emulate(1200, "dark")
    window.until("return document.getElementById('theme').textContent === 'Light'")
    time.sleep(0.3)
    ground, ink = map(brightness, colours_of(window))
    assert ground < 60
    assert ink > 180


def test_a_phone_shows_all_without_moving_sideways(browser, page):
    browser.open(page, width=390)
    for scheme in ("light", "dark"):
        browser.emulate(390, scheme)
        wide = browser.run("return document.documentElement.scrollWidth")
        assert wide <= 390
        too_wide = browser.run(
            "return [...document.querySelectorAll('.chart, .panel, .card, h1')]"
            ".filter(one => one.getBoundingClientRect().right > 390.5)"
            ".map(one => one.id || one.className)"
        )
        assert too_wide == []
    # the table is wider than the screen, and moves inside its own box
    assert browser.run(
        "const box = document.querySelector('.tall'); return box.scrollWidth > box.clientWidth"
    )
    assert browser.errors() == []


def test_a_window_that_changes_its_size_keeps_charts_apart(window):
    """A resized chart must not run over the text below it."""
    window.emulate(800, "light")
    time.sleep(0.5)
    too_low = window.run(
        "return [...document.querySelectorAll('.chart')].filter(one =>"
        " one.querySelector('.main-svg').getBoundingClientRect().bottom"
        " > one.getBoundingClientRect().bottom + 1).map(one => one.id)"
    )
    assert too_low == []


# ---------------------------------------------------------------------- readers who do not see, and paper


def test_the_page_can_be_read_aloud(window):
    levels = window.run(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map(one => +one.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    count = "return document.querySelectorAll(arguments[0]).length"
    assert [window.run(count, one) for one in ("main", "header", "nav[aria-label]")] == [1, 1, 1]
    assert window.run("return document.documentElement.lang") == "en"
    for chart in MARKS:
        own = f"#chart-{chart}[role=img][aria-label]"
        assert window.run(count, own) == 1, chart
        assert window.run(count, own + " + details tbody tr") > 0, chart
    unnamed = window.run(
        "return [...document.querySelectorAll('button, a, input, [role=region]')]"
        ".filter(one => !(one.textContent.trim() || one.ariaLabel || (one.labels || []).length))"
        ".map(one => one.outerHTML)"
    )
    assert unnamed == []


def test_the_first_tab_skips_to_the_results(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    window = browser
    window.open(page)
    ActionChains(window.driver).send_keys(Keys.TAB).perform()
    place = window.run(
        "const box = document.activeElement.getBoundingClientRect();"
        "return [document.activeElement.className, box.left, box.top]"
    )
    assert place[0] == "skip"
    assert min(place[1:]) >= 0  # seen once it has the focus
    ActionChains(window.driver).send_keys(Keys.ENTER).perform()
    assert window.run("return document.activeElement.id") == "main"


def test_paper_is_white_and_holds_the_charts(browser, page):
    browser.open(page, scheme="dark")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    time.sleep(0.3)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    ground, ink = map(brightness, colours_of(browser))
    assert ground > 250
    assert ink < 30
    wide = browser.run(
        "return Math.max(...[...document.querySelectorAll('.main-svg')].map(one => one.clientWidth))"
    )
    assert wide <= 680
    hidden = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert [browser.run(hidden, one) for one in ("nav", "#theme", ".tools")] == ["none"] * 3
    browser.emulate(1200, "dark")
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    browser.until("return document.querySelector('#chart-accuracy .main-svg').clientWidth > 700")
    assert brightness(colours_of(browser)[1]) > 180


# ---------------------------------------------------------------------- hostile names


def test_hostile_names_are_only_shown(browser, tmp_path):
    contents = hostile_contents()
    path = write_report(contents, tmp_path / "report.html")
    browser.open(path, width=390)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    browser.open(path)  # would fail if a dialogue had opened
    assert browser.errors() == []
    assert set(HOSTILE) <= set(browser.column(0))
    assert browser.run("return document.querySelectorAll('svg a, main b, main script').length") == 0
    worst = contents.clients.names[contents.worst_client]
    shown = browser.point_at("accuracy", ".scatterlayer .trace:last-child .point")
    assert shown.startswith(worst[:20])


def test_clients_that_joined_later_are_drawn(browser, contents, tmp_path):
    record = AdaptationRecord("newcomer", [30], None, [-3.0, -2.0, -1.9], labelled=False)
    changed = replace(contents, adaptations=(record,), replayed=False)
    browser.open(write_report(changed, tmp_path / "report.html"))
    assert "newcomer" in browser.point_at("adaptation", ".scatterlayer .point")


def test_a_method_without_density_is_drawn_too(browser, tmp_path):
    browser.open(write_report(contents_of(named_clients("abc"), "local"), tmp_path / "report.html"))
    assert browser.errors() == []
    assert browser.run("return document.querySelectorAll('.js-plotly-plot').length") == 4


# ---------------------------------------------------------------------- pictures


def test_pictures_are_drawn_and_fit_a_phone(browser, contents, tmp_path):
    address = thumbnail(np.full((3, 96, 96), 128, dtype=np.uint8))
    rows = {"samples": tuple(Example(f"left/{k}.png", "left", address, "") for k in range(6))}
    texts = {"most novel": (Example("row 3", "sad", "", "word " * 40, "log P(x) -3.0"),)}
    groups = (
        ExampleGroup("Gaussian G1", "Gaussian", {"of all rows": 0.6}, rows),
        ExampleGroup("oslo", "client", {"G1·L1": 0.7, "G2·L1": 0.3}, rows | texts),
    )
    path = write_report(replace(contents, examples=groups), tmp_path / "report.html")
    for width in (390, 1200):
        browser.open(path, width=width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.errors() == []
        browser.run("document.getElementById('examples').scrollIntoView()")
        drawn = "return [...document.images].filter(one => one.naturalWidth === 96).length"
        browser.until(f"{drawn} === 12")
        assert browser.run("return [...document.images].every(one => one.alt)")


# ---------------------------------------------------------------------- the live page


@pytest.fixture
def watched(tmp_path):
    with WatchServer(tmp_path / "run", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_live_page_follows_a_run(browser, watched):
    text = "return document.getElementById(arguments[0]).textContent"
    status = "return document.documentElement.dataset.status === arguments[0]"
    browser.emulate(1200, "light")
    browser.driver.get(watched.address)
    browser.until(status, "waiting")
    folder = RunFolder(watched.home)
    folder.home.mkdir()
    folder.config.write_text("[training]\nrounds = 4\n[federation]\nmin_clients = 1\n")
    browser.until(status, "preparing")
    hostile = "<script>alert(1)</script>" * 3
    rounds = [
        {
            "round": float(k),
            "log_likelihood": -3.0 + 0.1 * k,
            "seconds": 0.5 * k,
            "validation_accuracy": 0.5 + 0.1 * k,
            "answered": 2.0,
            "bytes_sent": 2e6,
            "bytes_received": 1e6,
            "bytes": {"oslo": [1e6, 5e5], hostile: [1e6, 5e5]},
            "epsilon": 0.25 * k,
        }
        for k in range(1, 4)
    ]
    write_history(folder.history, rounds)
    browser.until(status, "training")
    shown = browser.run(text, "cards")
    for words in ("Round3of at most 4", "80.0%", "9.0 MB", "ε spent0.750", "Replied2"):
        assert words in shown
    for key in ("log_likelihood", "validation_accuracy", "answered", "bytes", "epsilon"):
        points = browser.run(
            "return document.querySelector('#' + arguments[0] + ' polyline').getAttribute('points')",
            key,
        )
        assert len(points.split()) == 3, key
        # equal numbers make a level line, and their caption does not give a range
        level = len({point.split(",")[1] for point in points.split()}) == 1
        caption = browser.run(
            "return document.querySelector('#' + arguments[0] + ' .ends').textContent", key
        )
        assert level == ("always" in caption) == (key in ("answered", "bytes")), key
    assert hostile in browser.run(text, "clients")
    for width in (1200, 390):
        browser.emulate(width, "light")
        browser.until("return innerWidth === arguments[0]", width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
    write_json(folder.metrics, {"headline": "Accuracy 80.0 %.", "rounds": 3})
    browser.until(status, "finished")
    assert "Accuracy 80.0 %." in browser.run(text, "status")
    asked = browser.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert {one for one in asked if not one.startswith("data:")} == {f"{watched.address}state"}
    assert browser.errors() == []


def test_the_live_page_says_when_its_server_is_gone(browser, watched):
    browser.driver.get(watched.address)
    browser.until("return document.documentElement.dataset.status === 'waiting'")
    watched.shutdown()
    watched.server_close()
    browser.until("return document.documentElement.dataset.status === 'gone'")
    browser.errors()  # the refused requests
