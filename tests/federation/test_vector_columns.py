"""Columns of vectors in a federation: principal components from sums, and sites with another encoder."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedgmm.data.tables.errors import TableError
from fedgmm.federation.messages import PROJECTION, Message, digest_of
from fedgmm.federation.policy import read_record
from fedgmm.federation.settings import FederationError, SiteSettings
from fedgmm.federation.site import Site, SiteError
from fedgmm.privacy.settings import Privacy
from fedgmm.runs import fit, open_run
from in_memory_sites import InMemorySites, Killed, federate, with_arrays

pytestmark = pytest.mark.usefixtures("blank_reports", "no_metrics", "quick_looks")

COLUMNS, COMPONENTS = 8, 3
SIZE = {
    "components": 2,
    "learners": 2,
    "rounds": 3,
    "dtype": "float64",
    "covariance_type": "full",
    "personal_labels": False,
}
GIVEN = {**SIZE, "pca": COMPONENTS}


def write_vectors(folder, vector="resnet18_0a1b2c3d", seed=0, **sites):
    """One Parquet file per site with an age, a column of vectors, a sex and a state."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(3, COLUMNS))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, (name, rows) in enumerate((sites or {"oslo": 60, "rome": 50, "wien": 40}).items()):
        z = rng.normal(size=(rows, 3)) + (number % 2)
        x = z @ mix + 0.1 * rng.normal(size=(rows, COLUMNS))
        state = np.where((z[:, 0] > 0.3) ^ (number % 2 == 1), "ill", "well")
        column = pa.FixedSizeListArray.from_arrays(x.astype(np.float32).ravel(), COLUMNS)
        age, sex = rng.normal(50, 9, rows), rng.choice(["f", "m"], rows)
        table = pa.table({"age": age, vector: column, "sex": sex, "state": state})
        pq.write_table(table, folder / f"{name}.parquet")
        files.append(folder / f"{name}.parquet")
    return files


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    return write_vectors(tmp_path_factory.mktemp("vectors"))


@pytest.fixture(scope="module")
def run(vectors, tmp_path_factory):
    """The folder of a federation, its transport, and all requests to oslo."""
    home = tmp_path_factory.mktemp("run")
    sites, requests = InMemorySites(vectors, home), []

    def look(name, request, reply):
        if name == "oslo":
            requests.append(request)
        return reply

    sites.tamper = look
    federate(vectors, home, sites=sites, **GIVEN)
    return home, sites, requests


def assert_same(wanted, found, tolerance=1e-8):
    for one in ("mean", "components", "variances"):
        there, here = getattr(wanted.projection, one), getattr(found.projection, one)
        np.testing.assert_allclose(here, there, atol=tolerance)
    for one in ("means", "covariances"):
        there, here = (getattr(m.prediction.gaussians, one) for m in (wanted, found))
        np.testing.assert_allclose(here, there, atol=tolerance)
    for name, there in wanted.prediction.learners.items():
        np.testing.assert_allclose(found.prediction.learners[name], there, atol=tolerance)


def test_the_model_is_that_of_one_process(vectors, run, tmp_path):
    home, sites, _ = run
    reference = fit(vectors, "state", tmp_path / "reference", **GIVEN).model
    assert [kinds[0] for kinds in sites.asked][:3] == ["hello", "covariance", "start"]
    assert reference.prediction.gaussians.means.shape == (2, COMPONENTS + 2)
    rows = reference.dataset.test.inputs.cpu().numpy()
    for name in reference.names:
        own = open_run(home / "sites" / name).model
        assert_same(reference, own)
        for what in ("predict_proba", "score_samples"):
            there, here = (getattr(m, what)(rows, client=name) for m in (reference, own))
            np.testing.assert_allclose(here, there, atol=1e-8)
    assert_same(reference, open_run(home / "server").model)


