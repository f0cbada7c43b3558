import itertools
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedgmm.privacy import mask_server, masks, site_sets
from fedgmm.privacy.masks import MaskedSite, Roster, _Session
from fedgmm.privacy.site_sets import (
    MaskError,
    Released,
    TooFewSitesError,
    fewest_survivors,
    graph_sizes,
    neighbours_of,
)
from masked_rounds import Federation, before_uploads, copied, random_vectors, wrapped_sum


def subsets(codes, least):
    codes = list(codes)
    for size in range(least, len(codes) + 1):
        yield from itertools.combinations(codes, size)


@pytest.mark.parametrize("count", [3, 4, 5, pytest.param(6, marks=pytest.mark.slow)])
def test_sums_are_exact_for_every_pattern_of_dropouts(count):
    """A site may drop before its shares, before its vector, before its reply, or never."""
    vectors = random_vectors(count)
    opened = refused = 0
    for senders in subsets(range(count), 1):
        federation = Federation(count, min_change=1).join()
        server = federation.shared(silent=set(range(count)) - set(senders))
        if not server.enough_senders:
            with pytest.raises(TooFewSitesError):
                federation.masked(server, vectors)
            refused += 1
            continue
        uploads = {
            u: federation.sites[u].mask(0, "round 1", *server.bundles_for(u), vectors[u])
            for u in senders
        }
        for survivors in subsets(senders, 1):
            sites = {u: copied(federation.sites[u]) for u in survivors}
            here = before_uploads(server)
            for u in survivors:
                here.add_masked(u, *uploads[u])
            if not here.enough_survivors:
                for u in survivors:
                    with pytest.raises(TooFewSitesError):
                        sites[u].unmask(0, *here.survivors_for(u))
                refused += 1
                continue
            replies = {u: sites[u].unmask(0, *here.survivors_for(u)) for u in survivors}
            for replied in subsets(survivors, 1):
                here._replies.clear()
                for u in replied:
                    here.add_unmask(u, replies[u])
                if len(replied) < here.threshold:
                    with pytest.raises(TooFewSitesError):
                        here.open()
                    refused += 1
                    continue
                np.testing.assert_array_equal(here.open(), wrapped_sum(vectors, survivors))
                opened += 1
    assert opened
    assert refused


