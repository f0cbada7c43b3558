"""The Flower app at a site, for people who run their own SuperNodes: one question, one process.

The node is started with ``--node-config 'data="oslo.csv" out="oslo"'``; ``name``, ``share-metrics``
and ``min-rows`` may be said too. ``fedgmm client`` does not use it.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedgmm.federation.flower.records import answer_records
from fedgmm.federation.messages import Message as Question

app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer one question of the server."""
    from fedgmm.federation.settings import SiteSettings
    from fedgmm.federation.site import Site, SiteError

    def notify(line: str) -> None:
        print(line, flush=True)

    def answered(question: Question) -> Question:
        config = context.node_config
        if "data" not in config or "out" not in config:
            raise SiteError(
                "the node was started without its settings; say "
                '--node-config \'data="oslo.csv" out="oslo"\'.'
            )
        settings = SiteSettings(
            data=tuple(Path(one) for one in str(config["data"]).split(";")),
            out=Path(str(config["out"])),
            name=str(config["name"]) if "name" in config else None,
            share_metrics=bool(config.get("share-metrics", False)),
            adapt_only=bool(config.get("adapt-only", False)),
            min_rows=int(config.get("min-rows", 0)),
        )
        return Site(settings, notify=notify).reply(question)

    return Message(answer_records(answered, message.content, SiteError, notify), reply_to=message)
