"""The page is one file: complete, small, and safe against hostile texts of a user."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from pages import HOSTILE, contents_of, hostile_contents, named_clients

from fedgmm.data.synthetic import synthetic
from fedgmm.report import charts
from fedgmm.report.contents import AdaptationRecord, ClientTable, WeightMap
from fedgmm.report.gathering import project
from fedgmm.report.page import _plotly, render, verdict, write_report
from fedgmm.support.paired import Estimate

MEGABYTE = 1_000_000
CHARTS = (
    "accuracy",
    "convergence",
    "calibration",
    "columns",
    "weights",
    "projection",
    "densities",
    "adaptation",
)


class Tags(HTMLParser):
    """Tags of a page with their attributes, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.text, self._open = [], [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    def ids(self):
        return {attributes.get("id") for _, attributes in self.tags}

    def words(self):
        """Return the text a reader sees, on one line."""
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def page(contents):
    return render(contents)


def figures_of(page):
    return json.loads(Tags(page).scripts[0])


# ---------------------------------------------------------------------- completeness


def test_every_part_is_there(page, contents):
    found = Tags(page)
    assert {f"chart-{key}" for key in CHARTS} <= found.ids()
    assert {"clients", "settings", "table", "filter", "theme"} <= found.ids()
    assert set(figures_of(page)) == set(CHARTS)
    for name, value in (*contents.configuration.items(), *contents.environment.items()):
        assert f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" in page


def test_the_table_has_a_row_for_every_client(page, contents):
    whole = page[page.index('<table id="table">') :]
    rows = re.findall(r'<tr><th scope="row">(client \d)</th><td>', whole)
    assert rows == list(contents.clients.names)
    assert f"<td>{contents.clients.accuracy[2]:.1%}</td>" in page


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        ("fedem", {"densities", "projection"}),
        ("local", {"densities", "projection", "weights", "adaptation"}),
        ("fedavg", {"densities", "projection", "weights", "adaptation"}),
    ],
)
def test_parts_that_do_not_apply_say_why(algorithm, missing):
    contents = contents_of(named_clients("abc"), algorithm)
    page = render(contents)
    assert set(figures_of(page)) == set(CHARTS) - missing
    for key in missing:
        assert f'id="chart-{key}"' not in page
        assert contents.absent[key] in Tags(page).words()


def test_the_page_without_test_rows(contents):
    blank = np.full(6, np.nan)
    table = ClientTable(
        contents.clients.names, contents.clients.rows, np.ones(6, int), *[blank] * 3
    )
    page = render(replace(contents, clients=table, reliability=None, densities=None, baselines={}))
    assert "no test rows" in page
    assert "nan" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).lower()


def test_the_share_of_all_test_rows_stands_beside_the_mean_of_clients(contents):
    known = contents.evaluation
    found = replace(known, rows=1 + 100 * (known.accuracy == known.accuracy.min()))
    assert found.weighted_accuracy < found.mean_accuracy - 0.01
    words = Tags(render(replace(contents, evaluation=found))).words()
    assert f"{found.weighted_accuracy:.1%} of all test rows" in words


def test_titles_of_the_map_s_axes_fit_the_chart(contents):
    titles = ("+ short", "+ " + "long name " * 12)
    plane = replace(contents.projection, axis_titles=titles)
    layout = figures_of(render(replace(contents, projection=plane)))["projection"]["layout"]
    assert layout["xaxis"]["title"]["text"] == "+ short →"
    assert len(layout["yaxis"]["title"]["text"]) <= 45


# ---------------------------------------------------------------------- the summary


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ([0.6, 0.51, 0.39], "gains 20.0 percentage points over Other"),
        ([0.99, 0.91, 0.80], "Other is better here: an average client would gain 20.0"),
        ([0.6, 0.7, 0.8], "A tie: FedGMM and Other"),
        (
            [0.5, 0.5, 0.95],
            "no more than noise, +5.0 percentage points (95% interval -14.0 to +24.0)",
        ),
        (None, "No other method was run"),
    ],
)
def test_the_verdict(contents, baseline, words):
    assert words in verdict(compared(contents, baseline, times=4))


def compared(contents, baseline, times):
    """Return contents of clients with three accuracies, each of them several times."""
    accuracy = np.tile([0.8, 0.7, 0.6], times)
    counts = np.ones(len(accuracy), dtype=int)
    names = tuple(f"client {k}" for k in range(len(accuracy)))
    table = ClientTable(names, counts, counts, accuracy, accuracy, accuracy)
    other = {} if baseline is None else {"Other": np.tile(baseline, times)}
    baselines = {**other, "Poor": accuracy - 0.5} if other else {}
    given = {"clients": table, "baselines": baselines}
    return replace(contents, **given, weights=None, projection=None, densities=None)


