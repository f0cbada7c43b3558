"""CPU time and bytes of one masked aggregation, without a network.

A round is ``masked`` and ``unmask``, with the keys and shares of the next round beside them, as in a
federation. The client's time is the median over sites, the server's is the whole aggregation. The sum is
compared with the exact one.

    python benchmarks/privacy.py            # 10, 100 and 1000 sites, 5,000 numbers
    python benchmarks/privacy.py --quick    # 10 sites, a second
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgmm.privacy.mask_server import Aggregation
from fedgmm.privacy.masks import MaskedSite, Roster
from fedgmm.privacy.site_sets import graph_sizes


@dataclass(frozen=True)
class Measured:
    sites: int
    dropped: int
    numbers: int
    neighbours: int
    threshold: int
    client_ms: float
    server_ms: float
    extra_upload: int  # bytes per site and round beside its vector
    extra_download: int


class Clocks:
    """CPU seconds of each site and of the server."""

    def __init__(self) -> None:
        self.spent: dict[int, float] = {}

    def run(self, who: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do some work, and add its time to that of a site or of the server."""
        started = time.process_time()
        found = work(*arguments)
        self.spent[who] = self.spent.get(who, 0.0) + time.process_time() - started
        return found


SERVER = -1


def measure(count: int, dropped: int, numbers: int) -> Measured:
    """Run two aggregations, and measure the second with the keys and shares of the third."""
    sites = [MaskedSite(f"site {u:04}", "run", min_change=1) for u in range(count)]
    roster = Roster(tuple(s.name for s in sites), np.stack([s.identity for s in sites]))
    for site in sites:
        site.join(roster)
    vectors = np.random.default_rng(0).integers(0, 2**64, (count, numbers), dtype=np.uint64)
    clocks = Clocks()
    server = keys_and_shares(clocks, sites, roster, 0)  # also warms the channels between sites
    clocks.spent.clear()
    up = down = 0
    for u in range(count - dropped):
        bundles = clocks.run(SERVER, server.bundles_for, u)
        made = clocks.run(u, sites[u].mask, 0, "round", *bundles, vectors[u])
        clocks.run(SERVER, server.add_masked, u, *made)
        up, down = made[1].nbytes, sum(one.nbytes for one in bundles)
    keys_and_shares(clocks, sites[: count - dropped], roster, 1)
    for u in server.survivors:
        named = clocks.run(SERVER, server.survivors_for, u)
        reply = clocks.run(u, sites[u].unmask, 0, *named)
        clocks.run(SERVER, server.add_unmask, u, reply)
    total = clocks.run(SERVER, server.open)
    exact = np.add.reduce(vectors[: count - dropped], axis=0, dtype=np.uint64)
    assert np.array_equal(total, exact), "the sum is wrong"
    k, threshold = graph_sizes(count)
    up += sum(one.nbytes for one in reply.values()) + 96 + 115 * k
    down += sum(one.nbytes for one in named) + 96 * k
    server_ms = 1e3 * clocks.spent.pop(SERVER)
    client_ms = 1e3 * statistics.median(clocks.spent.values())
    return Measured(count, dropped, numbers, k, threshold, client_ms, server_ms, up, down)


def keys_and_shares(
    clocks: Clocks, sites: list[MaskedSite], roster: Roster, number: int
) -> Aggregation:
    adverts = {u: clocks.run(u, site.advertise, number) for u, site in enumerate(sites)}
    made: Aggregation = clocks.run(
        SERVER, lambda: Aggregation("run", number, roster, adverts, purpose="round")
    )
    for u, site in enumerate(sites):
        bundles = clocks.run(u, site.share, number, *clocks.run(SERVER, made.keys_for, u))
        clocks.run(SERVER, made.add_bundles, u, bundles)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--numbers", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [10] if options.quick else [10, 100, 1000]
    print("numbers  sites  dropped   k    t  client ms  server ms  extra up  extra down")
    found = []
    for count in counts:
        for dropped in (0, count // 10):
            one = measure(count, dropped, options.numbers)
            found.append(asdict(one))
            print(
                f"{one.numbers:7}  {one.sites:5}  {one.dropped:7}  {one.neighbours:3} {one.threshold:4}"
                f"  {one.client_ms:9.1f}  {one.server_ms:9.1f}  {one.extra_upload / 1e3:5.1f} kB"
                f"  {one.extra_download / 1e3:7.1f} kB",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