def test_vectors_are_reduced_by_default(vectors, tmp_path, monkeypatch):
    monkeypatch.setattr("fedgmm.runs.fitting._VECTOR_COMPONENTS", 2)
    _, lines = federate(vectors, tmp_path, **{**SIZE, "rounds": 1})
    assert any("2 principal components" in line for line in lines)
    assert open_run(tmp_path / "sites/oslo").model.options["pca"] == 2


def test_other_tables_and_methods_without_gaussians_are_not_reduced(files, vectors, tmp_path):
    for name, paths, options in (("a", files, {}), ("b", vectors, {"algorithm": "fedem"})):
        sites, _ = federate(paths, tmp_path / name, **{**SIZE, "rounds": 1, **options})
        assert not any("covariance" in kinds for kinds in sites.asked)
    with pytest.raises(FederationError, match="Gaussians"):
        federate(vectors, tmp_path / "c", **GIVEN, algorithm="fedavg")


def test_the_reduction_can_be_turned_off(vectors, tmp_path):
    sites, _ = federate(vectors, tmp_path, **{**SIZE, "rounds": 1}, pca="none")
    assert not any("covariance" in kinds for kinds in sites.asked)


def test_the_rules_of_careful_sites_leave_the_components_nearly_as_they_are(vectors, run, tmp_path):
    home, _, _ = run
    sites = InMemorySites(vectors, tmp_path, min_rows=5, blur=0.1)
    federate(vectors, tmp_path, sites=sites, **GIVEN)
    there, here = (open_run(place / "sites/oslo").model.projection for place in (home, tmp_path))
    overlap = (there.components @ here.components.mT).abs().diagonal()
    assert 0.9 < float(overlap.min()) < 1 - 1e-8


def test_moments_that_no_rows_could_have_made_are_dropped(vectors, tmp_path):
    sites = InMemorySites(vectors, tmp_path)

    def lie(name, request, reply):
        if name != "rome" or request.kind != "covariance":
            return reply
        return with_arrays(reply, gaussians__second=-reply.arrays["gaussians/second"])

    sites.tamper = lie
    _, lines = federate(vectors, tmp_path, sites=sites, **{**GIVEN, "rounds": 1}, min_clients=2)
    assert any("rome" in line and "semidefinite" in line for line in lines)


def test_more_components_than_columns_are_refused(vectors, tmp_path):
    with pytest.raises(FederationError, match="at most 8"):
        federate(vectors, tmp_path, **SIZE, pca=10)


def test_a_restarted_server_keeps_the_components(vectors, run, tmp_path):
    home, _, _ = run
    sites = InMemorySites(vectors, tmp_path)

    def die(number, requests):
        if any(r.kind == "round" and r.facts["round"] == 3 for r in requests.values()):
            raise Killed

    sites.before_ask = die
    with pytest.raises(Killed):
        federate(vectors, tmp_path, sites=sites, **GIVEN)
    sites.before_ask = lambda number, requests: None
    federate(vectors, tmp_path, sites=sites, **GIVEN)
    assert sum("covariance" in kinds for kinds in sites.asked) == 1
    there, here = (open_run(place / "sites/oslo").model for place in (home, tmp_path))
    assert_same(there, here, 1e-12)


def test_trials_of_sizes_share_one_request(vectors, tmp_path):
    options = {**GIVEN, "components": "auto", "rounds": 2}
    sites, _ = federate(vectors, tmp_path, **options)
    assert sum("covariance" in kinds for kinds in sites.asked) == 1


def test_entries_outside_the_declared_bounds_are_clipped_before_masks(tmp_path):
    """As single columns are: a wrong value at one site would spoil every sum."""
    vector, found = "resnet18_0a1b2c3d", []
    privacy = Privacy(
        secure_aggregation=True,
        bounds={"age": (-100.0, 100.0), f"{vector}[{COLUMNS}]": (-100.0, 100.0)},
        categories={"state": ("ill", "well"), "sex": ("f", "m")},
    )
    for wrong in (1e9, 100.0):
        home = tmp_path / f"{wrong:g}"
        files = write_vectors(home / "data", a=50, b=50, c=50)
        table = pq.read_table(files[0])
        x = np.array(table.column(vector).to_pylist(), dtype=np.float32)
        x[0, 0] = wrong
        column = pa.FixedSizeListArray.from_arrays(x.ravel(), COLUMNS)
        place = table.column_names.index(vector)
        pq.write_table(table.set_column(place, vector, column), files[0])
        sites = InMemorySites(files, home, fresh=False)
        federate(files, home, sites=sites, privacy=privacy, **GIVEN)
        found.append(open_run(home / "sites/b").model)
    assert_same(*found)