def test_few_clients_are_not_tested(contents):
    """An interval over three clients says nothing, and neither does their tenth percentile."""
    few = compared(contents, [0.6, 0.51, 0.39], times=1)
    said = verdict(few)
    assert "differ by +20.0 percentage points" in said
    assert "3 clients are too few" in said
    assert "interval" not in said
    words = Tags(render(few)).words()
    assert "9 of 10 clients reach" not in words
    assert "(tie)" not in words
    assert "9 of 10 clients reach" in Tags(render(compared(contents, [0.6, 0.5, 0.4], 4))).words()


def test_the_verdict_counts_clients_that_do_as_well(contents):
    table = replace(contents.clients, accuracy=np.array([0.9, 0.8, 0.7, 0.6, 0.5, np.nan]))
    baselines = {"Other": np.array([0.95, 0.8, 0.1, 0.1, np.nan, 0.9])}
    assert "3 of 4 clients" in verdict(replace(contents, clients=table, baselines=baselines))


def test_a_comparison_s_own_test_decides_about_a_tie(contents):
    table = replace(contents.clients, accuracy=np.array([0.9, 0.8, 0.7, 0.6, 0.5, np.nan]))
    given = replace(contents, clients=table, baselines={"A": np.full(6, 0.6), "B": np.full(6, 0.5)})
    tested = {"A": Estimate(0.05, 0.02, 0.08, 0.01), "B": Estimate(0.04, -0.01, 0.09, 0.2)}
    shown = replace(given, differences=tested)
    assert shown.best_baseline == "B"
    assert "A tie: FedGMM and B" in verdict(shown)
    words = Tags(render(shown)).words()
    assert "A 60.0% +5.0 60.0%" in words
    assert "B 50.0% +4.0 (tie) 50.0%" in words


def test_methods_are_compared_client_by_client(contents):
    table = replace(contents.clients, accuracy=np.array([0.9, 0.8, 0.7, 0.6, 0.5, np.nan]))
    baselines = {"Other": np.array([0.95, 0.8, 0.1, 0.1, np.nan, 0.9]), "None": np.full(6, np.nan)}
    words = Tags(render(replace(contents, clients=table, baselines=baselines))).words()
    # mean, lead of FedGMM, worst client, clients served worse and better
    assert "FedGMM 70.0% 50.0% Other 57.0% +26.2 10.0% 2 1" in words
    assert "None – – – 0 0" in words


# ---------------------------------------------------------------------- no network


def test_there_is_no_address_in_the_page(page):
    addresses = set(re.findall(r"(?:https?|wss?|ftp)://[^\s\"'`<>]+", page))
    assert {address.split("/")[2] for address in addresses} == {"www.w3.org"}


