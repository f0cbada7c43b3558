"""Commands for a federation over several machines: server, client, keys."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedgmm.cli.options import EmbeddingOptions, FileOptions, given
from fedgmm.cli.output import JsonFlag, escaped, print_json, print_notes, screen, sidelines

if TYPE_CHECKING:
    from fedgmm.data.embed import Embedding
    from fedgmm.federation.network.certificates import Tls

_HOST, _PORT = "0.0.0.0", 9092
_LARGEST_LOG = 10_000_000
_FEDERATION = (
    "clients", "min_clients", "round_timeout", "min_rows", "max_share", "max_norm", "robust",
)  # fmt: skip

keys = typer.Typer(no_args_is_help=True, help="Key pairs of sites, and certificates for tests.")


def server(
    ctx: typer.Context,
    config: Annotated[Path, Option()],
    out: Annotated[Path, Option()],
    host: Annotated[
        str | None,
        Option(help=f"Address to listen on. Default: {_HOST}, or 127.0.0.1 with --insecure."),
    ] = None,
    port: Annotated[
        int | None, Option(min=1, max=65535, help=f"Port to listen on. Default: {_PORT}.")
    ] = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_ca: Path | None = None,
    keys_folder: Annotated[Path | None, Option("--keys")] = None,
    insecure: Annotated[bool, Option("--insecure")] = False,
    clients: Annotated[int | None, Option(min=1)] = None,
    min_clients: Annotated[int | None, Option(min=1)] = None,
    round_timeout: Annotated[float | None, Option(min=0.1)] = None,
    min_rows: Annotated[int | None, Option(min=0)] = None,
    max_share: Annotated[float | None, Option(min=0.0, max=1.0)] = None,
    max_norm: Annotated[float | None, Option(min=1.0)] = None,
    robust: str | None = None,
    serve: Annotated[bool, Option("--serve")] = False,
) -> None:
    """Run the server of a federation: wait for the sites, train, evaluate, report. Rows stay at the sites.

    Options that are not given are read from the sections [server] and [federation] of the config.

    Started again, the server resumes from its last checkpoint. After the last round, it gives the model
    to sites that join with --adapt-only.

    Example: fedgmm server --config federation.toml --out run --tls-cert server.crt --tls-key server.key
    --tls-ca ca.crt --keys keys

    Example: fedgmm server --config federation.toml --out run --host 127.0.0.1 --insecure

    Options:
        config: TOML file with the settings of the federation.
        out: The run folder; an interrupted run is resumed there.
        tls_cert: Certificate of the server (PEM).
        tls_key: Private key of the certificate (PEM).
        tls_ca: Certificate of the authority that signed it (PEM).
        keys_folder: Folder with the public keys (NAME.pub) of accepted sites.
        insecure: No encryption, and every site is accepted; only for tests.
        clients: Number of sites that are expected.
        min_clients: Smallest number of replies for a round. Default: one from every expected site.
        round_timeout: Seconds until a round closes without the missing sites, if --min-clients replied.
            Default: 60.
        min_rows: Sites withhold moments, learners and centroids of components in which they have fewer
            rows. Default: 0, because each site has its own number.
        max_share: Largest share of all rows that a site counts for. Default: three times the median
            site, from six sites on.
        max_norm: Sums per row that are more than this many times the median of the sites count less.
            Default: 3, and 10 with fewer than six sites.
        robust: none adds the sums of the sites; trimmed and centred take robust means of them. Default:
            none.
        serve: Continue after training and give the model to new sites.
    """
    with _imports_finish_first():
        from fedgmm.federation.network.server import ServerAddress, read_server_options, run_server
        from fedgmm.federation.server import check_start
        from fedgmm.federation.settings import read_settings

    settings = read_settings(config, **given(ctx.params, *_FEDERATION))
    files = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca, "keys": keys_folder}
    options = read_server_options(config, host=host, port=port, **files, insecure=insecure or None)
    plain = bool(options.get("insecure", False))
    address = ServerAddress(
        options.get("host", "127.0.0.1" if plain else _HOST),
        options.get("port", _PORT),
        _tls(options),
        options.get("keys"),
    )
    check_start(settings, out)
    with _sigterm_interrupts(), _log_lines(out) as notify:
        run_server(settings, out, address, serve=serve, notify=notify)


def client(
    ctx: typer.Context,
    server_address: Annotated[str, Option("--server")],
    data: Annotated[list[Path], Option()],
    out: Annotated[Path, Option()],
    name: str | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    insecure: Annotated[bool, Option("--insecure")] = False,
    share_metrics: Annotated[bool, Option("--share-metrics")] = False,
    adapt_only: Annotated[bool, Option("--adapt-only")] = False,
    min_rows: Annotated[int, Option(min=0)] = 5,
    blur: Annotated[float, Option(min=0.0, max=0.5)] = 0.1,
    categorical: list[str] | None = None,
    *,
    files: FileOptions,
    min_count: Annotated[int, Option(min=0)] = 5,
    labels: list[str] | None = None,
    max_rounds: Annotated[int | None, Option(min=1)] = None,
    max_epsilon: float | None = None,
    max_delta: float | None = None,
    peers: Path | None = None,
    min_sites: Annotated[int | None, Option(min=3)] = None,
    forget: Annotated[bool, Option("--forget")] = False,
    images: Annotated[bool, Option("--images")] = False,
    text: str | None = None,
    embedding: EmbeddingOptions,
) -> None:
    """Take part in a federation with the rows of this site. The rows stay here.

    Without --key and --ca, the client looks for NAME.key and ca.crt in the working folder and in --out.

    The client waits for the server, reconnects if necessary, and ends with the federation.

    Example: fedgmm client --server host:9092 --data oslo.csv --out oslo --key oslo.key --ca ca.crt

    Example: fedgmm client --server host:9092 --data images/ --images --weights resnet18.safetensors --out
    oslo --key oslo.key --ca ca.crt

    Example: fedgmm client --server host:9092 --data bergen.csv --out bergen --key bergen.key --ca ca.crt
    --adapt-only

    Options:
        server_address: host:port of the server; the host must be in its certificate.
        data: The site's file (CSV, TSV, Parquet, npz), or with --images its folder of images.
        out: The site's run folder.
        name: Name of the site. Default: name of the key, or of the file.
        key: The site's private key (NAME.key).
        ca: Certificate of the server's authority (ca.crt).
        insecure: No encryption; only for tests.
        share_metrics: Send the metrics of held-out rows to the server.
        adapt_only: Only learn this site's weights for the finished model; send nothing about rows.
        min_rows: Send nothing that stands for fewer rows than this. Default: 5; 0 switches it off.
        blur: Spread of the random weights of rows in each reply. Default: 0.1; 0 sends exact sums.
        categorical: Column whose texts are sent even if they look like names. May be repeated.
        min_count: Do not send categories and labels of fewer rows than this. Default: 5.
        labels: Label that is sent however few rows have it. May be repeated.
        max_rounds: Rounds that you allow. Default: those of the server's plan.
        max_epsilon: Limit of ε over all runs; runs without noise are refused, too.
        max_delta: Largest δ of a run. Default: 1e-5 with --max-epsilon, else that of the server's plan.
        peers: Folder with the other sites' public keys (NAME.pub), for secure aggregation. Without it,
            masks protect only against a server that follows the protocol.
        min_sites: Send sums only under masks, and only if this many sites are added up.
        forget: Forget the plan that this folder agreed to; agree to a new one.
        images: The data are images, which are embedded here first; see fedgmm embed.
        text: Column of texts of the tables.
    """
    with _imports_finish_first():
        from fedgmm.data.embed import Embedding
        from fedgmm.data.tables.columns import FileFormat
        from fedgmm.data.tables.files import client_name
        from fedgmm.federation.network.client import (
            Connection,
            check_authority,
            read_address,
            take_part,
        )
        from fedgmm.federation.network.keys import check_private_key
        from fedgmm.federation.settings import SiteSettings
        from fedgmm.federation.site import Site
        from fedgmm.federation.site_table import SiteTable

    host, port = read_address(server_address)
    if insecure and (ca is not None or key is not None):
        raise typer.BadParameter("--insecure cannot be combined with --ca or --key.")
    if not insecure:
        own = name or client_name(data[0])
        key = key or _find_file(f"{own}.key", out)
        ca = ca or _find_file("ca.crt", out)
        if ca is None or key is None:
            raise typer.BadParameter(
                "Give --ca ca.crt, which comes from the server, and --key NAME.key, which fedgmm keys new "
                "NAME makes; or --insecure for tests."
            )
        check_authority(ca)
        name = name or check_private_key(key).name
    connection = Connection(
        host, port, ca.resolve() if ca else None, key.resolve() if key else None
    )
    written = files.given()
    vectors = embedding.given(text, images)
    encoded_by = Embedding(**vectors) if vectors else None
    if encoded_by is not None:
        data = _embedded(data, encoded_by, out)
    # errors in the data come before any other file is written
    SiteTable.found(tuple(data), name, lambda _: None, FileFormat(**written))
    settings = SiteSettings(
        tuple(data),
        out,
        name,
        share_metrics,
        adapt_only,
        min_rows,
        tuple(categorical or ()),
        **written,
        **given(
            ctx.params, "min_count", "max_rounds", "forget", "blur", "max_epsilon", "max_delta"
        ),
        min_sites=min_sites,
        peers=peers,
        labels=tuple(labels or ()),
        key=connection.key,
        embedding=encoded_by,
    )
    with _sigterm_interrupts(), _log_lines(out) as notify:
        take_part(Site(settings, notify=notify), connection, out, notify=notify)


def _embedded(sources: list[Path], embedding: Embedding, out: Path) -> list[Path]:
    """Embed the site's images or texts; return the tables of vectors, which are kept in its folder."""
    from fedgmm.runs.folder import RunFolder

    folder, console = RunFolder(out), sidelines()

    def show(site: str, done: int, total: int) -> None:
        console.print(f"embedding {escaped(site)}: {done} of {total}")

    with folder.lock():
        found = embedding.sites(sources, folder.vectors, show)
    print_notes([note for site in found for note in site.notes])
    return [site.path for site in found]


