"""The bytes that a server receives over TLS in a run with secure aggregation."""

import json
import shutil
import threading

import numpy as np
import pytest
from scipy.stats import chi2
from sklearn.ensemble import RandomForestClassifier

from fedgmm.federation.demo import free_port
from fedgmm.federation.network import sites as sites_module
from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.client import Connection, take_part
from fedgmm.federation.network.keys import new_pair
from fedgmm.federation.network.server import ServerAddress, run_server
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site
from fedgmm.privacy import fixed_point
from fedgmm.privacy.settings import Privacy
from fedgmm.runs.run import open_run
from in_memory_sites import federation_settings
from loopback import Federation
from small_runs import draw_rows, write_csv

pytestmark = pytest.mark.slow

NAMES = ("bergen", "oslo", "tromso", "vadso")
PRIVACY = Privacy(
    secure_aggregation=True,
    bounds={"age": (0, 120), "dose": (-10, 10)},
    categories={"state": ["ill", "well"], "ward": ["north", "south", "west"]},
)
TEXTS = (b"north", b"south", b"west", b"well", b"ward")


class Transcript:
    """All bytes that the server received, and the masked vectors of each site.

    Attributes:
        data: bytes of each connection, after decryption.
        vectors: masked vectors by name of the site.
        plain: the same vectors before the pads, by name, which only the sites know.
        weights: the sites' own weights ``π_c``, by name.
    """

    def __init__(self):
        self.data, self.vectors, self.plain, self.weights = [], {}, {}, {}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two federations with the same rows; Bergen and Oslo have exchanged their files in the second."""
    home = tmp_path_factory.mktemp("transcripts")
    files = {
        name: write_csv(
            home / f"{name}.csv", draw_rows(np.random.default_rng(u), 80 + 20 * u, u % 2 == 1)
        )
        for u, name in enumerate(NAMES)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgmm.federation.members.POLL", 0.01)
        patch.setattr("fedgmm.report.page.render", lambda contents: "")
        first = record(patch, home / "first", files)
        swapped = {**files, "bergen": files["oslo"], "oslo": files["bergen"]}
        second = record(patch, home / "second", swapped)
    return first, second


def record(patch, home, files):
    """Run a federation over TLS with keys and peers, and return its transcript."""
    found, tls = Transcript(), trial_certificates(["127.0.0.1"], home / "certificates")
    (home / "keys").mkdir()
    for name in files:
        _, public = new_pair(name, home / "private")
        shutil.move(public, home / "keys")
    whole = sites_module.Assembler

    class Recorded(whole):
        def __init__(self, limit):
            super().__init__(limit)
            self.seen = bytearray()
            found.data.append(self.seen)

        def add(self, piece):
            self.seen += piece
            message = super().add(piece)
            if message is not None and "mask/vector" in message[1].arrays:
                own = found.vectors.setdefault(message[1].facts["name"], [])
                own.append(message[1].arrays["mask/vector"])
            return message

    patch.setattr(sites_module, "Assembler", Recorded)
    exact, who = fixed_point.to_fixed, threading.local()

    def to_fixed(values, sites=1):
        elements = exact(values, sites)
        found.plain.setdefault(who.name, []).append(elements)
        return elements

    patch.setattr("fedgmm.federation.site.to_fixed", to_fixed)
    port, failed = free_port(), []

    def client(name, path):
        who.name = name
        key = home / "private" / f"{name}.key"
        settings = SiteSettings(
            (path,), home / name, name, key=key, peers=home / "keys", min_sites=4, blur=0.0
        )
        try:
            connection = Connection("127.0.0.1", port, tls.authority, key)
            take_part(Site(settings), connection, home / name, notify=lambda _: None)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=item, daemon=True) for item in files.items()]
    for thread in threads:
        thread.start()
    settings = federation_settings(
        4,
        privacy=PRIVACY,
        rounds=12,
        components=2,
        learners=2,
        start_timeout=60.0,
        table={"split": (1.0, 0.0, 0.0)},  # which rows are held out depends on a site's name
    )
    address = ServerAddress("127.0.0.1", port, tls, home / "keys")
    run_server(settings, home / "run", address, serve=False, notify=lambda _: None)
    for thread in threads:
        thread.join(30)
    assert not failed
    for name in files:
        prediction = open_run(home / name).model.prediction
        found.weights[name] = prediction.client_weights.double().numpy().reshape(-1)
    return found


def words(vectors):
    """The bits of all numbers of the rounds, and the place of each number, ``(n, 65)``."""
    rounds = [one for one in vectors if len(one) == len(vectors[-1])]
    places = np.tile(np.arange(len(rounds[0])), len(rounds))
    bits = np.unpackbits(np.concatenate(rounds).view(np.uint8).reshape(-1, 8), axis=1)
    return np.column_stack([bits, places])


def test_masked_bytes_are_uniform(two_runs):
    for run in two_runs:
        for name in NAMES:
            data = np.concatenate(run.vectors[name]).view(np.uint8)
            counts = np.bincount(data, minlength=256)
            expected = len(data) / 256
            statistic = ((counts - expected) ** 2 / expected).sum()
            assert 1e-5 < chi2.sf(statistic, 255) < 1 - 1e-5


def test_the_totals_are_equal_and_the_inputs_differ(two_runs):
    first, second = two_runs
    for at in range(len(first.plain["bergen"])):
        totals = [sum(run.plain[name][at] for name in NAMES) for run in two_runs]
        difference = (totals[0] - totals[1]).view(np.int64)
        assert np.abs(difference).max() < 2**14  # rounding of a few rounds, in steps of 2^-24
    assert (first.plain["bergen"][0] != second.plain["bergen"][0]).any()


def test_a_classifier_cannot_tell_inputs_with_equal_sums_apart(two_runs):
    """It separates the vectors without masks, and guesses with them."""
    for kind, separable in (("plain", True), ("vectors", False)):
        samples = [words(getattr(run, kind)["bergen"]) for run in two_runs]
        x = np.concatenate(samples)
        y = np.repeat([0, 1], len(samples[0]))
        order = np.random.default_rng(0).permutation(len(x))
        half = len(x) // 2
        forest = RandomForestClassifier(50, random_state=0).fit(x[order[:half]], y[order[:half]])
        score = forest.score(x[order[half:]], y[order[half:]])
        chance = 4 * 0.5 / np.sqrt(len(x) - half)
        assert score > 0.75 if separable else abs(score - 0.5) < chance, (kind, score)


def test_no_text_of_a_row_and_no_count_is_in_the_transcript(two_runs):
    for run in two_runs:
        received = b"".join(map(bytes, run.data))
        assert len(received) > 10_000
        assert not any(text in received for text in TEXTS)
        assert b'"rows"' not in received
        for weights in run.weights.values():
            for number in weights:
                assert number.tobytes() not in received
                assert np.float32(number).tobytes() not in received
        for name in NAMES:
            for elements in run.plain[name]:  # no number of a site leaves as it is
                for number in elements[elements != 0][:50]:
                    if abs(int(number.view(np.int64))) > 2**20:
                        assert number.tobytes() not in received


def test_a_third_of_the_processes_may_be_killed(tmp_path):
    names = ("bergen", "bodo", "oslo", "tromso", "vadso", "voss")
    federation = Federation(tmp_path, names)
    declared = PRIVACY.record()
    lines = [f"{name} = {list(pair)}" for name, pair in declared["bounds"].items()]
    texts = [f"{name} = {json.dumps(values)}" for name, values in declared["categories"].items()]
    sections = ["min_clients = 4", "[privacy]", "secure_aggregation = true"]
    sections += ["[privacy.bounds]", *lines, "[privacy.categories]", *texts]
    federation.configure(6, rounds=500, training="tol = 0.0", federation="\n".join(sections))
    try:
        federation.server()
        for name in names:
            federation.client(name, "--peers", "keys", "--min-sites", 4)
        federation.wait_for("server", "round 3:", 120)
        for name in ("bodo", "tromso"):
            federation.kill(name)
        federation.wait_for("server", "4 clients", 60, times=3)
    finally:
        federation.clean_up()
