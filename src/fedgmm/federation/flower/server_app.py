"""The Flower app of the server, for your own SuperLink; start it with ``flwr run``."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the nodes of the grid, or send them the finished model."""
    from fedgmm.federation.flower.sites import FlowerSites
    from fedgmm.federation.server import run_or_serve
    from fedgmm.federation.settings import read_settings

    def notify(line: str) -> None:
        print(line, flush=True)

    config = context.run_config
    if not config.get("config") or not config.get("out"):
        raise ValueError(
            'The settings are missing; use flwr run … -c \'config="federation.toml" out="run"\'.'
        )
    settings = read_settings(Path(str(config["config"])))
    sites = FlowerSites(grid, limit_bytes=settings.largest_message, notify=notify)
    run_or_serve(
        settings, sites, Path(str(config["out"])), bool(config.get("serve")), notify=notify
    )