def audit(
    site: Path,
    as_json: JsonFlag = False,
) -> None:
    """Show every request that a site received, and what left with the reply.

    Example: fedgmm audit oslo/

    Options:
        site: The folder of a site (--out of fedgmm client).
    """
    from rich.table import Table

    from fedgmm.federation.policy import read_record

    entries = list(read_record(site))
    if as_json:
        print_json(entries)
        return
    table = Table(title=f"Requests to {escaped(site)}", title_justify="left")
    for name in (
        "time (UTC)",
        "request",
        "bytes sent",
        "numbers sent",
        "texts sent, or why refused",
    ):
        table.add_column(name, justify="right" if name.startswith("bytes") else "left")
    for one in entries:
        arrays = ", ".join(f"{n} {'×'.join(map(str, s))}" for n, s in one.get("arrays", {}).items())
        texts = {**one.get("texts", {}), **({"labels": one["labels"]} if "labels" in one else {})}
        words = "; ".join(f"{name}: {', '.join(found)}" for name, found in texts.items())
        number = f" {one['round']}" if "round" in one else ""
        table.add_row(
            one["time"][:19].replace("T", " "),
            f"{one['request']}{number}",
            str(one.get("bytes", "")),
            escaped(arrays),
            escaped(f"refused: {one['refused']}" if "refused" in one else words),
        )
    screen().print(table)


