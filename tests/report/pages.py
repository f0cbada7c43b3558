"""Contents for the tests of the page: small ones, and ones with hostile names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedgmm.data.dataset import FederatedDataset
from fedgmm.report.contents import AdaptationRecord
from fedgmm.report.gathering import gather
from fedgmm.training.in_process import train

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><b>",
    "<!-- Rome & Oslo \u2028 'quoted' \"twice\"",
    "<a href='https://evil.example/x'>Bonn</a>",
    "%{y} ${name}",
)


def named_clients(names, rows=40, columns=3, seed=0):
    """Return clients with two clusters of inputs and one rule for the labels in each cluster."""
    rng = np.random.default_rng(seed)
    clients = {}
    for number, name in enumerate(names):
        kind = rng.random(rows) < (number + 1) / (len(names) + 1)
        x = rng.normal(size=(rows, columns)) + 3.0 * kind[:, None]
        clients[name] = (x, ((x[:, 0] > 3.0 * kind) ^ kind).astype(int))
    return FederatedDataset.from_clients(clients)


def contents_of(dataset, algorithm="fedgmm", baselines=(), **options):
    """Train a few rounds and return the contents of the report."""
    settings = {"rounds": 3, "components": 2, "learners": 2}
    model = train(dataset, algorithm, **settings)
    others = {name: train(dataset, name, **settings).evaluate("test") for name in baselines}
    given = {
        "title": "A small run",
        "history": model.history,
        "configuration": model.options,
        "baselines": others,
    }
    return gather(model, dataset, **(given | options))


def hostile_contents():
    """Return contents in which every text of a user is hostile."""
    dataset = named_clients([*HOSTILE, "client 2", "client 10"])
    contents = contents_of(
        dataset,
        title=HOSTILE[0],
        configuration={HOSTILE[1]: HOSTILE[0], "nested": {"key": HOSTILE[2]}},
        feature_names=[HOSTILE[0], HOSTILE[1], HOSTILE[3]],
        columns={HOSTILE[0]: [0], HOSTILE[3]: [1, 2]},
        notes=[HOSTILE[0], HOSTILE[2]],
        adaptations=[AdaptationRecord(HOSTILE[1], [0, 5, 9], [0.5, 0.6, 0.7], [-3.0, -2.0], True)],
    )
    return replace(contents, baselines={HOSTILE[0]: np.full(len(dataset.names), 0.5)})
