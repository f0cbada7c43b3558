"""The Flower app of a site, for your own SuperNodes: Flower starts one process per request.

Start the node with ``--node-config 'data="oslo.csv" out="oslo"'``; ``name``, ``share-metrics``,
``adapt-only``, ``min-rows`` and ``blur`` are optional. ``fedgmm client`` does not use this module.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedgmm.federation.flower.records import from_records, to_records
from fedgmm.federation.messages import Message as SiteMessage
from fedgmm.federation.messages import reply_or_failure

app = ClientApp()


@app.query()
def reply(message: Message, context: Context) -> Message:
    """Reply to one request of the server."""
    from fedgmm.federation.settings import BLUR, MIN_ROWS, SiteSettings
    from fedgmm.federation.site import Site, SiteError

    def notify(line: str) -> None:
        print(line, flush=True)

    def handle() -> SiteMessage:
        config = context.node_config
        if "data" not in config or "out" not in config:
            raise SiteError(
                "the node was started without its settings; start it with "
                '--node-config \'data="oslo.csv" out="oslo"\'.'
            )
        settings = SiteSettings(
            data=tuple(Path(one) for one in str(config["data"]).split(";")),
            out=Path(str(config["out"])),
            name=str(config["name"]) if "name" in config else None,
            share_metrics=bool(config.get("share-metrics", False)),
            adapt_only=bool(config.get("adapt-only", False)),
            min_rows=int(config.get("min-rows", MIN_ROWS)),
            blur=float(config.get("blur", BLUR)),
            categorical=_texts(config.get("categorical")),
            no_header=bool(config.get("no-header", False)),
            names=_texts(config.get("names")),
            missing_values=_texts(config.get("missing-values")),
            date_format=str(config["date-format"]) if "date-format" in config else None,
        )
        return Site(settings, notify=notify).reply(from_records(message.content))

    return Message(to_records(reply_or_failure(handle, SiteError, notify)), reply_to=message)


def _texts(value: object) -> tuple[str, ...]:
    """Return texts that a node's configuration joins with semicolons."""
    return tuple(str(value).split(";")) if value is not None else ()