def ledger(
    folder: Path,
    delta: float = 1e-5,
    as_json: JsonFlag = False,
) -> None:
    """Show the privacy that all releases about a table have spent, over all runs.

    A damaged or shortened ledger, or an older copy, is refused.

    Example: fedgmm ledger oslo/

    Options:
        folder: The folder of a site or of a private run.
        delta: The δ at which ε is computed; below 1 / number of rows.
    """
    from dataclasses import asdict

    from rich.table import Table

    from fedgmm.privacy.ledger import Ledger, accounts

    found = accounts(Ledger.found(folder).entries(), delta)
    if as_json:
        print_json([{**asdict(one), "delta": delta} for one in found])
        return
    table = Table(title=f"Privacy spent in {escaped(folder)} (δ = {delta:g})", title_justify="left")
    for name in ("table", "unit", "runs", "releases", "ε"):
        table.add_column(name, justify="left" if name in ("table", "unit") else "right")
    for one in found:
        name = "all tables" if one.table is None else one.table[:12]
        table.add_row(
            escaped(name), one.unit, str(one.runs), str(one.releases), f"{one.epsilon:.3g}"
        )
    screen().print(table)


@keys.command("new")
def new_key(
    name: Annotated[str, Argument(help="Name of the site.")],
    out: Annotated[Path, Option(help="Folder for the two files.")] = Path(),
) -> None:
    """Make a key pair: NAME.key stays at the site, NAME.pub goes to the operator of the server.

    Example: fedgmm keys new oslo
    """
    from fedgmm.federation.network.keys import check_private_key, new_pair

    private, public = new_pair(name, out)
    typer.echo(f"{private}: keep it secret, on this machine.")
    typer.echo(f"{public}: send it to the operator of the server, for the folder --keys.")
    typer.echo(f"Fingerprint, to compare over the phone: {check_private_key(private).fingerprint}")