def test_a_third_of_the_sites_may_drop_in_any_phase():
    for count in (4, 6, 9):
        third = set(range(count // 3))
        vectors = random_vectors(count)
        for phase in ("shares", "vector", "reply"):
            federation = Federation(count).join()
            server = federation.shared(silent=third if phase == "shares" else ())
            federation.masked(server, vectors, dropped=third if phase == "vector" else ())
            found = federation.opened(server, silent=third if phase == "reply" else ())
            codes = range(count) if phase == "reply" else set(range(count)) - third
            np.testing.assert_array_equal(found, wrapped_sum(vectors, codes))


@pytest.mark.parametrize("left_out", ["pair", "own"])
def test_leaving_out_one_pad_makes_the_sum_wrong(monkeypatch, left_out):
    federation, vectors = Federation(4).join(), random_vectors(4)
    server = federation.shared()
    name = f"{left_out}_pad".replace("own", "seed")
    whole, calls = getattr(masks, name), []

    def without_the_first(*arguments):
        calls.append(1)
        return whole(*arguments) * np.uint64(len(calls) > 1)

    monkeypatch.setattr(masks, name, without_the_first)
    federation.masked(server, vectors)
    monkeypatch.setattr(masks, name, whole)
    assert (federation.opened(server) != wrapped_sum(vectors, range(4))).all()


def test_a_masked_vector_looks_random():
    federation = Federation(3).join()
    server = federation.shared()
    zeros = np.zeros(4000, dtype=np.uint64)
    y, _ = federation.sites[0].mask(0, "round 1", *server.bundles_for(0), zeros)
    counts = np.bincount(y.view(np.uint8), minlength=256)
    expected = len(y) * 8 / 256
    assert ((counts - expected) ** 2 / expected).sum() < 400  # 255 degrees of freedom
    server = federation.shared(number=1)
    again, _ = federation.sites[0].mask(1, "round 2", *server.bundles_for(0), zeros)
    assert (y != again).all()


# ---------------------------------------------------------------------- a hostile server


def ready(count=6, **options):
    """Return a federation whose sites have all sent their vectors."""
    federation = Federation(count, **options).join()
    server = federation.shared()
    federation.masked(server, random_vectors(count))
    return federation, server


def test_a_site_unmasks_one_set_of_survivors_only():
    federation, server = ready()
    site = federation.sites[0]
    codes, signatures = server.survivors_for(0)
    first = site.unmask(0, codes, signatures)
    assert site.unmask(0, codes, signatures) is first  # a repeated request has the same reply
    with pytest.raises(MaskError, match="changed"):
        site.unmask(0, codes[:-1], signatures[:-1])


@pytest.mark.parametrize(
    ("survivors", "reason"),
    [
        ([0, 1, 1, 2, 3], "twice"),
        ([0, 1, 2, 99], "not one"),
        ([1, 2, 3, 4], "does not have this site"),
        ([0, 1, 2], "too few"),
        ([0, 1], "fewer than 3"),
    ],
)
def test_false_lists_of_survivors_are_refused(survivors, reason):
    federation, server = ready()
    _, signatures = server.survivors_for(0)
    wanted = signatures[: len(survivors) - 1]
    with pytest.raises(MaskError, match=reason):
        federation.sites[0].unmask(0, np.array(survivors), wanted)


def test_a_survivor_must_have_seen_the_same_senders():
    federation, server = ready()
    codes, signatures = server.survivors_for(0)
    signatures[2] = signatures[1]
    with pytest.raises(MaskError, match="view"):
        federation.sites[0].unmask(0, codes, signatures)


def test_different_survivors_at_different_sites_open_nothing():
    """Half of the sites hear that site 5 survived, the others that it dropped."""
    federation, server = ready(min_change=1)
    codes, _ = server.survivors_for(0)
    for u in range(5):
        named = codes if u < 3 else codes[:-1]
        near = [v for v in named.tolist() if v != u]
        signatures = np.stack([server._uploads[v] for v in near])
        reply = federation.sites[u].unmask(0, named, signatures)
        if u >= 3:  # the server fills up what it did not get
            reply = {**reply}
            for name in ("locks", "keys"):
                reply[name] = np.concatenate([reply[name], np.zeros_like(reply[name][:1])])
        server.add_unmask(u, reply)
    with pytest.raises(MaskError, match="agree"):
        server.open()


def test_a_site_with_its_own_view_of_the_senders_is_not_opened():
    """A server that hides sites from one victim gets no signature that the others accept."""
    federation = Federation(6).join()
    server = federation.shared()
    senders, bundles = server.bundles_for(0)
    y, signature = federation.sites[0].mask(
        0, "round 1", senders[:4], bundles[:3], random_vectors(1)[0]
    )
    server.add_masked(0, y, signature)
    for u in range(1, 6):
        made = federation.sites[u].mask(0, "round 1", *server.bundles_for(u), random_vectors(1)[0])
        server.add_masked(u, *made)
    with pytest.raises(MaskError, match="view of 'site 0'"):
        federation.sites[1].unmask(0, *server.survivors_for(1))


def test_swapped_keys_are_refused():
    federation = Federation(4).join()
    server = federation.shared()
    stranger = MaskedSite("site 1", "run")
    own = federation.sites[0]
    own.advertise(1)
    codes, adverts = server.keys_for(0)
    adverts[0] = stranger.advertise(1)
    with pytest.raises(MaskError, match="mask key of 'site 1'"):
        own.share(1, codes, adverts)


def test_a_replayed_number_is_refused():
    federation, server = ready(4)
    federation.opened(server)
    later = federation.shared(number=1)
    with pytest.raises(MaskError, match="used before"):
        federation.sites[0].advertise(-1)
    # shares of the earlier number do not open in the later one, so they give nothing
    old = server.bundles_for(0)
    federation.sites[0].mask(1, "round 2", later.bundles_for(0)[0], old[1], random_vectors(1)[0])
    assert not any(federation.sites[0]._sessions[1].held.values())


def test_a_second_vector_is_refused():
    federation, server = ready(4)
    with pytest.raises(MaskError, match="another vector"):
        federation.sites[0].mask(0, "round 1", *server.bundles_for(0), random_vectors(2)[1])


def test_a_purpose_is_never_opened_for_another_set_of_sites():
    """A round below the threshold is discarded, and asked again only with the same sites."""
    federation, server = ready(6)
    with pytest.raises(TooFewSitesError):
        federation.opened(server, silent={0, 1, 2})
    again = federation.shared(number=1, silent={4, 5}, purpose="round 1")
    federation.masked(again, random_vectors(6))
    with pytest.raises(MaskError, match="other sites already"):
        federation.opened(again)
    same = federation.shared(number=2, purpose="round 1")
    federation.masked(same, random_vectors(6))
    np.testing.assert_array_equal(federation.opened(same), wrapped_sum(random_vectors(6), range(6)))


def test_sets_of_sites_differ_by_several_sites():
    released = Released()
    released.add("round 1", ["a", "b", "c", "d", "e"])
    released.check("round 2", ["e", "d", "c", "b", "a"], 2)
    released.check("round 2", ["a", "b", "c"], 2)
    with pytest.raises(MaskError, match="changed by 1"):
        released.check("round 2", ["a", "b", "c", "d"], 2)
    released.check("round 2", ["a", "b", "c", "d"], 1)  # with noise
    released.add("round 2", ["a", "b", "c"])
    with pytest.raises(MaskError, match="changed by 1"):
        released.check("round 3", ["a", "b", "c", "d"], 2)


def test_sums_over_several_sets_cannot_be_solved_for_one_site():
    """Sums without a and b, without a and c, and without b and c together give each of the three."""
    everyone = ["a", "b", "c", "d", "e", "f"]
    released = Released()
    for number, left in enumerate(["", "ab", "ac"]):
        names = [name for name in everyone if name not in left]
        released.check(f"round {number}", names, 2)
        released.add(f"round {number}", names)
    with pytest.raises(MaskError, match="together"):
        released.check("round 3", ["a", "d", "e", "f"], 2)
    released.check("round 3", ["a", "d", "e", "f"], 1)  # with noise
    released.check("round 3", ["a", "b", "c", "f"], 2)


def test_a_new_list_of_sites_ends_the_sums_of_the_old_one():
    """Otherwise a server could change the names of the survivors after their vectors."""
    federation, server = ready()
    names = tuple(name.replace("5", "x") for name in federation.roster.names)
    site = federation.sites[0]
    site.join(Roster(names, federation.roster.identities))
    with pytest.raises(MaskError, match="no keys"):
        site.unmask(0, *server.survivors_for(0))


def test_two_sites_never_use_one_key_and_nonce_for_different_shares(monkeypatch):
    """Also if the server lists the sites in another order at each of them."""
    used = set()

    class Spy:
        def __init__(self, key):
            self.key, self.whole = key, AESGCM(key)

        def encrypt(self, nonce, data, context):
            assert (self.key, nonce) not in used
            used.add((self.key, nonce))
            return self.whole.encrypt(nonce, data, context)

    monkeypatch.setattr(masks, "AESGCM", Spy)
    federation = Federation(3)
    adverts = [site.advertise(0) for site in federation.sites]
    for u, site in enumerate(federation.sites):
        order = [u, *(v for v in range(3) if v != u)]  # each site is the first of its own list
        names = tuple(federation.sites[v].name for v in order)
        site.join(Roster(names, federation.roster.identities[order]))
        site.share(0, np.arange(3), np.stack([adverts[v] for v in order[1:]]))
    assert len(used) == 6


@pytest.mark.parametrize("which", ["channel", "mask key"])
def test_a_key_of_low_order_is_refused(which):
    """It gives the same secret, zero, with every other key."""
    federation = Federation(4)
    bad, good = federation.sites[3], federation.sites[0]
    if which == "channel":
        federation.roster.identities[3, 32:64] = 0
        good.join(federation.roster)
        good.advertise(0)
        adverts = np.stack([site.advertise(0) for site in federation.sites[1:]])
        with pytest.raises(MaskError, match="low order"):
            good.share(0, np.arange(4), adverts)
        return
    federation.join()
    signature = bad._signing.sign(bad._advert_text(bad.name, 0, bytes(32)))
    advert = np.frombuffer(bytes(32) + signature, dtype=np.uint8)
    bad.advertise = lambda number: advert
    bad._sessions[0] = _Session(X25519PrivateKey.generate())
    server = federation.shared()
    with pytest.raises(MaskError, match="low order"):
        federation.masked(server, random_vectors(4))


def test_a_repeated_reply_is_noted_again():
    """The first note may have been lost, such as on a full disk."""
    federation, server = ready()
    site = federation.sites[0]
    site.unmask(0, *server.survivors_for(0))
    site.released = Released()
    site.unmask(0, *server.survivors_for(0))
    assert site.released.purposes == {"round 1": sorted(federation.roster.names)}


def test_another_site_is_left_out_if_one_drops():
    federation, vectors = Federation(7).join(), random_vectors(7)
    federation.opened(federation.masked(federation.shared(), vectors))
    server = federation.shared(number=1, purpose="round 2")
    federation.masked(server, vectors, dropped={2})
    assert server.leave_out() == 6
    np.testing.assert_array_equal(federation.opened(server), wrapped_sum(vectors, [0, 1, 3, 4, 5]))


# ---------------------------------------------------------------------- identities


def signed_by(name):
    """Return a toy signature of 96 bytes."""
    return lambda text: (name.encode() + text)[-96:].rjust(96, b"\0")


def test_identities_must_be_those_of_the_peers():
    names = [f"site {u}" for u in range(4)]
    peers = {name: lambda text, found, n=name: signed_by(n)(text) == found for name in names}
    sites = [MaskedSite(n, "run", sign=signed_by(n), peers=peers) for n in names]
    roster = Roster(tuple(names), np.stack([site.identity for site in sites]))
    sites[0].join(roster)
    forged = roster.identities.copy()
    forged[2, 5] ^= 1
    with pytest.raises(MaskError, match="registered key"):
        sites[1].join(Roster(roster.names, forged))
    unknown = MaskedSite("mallory", "run")
    larger = Roster((*names, "mallory"), np.vstack([roster.identities, unknown.identity[None]]))
    with pytest.raises(MaskError, match="not among the peers"):
        sites[1].join(larger)
    forged = roster.identities.copy()
    forged[1] = forged[2]
    with pytest.raises(MaskError, match="other keys for this site"):
        sites[1].join(Roster(roster.names, forged))
    with pytest.raises(MaskError, match="does not have this site"):
        MaskedSite("other", "run").join(roster)


def test_fewer_sites_than_the_owner_wants_are_refused():
    federation = Federation(4, min_sites=5)
    with pytest.raises(TooFewSitesError, match="fewer than 5"):
        federation.sites[0].join(federation.roster)
    with pytest.raises(TooFewSitesError, match="fewer than 3"):
        Federation(2).join()
    with pytest.raises(MaskError, match="twice"):
        Roster(("a", "a"), np.zeros((2, 160), dtype=np.uint8))


# ---------------------------------------------------------------------- graphs


def test_sizes_of_sparse_graphs():
    k, t = graph_sizes(1000)
    assert (k, t) == (214, 163)
    # 20 % of 1000 sites collude: too few among the holders of any site for two sets of survivors
    draws = np.random.default_rng(0).hypergeometric(200, 799, k, size=100_000)
    assert draws.max() < 2 * t - (k + 1)
    assert graph_sizes(100) == (99, 67)
    assert fewest_survivors(6) == 4


@pytest.mark.parametrize("sites", [101, 200, 500, 1000])
def test_no_number_of_seeds_finds_a_weak_graph(sites):
    """A server that chooses among 2^60 graphs has a chance below 2^-40 of two sets of survivors."""
    k, t = graph_sizes(sites)
    needed = 2 * t - (k + 1)
    colluding, others = -(-sites // 5), sites - 1
    ways = sum(
        math.comb(colluding, bad) * math.comb(others - colluding, k - bad)
        for bad in range(needed, min(k, colluding) + 1)
    )
    # exact, in whole numbers: tries · sites · P(a site has so many colluding neighbours) ≤ 2^-40
    assert 2**60 * sites * ways * 2**40 <= math.comb(others, k)


def test_a_sparse_graph_is_regular_and_symmetric():
    near = neighbours_of(200, b"seed")
    k, _ = graph_sizes(200)
    assert {len(set(own)) for own in near} == {k}
    assert all(u in near[v] for u in range(200) for v in near[u])
    assert near != neighbours_of(200, b"another seed")


def test_sums_of_a_sparse_graph_are_exact(monkeypatch):
    for module in (site_sets, masks, mask_server):
        monkeypatch.setattr(module, "graph_sizes", lambda sites: (6, 4))
    federation, vectors = Federation(12).join(), random_vectors(12)
    server = federation.shared(silent={3})
    federation.masked(server, vectors, dropped={7})
    found = federation.opened(server, silent={9})
    np.testing.assert_array_equal(found, wrapped_sum(vectors, set(range(12)) - {3, 7}))