def test_nothing_is_loaded(page):
    for tag, attributes in Tags(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in page.split("</style>")[0]
    assert "url(" not in page.split("</style>")[0]


def test_the_policy_forbids_the_network_and_other_scripts(page):
    (policy,) = (
        attributes["content"]
        for tag, attributes in Tags(page).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy
    assert "connect-src" not in policy


def test_plotly_is_there_once_and_sends_nothing_to_a_cloud(page):
    assert page.count("* plotly.js v") == 1
    assert "showSendToCloud: false" in page
    assert len(_plotly()) > MEGABYTE


# ---------------------------------------------------------------------- hostile names


@pytest.fixture(scope="module")
def hostile_page():
    return render(hostile_contents())


def test_names_cannot_open_or_close_a_tag(hostile_page, page):
    found = Tags(hostile_page)
    assert len(found.scripts) == 3  # the figures, plotly and the page's own
    assert not [tag for tag, _ in found.tags if tag == "b"]
    assert all(a["href"].startswith("#") for tag, a in found.tags if tag == "a")
    without_scripts = re.sub(r"<script.*?</script>", "", hostile_page, flags=re.DOTALL)
    assert "alert(1)" in without_scripts  # it is shown
    assert "<script>alert" not in hostile_page
    assert "<!--" not in without_scripts


def test_names_are_shown_as_they_are(hostile_page):
    cells = re.findall(r'<tr><th scope="row">(.*?)</th><td>', hostile_page)
    assert set(HOSTILE) <= set(map(html.unescape, cells))


def test_figures_carry_no_markup_of_users(hostile_page):
    raw = Tags(hostile_page).scripts[0]
    assert not set("<>&\u2028\u2029") & set(raw)
    for text in strings_in(json.loads(raw)):
        assert "<script" not in text
        assert "<a " not in text
        assert "<!--" not in text


def strings_in(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings_in(one)


def test_names_that_no_file_can_hold(contents, tmp_path):
    names = ("\ud800", "nul \x00", "\x1b[31m", *contents.clients.names[3:])
    table = replace(contents.clients, names=names)
    path = write_report(replace(contents, clients=table), tmp_path / "new" / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "\x00" not in text
    assert "\x1b" not in text
    assert path.parent.name == "new"
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]


# ---------------------------------------------------------------------- metrics and columns


def test_a_rare_class_has_the_first_tile_and_the_verdict(contents):
    values = {"accuracy": 0.99, "average_precision": 0.25, "auc": 0.9, "base_rate": 0.0125}
    intervals = {"average_precision": (0.125, 0.5)}
    rare = SimpleNamespace(
        headline=lambda: "Average precision 0.250.",
        weighted_accuracy=0.99,
        leading_metric="average_precision",
        pooled=values,
        pooled_intervals=intervals,
        positive="<b>",
        constant_accuracy=0.9,
    )
    plain = replace(contents, evaluation=rare, baselines={})
    page = render(plain)
    first = re.search(r'<div class="card"><dt>(.*?)</dt><dd>(.*?)</dd>', page, flags=re.DOTALL)
    assert first[1] == "Average precision"
    assert first[2].startswith("0.250")
    assert "0.013, the base rate" in first[2]
    assert "<b>”" not in page
    assert verdict(plain).startswith("Average precision 0.250.")
    rows = re.findall(
        r'<tr class="metric"><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', page
    )
    assert rows[0] == ("average precision", "0.250", "0.125 to 0.500")
    assert rows[1] == ("base rate", "1.2%", "")
    assert ("AUC", "0.900", "") in rows


def test_accuracy_has_the_first_tile_otherwise(contents, page):
    first = re.search(r'<div class="card"><dt>(.*?)</dt><dd>(.*?)</dd>', page, flags=re.DOTALL)
    assert first[1] == "Mean accuracy"
    assert f"a constant guess reaches {contents.evaluation.constant_accuracy:.1%}" in first[2]
    assert f"<td>{np.nanmin(contents.clients.auc):.3f}</td>" in page


def test_the_columns_that_decide(contents):
    found = contents.deciding
    assert found.names[0] == "x0"  # the label follows from it
    assert (found.least <= found.mean).all()
    assert (found.mean <= found.most).all()
    (bars,) = charts.deciding_columns(found).data
    assert list(bars.x) == pytest.approx(found.mean.tolist())
    assert list(bars.x + bars.error_x.array) == pytest.approx(found.most.tolist())


# ---------------------------------------------------------------------- size


def test_a_page_of_300_clients_is_small():
    dataset = synthetic(300, 40, dimensions=6).dataset
    contents = contents_of(dataset, baselines=("fedavg",))
    page = render(contents)
    assert len(page.encode()) < 8 * MEGABYTE
    table = page[page.index('<table id="table">') :]
    assert table.count('<tr><th scope="row">') == 300
    assert len(contents.densities.log_x) <= 3000


def test_a_page_of_thousands_of_clients_shows_a_sample(contents, rng):
    many, pairs = 3000, 4
    names = tuple(f"clinic {k}" for k in range(many))
    counts = rng.integers(1, 1000, many)
    shares = rng.random(many)
    weights = rng.dirichlet(np.ones(pairs), size=many)
    shown = WeightMap(np.arange(0, many, 20), ("G1·L1", "G1·L2", "G2·L1", "G2·L2"), weights[::20])
    plane = project(
        np.eye(2, 3), np.ones((2, 3)), "diag", np.full(2, 0.5), weights[:, :2] + weights[:, 2:]
    )
    large = replace(
        contents,
        clients=ClientTable(
            names, counts, counts, shares, shares, shares, ("G1·L1",) * many, shares, shares
        ),
        baselines={"FedAvg": rng.random(many)},
        weights=shown,
        projection=plane,
    )
    page = render(large)
    assert len(page.encode()) < 8 * MEGABYTE
    table = page[page.index('<table id="table">') :]
    assert table.count('<tr><th scope="row">clinic') == many
    words = Tags(page).words()
    assert "The chart shows 150 of 3,000 clients" in words
    assert "The chart shows 1,000 of 3,000 clients" in words
    assert len(charts.accuracies(large).data[0].x) == 1000


# ---------------------------------------------------------------------- charts


def test_several_clients_that_joined_later(contents):
    records = (
        AdaptationRecord("one", [0, 5, 100], [0.5, 0.6, 0.7], [-3.0], labelled=True),
        AdaptationRecord("two", [0, 20], [0.5, 0.9], [-2.0], labelled=False),
    )
    words = Tags(render(replace(contents, adaptations=records, replayed=False))).words()
    assert "some of them without labels" in words
    assert "joined again" not in words
    figure = charts.adaptation(records)
    assert list(figure.layout.xaxis.categoryarray) == ["0", "5", "20", "100"]
    assert {one.name for one in figure.data} == {"one", "two"}


def test_the_caption_says_that_a_known_client_was_replayed(page):
    assert "Its rows were used to train" in Tags(page).words()


def test_a_model_without_anything_personal_says_so_first(contents):
    page = render(replace(contents, impersonal="Nothing is personalised: why."))
    assert f'<p class="verdict">Nothing is personalised: why. {verdict(contents)[:20]}' in page
    assert "Nothing is personalised" not in render(contents)