@keys.command("list")
def list_keys(
    folder: Annotated[Path, Argument(help="Folder with public keys.")] = Path(),
) -> None:
    """List the public keys of a folder, which the server would accept."""
    from fedgmm.federation.network.keys import read_public_keys

    for key in read_public_keys(folder):
        typer.echo(f"{key.fingerprint}  {key.name}")


@keys.command("certificate")
def certificate(
    host: Annotated[list[str], Option(help="Name or address of the server. May be repeated.")],
    out: Annotated[Path, Option(help="Folder for the three files.")] = Path(),
    days: Annotated[int, Option(min=1, max=3650, help="Days until it expires.")] = 365,
) -> None:
    """Make a certificate for tests and the authority that signs it; see docs/deployment.md.

    Example: fedgmm keys certificate --host localhost --host 127.0.0.1 --out certificates
    """
    from fedgmm.federation.network.certificates import trial_certificates

    files = trial_certificates(host, out, days)
    typer.echo(f"{files.certificate}, {files.key}: for the server (--tls-cert, --tls-key).")
    typer.echo(f"{files.authority}: for the server (--tls-ca) and every client (--ca).")


def _find_file(name: str, out: Path) -> Path | None:
    """Return a file of the working folder or of the site's folder."""
    return next((path for path in (Path(name), out / name) if path.is_file()), None)


def _tls(options: Mapping[str, Any]) -> Tls | None:
    """Return the TLS files of the server; ``None`` with ``--insecure``."""
    from fedgmm.federation.network.certificates import Tls

    files = [options[one] for one in ("tls_cert", "tls_key", "tls_ca") if one in options]
    if options.get("insecure"):
        if files or "keys" in options:
            raise typer.BadParameter(
                "--insecure cannot be combined with --tls-cert, --tls-key, --tls-ca or --keys, because "
                "keys need TLS."
            )
        return None
    if len(files) < 3:
        raise typer.BadParameter(
            "Give --tls-cert, --tls-key and --tls-ca (for tests, make them with fedgmm keys "
            "certificate), or --insecure to run without TLS."
        )
    return Tls(*files)


@contextmanager
def _imports_finish_first() -> Iterator[None]:
    """Delay Ctrl-C until the imports are done, because some libraries crash if it interrupts theirs."""
    interrupted = False

    def remember(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    if threading.current_thread() is not threading.main_thread():  # it alone handles signals
        yield
        return
    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that child processes are ended, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _log_lines(out: Path) -> Iterator[Callable[[str], None]]:
    """Log lines with the time, to standard error and to ``federation.log``, which is rotated."""
    import logging
    from datetime import datetime
    from logging.handlers import RotatingFileHandler

    from fedgmm.federation.messages import one_line
    from fedgmm.files import private_folder

    console = sidelines()
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder.")
    private_folder(out)
    path = out / "federation.log"
    handler = RotatingFileHandler(path, maxBytes=_LARGEST_LOG, backupCount=1, encoding="utf-8")

    def notify(line: str) -> None:
        now, line = datetime.now(), one_line(line)  # parts of a line come from other machines
        console.print(f"[dim]{now:%H:%M:%S}[/] {escaped(line)}", soft_wrap=True, highlight=False)
        handler.emit(logging.makeLogRecord({"msg": f"{now:%Y-%m-%d %H:%M:%S} {line}"}))

    try:
        yield notify
    finally:
        handler.close()