def test_masks_cover_the_moments(tmp_path):
    files = write_vectors(tmp_path / "data", a=50, b=50, c=50, d=50)
    reference = fit(files, "state", tmp_path / "reference", **GIVEN).model
    privacy = Privacy(
        secure_aggregation=True,
        bounds={"age": (-100.0, 100.0), f"resnet18_0a1b2c3d[{COLUMNS}]": (-100.0, 100.0)},
        categories={"state": ("ill", "well"), "sex": ("f", "m")},
    )
    sites, seen = InMemorySites(files, tmp_path, fresh=False), []

    def look(name, request, reply):
        if request.kind == "covariance":
            seen.append(set(reply.arrays))
        return reply

    sites.tamper = look
    federate(files, tmp_path, sites=sites, privacy=privacy, **GIVEN)
    assert seen
    assert all(all(name.startswith("mask/") for name in arrays) for arrays in seen)
    own = open_run(tmp_path / "sites/a").model
    np.testing.assert_allclose(
        own.projection.components, reference.projection.components, atol=1e-4
    )


# ---------------------------------------------------------------------- another encoder


def test_a_site_with_another_encoder_is_refused(vectors, tmp_path):
    other = write_vectors(tmp_path / "data", "resnet18_ffffffff", riga=50)
    with pytest.raises(FederationError, match="another encoder"):
        federate([*vectors, *other], tmp_path, **GIVEN)


def test_the_other_sites_train_without_it(vectors, tmp_path):
    other = write_vectors(tmp_path / "data", "resnet18_ffffffff", riga=50)
    _, lines = federate([*vectors, *other], tmp_path, **{**GIVEN, "rounds": 1}, min_clients=3)
    assert any("riga" in line and "another encoder" in line for line in lines)


def test_a_later_file_or_site_with_another_encoder_is_refused(run, tmp_path):
    home, _, requests = run
    (other,) = write_vectors(tmp_path / "data", "resnet18_ffffffff", riga=50)
    with pytest.raises(TableError, match="another encoder"):
        open_run(home / "sites/oslo").predict(other, "oslo")
    late = Site(SiteSettings((other,), tmp_path / "riga"))
    with pytest.raises(SiteError, match="another encoder"):
        ask(late, of_kind(requests, "start"))


# ---------------------------------------------------------------------- what a site sends


def ask(site, request, arrays=None, **facts):
    return site.reply(Message(request.kind, arrays or request.arrays, {**request.facts, **facts}))


def of_kind(requests, kind):
    return next(one for one in requests if one.kind == kind)


@pytest.fixture
def site(vectors, tmp_path):
    return Site(SiteSettings((vectors[0],), tmp_path / "oslo"))


