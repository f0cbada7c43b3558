"""A site with a good key that lies in every round, each time otherwise, as a program.

Arguments: port, name, certificate of the authority. It takes part like ``fedgmm client``.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedgmm.federation.messages import Message
from fedgmm.federation.network.client import Connection, take_part
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.site import Site


def with_first(array, value):
    changed = array.copy()
    changed.flat[0] = value
    return changed


LIES = {
    "nan": ("counts", lambda a: with_first(a, np.nan)),
    "infinite": ("gaussians/second", lambda a: with_first(a, np.inf)),
    "negative": ("counts", lambda a: with_first(a, -1.0)),
    "above its rows": ("counts", lambda a: 10 * a),
    "shape": ("gaussians/first", lambda a: a[:, :-1].copy()),
    "dtype": ("gaussians/first", lambda a: a.astype("float32")),
    "not semidefinite": ("gaussians/second", lambda a: -a),
    "replayed": ("", None),
    "gigantic": ("counts", lambda a: np.zeros(400_000)),  # ends the connection
}


class Liar(Site):
    """Replies honestly in the first round, and never again."""

    first: Message | None = None

    def reply(self, request: Message) -> Message:
        reply = super().reply(request)
        if request.kind != "round":
            return reply
        self.first = self.first or reply
        number = request.facts["round"] - 2
        if not 0 <= number < len(LIES):
            return reply
        name, lie = list(LIES.values())[number]
        if lie is None:
            return self.first
        return replace(reply, arrays={**reply.arrays, name: lie(reply.arrays[name])})


def main() -> None:
    port, name, authority = sys.argv[1:4]
    site = Liar(SiteSettings((Path(f"{name}.csv"),), Path(name), min_rows=0, blur=0.0))
    connection = Connection(
        "127.0.0.1", int(port), Path(authority), Path(f"private/{name}.key").resolve()
    )
    take_part(site, connection, Path(name), notify=print)


if __name__ == "__main__":
    main()
