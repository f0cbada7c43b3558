"""Sites and a server of the masking protocol in one process, without a network."""

import copy

import numpy as np

from fedgmm.privacy.mask_server import Aggregation
from fedgmm.privacy.masks import MaskedSite, Roster


class Federation:
    """Sites that know each other, and the roster of the server."""

    def __init__(self, count, run="run", **options):
        self.run = run
        self.sites = [MaskedSite(f"site {u}", run, **options) for u in range(count)]
        self.roster = Roster(
            tuple(site.name for site in self.sites),
            np.stack([site.identity for site in self.sites]),
        )

    def join(self):
        for site in self.sites:
            site.join(self.roster)
        return self

    def shared(self, number=0, silent=(), purpose="round 1", **options):
        """Return an aggregation after its first two phases; ``silent`` sites send no shares."""
        adverts = {u: site.advertise(number) for u, site in enumerate(self.sites)}
        server = Aggregation(self.run, number, self.roster, adverts, purpose=purpose, **options)
        for u, site in enumerate(self.sites):
            bundles = site.share(number, *server.keys_for(u))
            if u not in silent:
                server.add_bundles(u, bundles)
        return server

    def masked(self, server, vectors, dropped=()):
        """Let all senders upload, except those that dropped."""
        for u in server.senders:
            made = self.sites[u].mask(
                server.number, server.purpose, *server.bundles_for(u), vectors[u]
            )
            if u not in dropped:
                server.add_masked(u, *made)
        return server

    def opened(self, server, silent=()):
        """Let the survivors unmask, except silent ones, and return the sum."""
        for u in server.survivors:
            reply = self.sites[u].unmask(server.number, *server.survivors_for(u))
            if u not in silent:
                server.add_unmask(u, reply)
        return server.open()

    def total(self, vectors, number=0, purpose="round 1"):
        """Run all phases without dropouts."""
        server = self.shared(number, purpose=purpose)
        return self.opened(self.masked(server, vectors))


def copied(site):
    """Return a copy of a site in its present state, which shares its keys."""
    other = copy.copy(site)
    other.released = copy.deepcopy(site.released)
    other._sessions = {n: copy.copy(one) for n, one in site._sessions.items()}
    for one in other._sessions.values():
        one.held = dict(one.held)
    return other


def before_uploads(server):
    """Return a copy of an aggregation that has no vectors yet."""
    other = copy.copy(server)
    other._uploads, other._replies, other._total, other._closed = {}, {}, None, False
    other._latest = copy.copy(server._latest)
    return other


def random_vectors(count, length=5, seed=0):
    draws = np.random.default_rng(seed)
    return draws.integers(0, 2**64, size=(count, length), dtype=np.uint64)


def wrapped_sum(vectors, codes):
    return np.add.reduce(vectors[list(codes)], axis=0, dtype=np.uint64)