def test_moments_are_blurred_once_and_on_record(site, run, tmp_path):
    _, _, requests = run
    request = of_kind(requests, "covariance")
    first = ask(site, request).arrays["gaussians/second"]
    for facts in ({}, {"run": "0" * 16}, {"min_rows": 1}):
        np.testing.assert_array_equal(ask(site, request, **facts).arrays["gaussians/second"], first)
    more = {**request.arrays, "anything": np.ones(1)}
    for again in (ask(site, request, more), ask(site, request, projection="other")):
        np.testing.assert_array_equal(again.arrays["gaussians/second"], first)
    # the age stands beside the components, so its products are not asked for
    assert first.shape == (1, COLUMNS * (COLUMNS + 1) // 2)
    (*_, last) = read_record(tmp_path / "oslo")
    assert (last["request"], last["rows"]) == ("covariance", 36)


@pytest.mark.parametrize("change", ["preprocessing", "options", "table"])
def test_moments_of_other_columns_or_rows_are_refused(site, run, change):
    _, _, requests = run
    request = of_kind(requests, "covariance")
    ask(site, request)
    facts = json.loads(json.dumps(request.facts))
    if change == "preprocessing":
        facts["preprocessing"]["columns"][0]["mean"] += 1.0
    elif change == "options":
        facts["options"]["pca"] = None
    else:
        facts["table"]["seed"] = 5
    with pytest.raises(SiteError, match="agreed to"):
        ask(site, request, **facts)


def test_moments_without_components_in_the_plan_are_refused(site, run):
    _, _, requests = run
    request = of_kind(requests, "covariance")
    with pytest.raises(SiteError, match="no pca"):
        ask(site, request, options={**request.facts["options"], "pca": None})


def test_too_few_rows_send_no_moments(vectors, run, tmp_path):
    _, _, requests = run
    careful = Site(SiteSettings((vectors[0],), tmp_path / "oslo", min_rows=40))
    with pytest.raises(SiteError, match="min_rows"):
        ask(careful, of_kind(requests, "covariance"))


@pytest.mark.parametrize("name", ["mean", "components", "variances"])
@pytest.mark.parametrize("damage", ["missing", "shape", "infinite", "stretched"])
def test_a_site_checks_the_components(site, run, name, damage):
    _, _, requests = run
    request = of_kind(requests, "start")
    arrays, key = dict(request.arrays), f"projection/{name}"
    value = arrays.pop(key)
    changed = {"shape": value[:-1], "infinite": value + np.inf, "stretched": value - 1e4}
    if damage != "missing":
        arrays[key] = changed[damage]
    with pytest.raises(SiteError, match="principal components"):
        ask(site, request, arrays)


def test_other_components_in_a_later_round_are_refused(site, run):
    _, _, requests = run
    start, round_ = of_kind(requests, "start"), of_kind(requests, "round")
    ask(site, start)
    other = {name: one for name, one in start.arrays.items() if name.startswith(PROJECTION)}
    key = f"{PROJECTION}components"
    other[key] = np.ascontiguousarray(other[key][::-1])
    digest = digest_of(Message("", other), (), ())
    with pytest.raises(SiteError, match="changed"):
        ask(site, round_, {**round_.arrays, **other}, projection=digest)
    with pytest.raises(SiteError, match="other principal components"):
        ask(site, round_, {**round_.arrays, **other})


def test_components_travel_once_to_each_site(run):
    _, _, requests = run
    sent = [one.kind for one in requests if f"{PROJECTION}components" in one.arrays]
    assert [one.kind for one in requests].count("round") == 3
    assert sent == ["start", "finish"]


def test_a_site_that_lost_its_components_receives_them_again(vectors, run, tmp_path):
    sites, carried = InMemorySites(vectors, tmp_path), []

    def lose(number, requests):
        if sites.asked[-1][0] == "round" and sites.asked.count(sites.asked[-1]) == 2:
            (tmp_path / "sites/oslo/projection.safetensors").unlink()

    def look(name, request, reply):
        if name == "oslo" and f"{PROJECTION}components" in request.arrays:
            carried.append(request.kind)
        return reply

    sites.before_ask, sites.tamper = lose, look
    federate(vectors, tmp_path, sites=sites, **GIVEN)
    assert carried == ["start", "round", "finish"]
    assert_same(open_run(run[0] / "server").model, open_run(tmp_path / "server").model)


@pytest.mark.parametrize("kind", ["covariance", "start"])
def test_a_split_of_few_rows_is_refused_without_a_greeting_too(site, run, kind):
    _, _, requests = run
    request = of_kind(requests, kind)
    table = {**request.facts["table"], "split": [0.1, 0.0, 0.9]}
    with pytest.raises(SiteError, match="third of its rows"):
        ask(site, request, table=table)
