"""A federation in one process: sites that reply at once, die, come back, or lie."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.federation.messages import Failure, Message
from fedgmm.federation.server import run_federation
from fedgmm.federation.settings import FederationSettings, SiteSettings
from fedgmm.federation.site import Site, SiteError
from fedgmm.federation.site_table import SiteTable
from fedgmm.files import private_folder
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.runs.config import FEDERATION, RunConfig


class Killed(BaseException):
    """The server died here."""


class InMemorySites:
    """Nodes are numbered; every request meets a new :class:`Site`, as after a restart.

    New sites share the rows of a table as long as its file is the same, because reading it again for
    every request would take most of the time of these tests. Folders are not locked, because no other
    process uses those of a test.

    Attributes:
        down: names of sites that are connected but do not reply.
        gone: names of sites that are not connected.
        dead: nodes that do not reply.
        tamper: called with a site's name, the request and the reply; returns the reply.
        before_ask, after_ask: called with the number of the exchange and its requests.
        asked: kinds of the requests of every exchange.
    """

    def __init__(self, files, home, *, fresh=True, **settings):
        self.home = Path(home)
        self.settings = {}
        for number, path in enumerate(files):
            self.add(path, node=f"node-{number}", **settings)
        self.fresh = fresh
        self.sites, self.tables = {}, {}
        self.down, self.gone, self.dead = set(), set(), set()
        self.tamper = lambda name, request, reply: reply
        self.before_ask = lambda number, requests: None
        self.after_ask = lambda number, requests: None
        self.asked = []
        self.lines = {}

    def add(self, path, node=None, **settings):
        node = node or f"node-{len(self.settings)}"
        name = settings.get("name") or Path(path).stem
        out = settings.pop("out", self.home / "sites" / name)
        # exact sums and all labels, so that results can be compared with those of one process
        exact = {"min_rows": 0, "blur": 0.0, "labels": ("ill", "well")}
        self.settings[node] = SiteSettings((Path(path),), out, **{**exact, **settings})
        return node

    def name_of(self, node):
        own = self.settings[node]
        return own.name or own.data[0].stem

    def site(self, node):
        if self.fresh or node not in self.sites:
            lines = self.lines.setdefault(self.name_of(node), [])
            with patch.object(SiteTable, "found", partial(self._table, node, SiteTable.found)):
                site = self.sites[node] = Site(self.settings[node], notify=lines.append)
            private_folder(site.settings.out)
            site._folder.run.lock = nullcontext
        return self.sites[node]

    def _table(self, node, found, data, *arguments):
        """The table that the site had before a restart if its file is the same, or else a new one."""
        unchanged = (node, *((path, path.stat().st_mtime_ns, path.stat().st_size) for path in data))
        if unchanged not in self.tables:
            self.tables[unchanged] = found(data, *arguments)
        return self.tables[unchanged]

    def nodes(self):
        return [node for node in self.settings if self.name_of(node) not in self.gone]

    def ask(self, requests, timeout):
        self.asked.append([request.kind for request in requests.values()])
        self.before_ask(len(self.asked), requests)
        for node, request in requests.items():
            if node not in self.settings or node in self.dead:
                yield node, Failure("the node is gone")
                continue
            name = self.name_of(node)
            if name in self.down or name in self.gone:
                yield node, Failure(f"no reply within {timeout:g} s")
                continue
            try:
                reply = self.site(node).reply(request)
            except SiteError as error:
                yield node, Failure(f"the client reports: {error}")
                continue
            yield node, self.tamper(name, request, reply)
        self.after_ask(len(self.asked), requests)


def federation_settings(clients, label="state", **options):
    """Settings of a small federation; unknown options are those of the training."""
    given = {name: options.pop(name) for name in {*FEDERATION, "privacy"} & options.keys()}
    table = TableOptions(label, seed=options.get("seed", 0), **options.pop("table", {}))
    given = {"round_timeout": 5.0, "start_timeout": 5.0, **given}
    return FederationSettings(RunConfig((), table, options), clients, **given)


def federate(files, home, *, sites=None, fresh=False, notify=None, **options):
    """Run a federation of some files; return the transport and the lines of the log.

    Without given ``sites``, each site lives for the whole run, unless all requests meet ``fresh`` ones.
    """
    sites = sites or InMemorySites(files, home, fresh=fresh)
    lines = []
    run_federation(
        federation_settings(len(sites.settings), **options),
        sites,
        Path(home) / "server",
        notify=notify or lines.append,
    )
    return sites, lines


def mixture_at_hand(files, label, rounds):
    """Three shared Gaussians of some files after so many rounds, by the method's two steps alone."""
    dataset, _, _ = load_federation(files, TableOptions(label))
    rows, method = dataset.train.features, FederatedGMM(3, reg_covar=1e-2)
    shared = method.start(rows, "kmeans", 0)
    personal = shared.weights.expand(len(rows.names), -1)
    for number in range(1, rounds + 1):
        personal, sums = method.client_step(shared, personal, rows, number)
        shared, _ = method.server_step(shared, sums)
    return shared


def with_arrays(reply, **arrays):
    """An reply with some arrays replaced."""
    named = {name.replace("__", "/"): value for name, value in arrays.items()}
    return Message(reply.kind, {**reply.arrays, **named}, reply.facts)


def with_facts(reply, **facts):
    """An reply with some facts replaced."""
    return replace(reply, facts={**reply.facts, **facts})
