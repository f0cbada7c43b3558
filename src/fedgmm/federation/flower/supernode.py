"""Flower's SuperNode as a child of ``fedgmm client``; run with ``python -m``.

The arguments are those of ``flower-supernode``. What differs: it ends with its parent, it looks for
questions more often than every 3 s while there are any, and its absence is noticed sooner.
"""

from __future__ import annotations

import os
import signal
import time

from fedgmm.federation.flower.pace import fetch_sooner, look_sooner
from fedgmm.federation.flower.processes import end_with_parent


def main() -> None:
    """Run the SuperNode until the parent ends."""
    from flwr.supernode.cli import flower_supernode

    look_sooner()
    fetch_sooner()
    end_with_parent(_leave)
    flower_supernode()


def _leave() -> None:
    """Say goodbye to the server, if it is there, before the end."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3.0)


if __name__ == "__main__":
    main()
