"""Commands for a federation over several machines: server, client, keys."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedgmm.cli.embedding import (
    Download,
    EncoderName,
    ImageColumn,
    Size,
    TextColumn,
    Weights,
    embedding_options,
)
from fedgmm.cli.output import JsonFlag, escaped, print_json, print_notes, screen, sidelines
from fedgmm.cli.runs import DateFormat, MissingValues, Names, NoHeader, file_options

if TYPE_CHECKING:
    from fedgmm.data.embed import Embedding
    from fedgmm.federation.network.certificates import Tls

_HOST, _PORT = "0.0.0.0", 9092
_LARGEST_LOG = 10_000_000

keys = typer.Typer(no_args_is_help=True, help="Key pairs of sites, and certificates for tests.")


def server(
    config: Annotated[Path, Option(help="TOML file with the settings of the federation.")],
    out: Annotated[Path, Option(help="The run folder; an interrupted run is resumed there.")],
    host: Annotated[
        str | None,
        Option(help=f"Address to listen on. Default: {_HOST}, or 127.0.0.1 with --insecure."),
    ] = None,
    port: Annotated[
        int | None, Option(min=1, max=65535, help=f"Port to listen on. Default: {_PORT}.")
    ] = None,
    tls_cert: Annotated[Path | None, Option(help="Certificate of the server (PEM).")] = None,
    tls_key: Annotated[Path | None, Option(help="Private key of the certificate (PEM).")] = None,
    tls_ca: Annotated[
        Path | None, Option(help="Certificate of the authority that signed it (PEM).")
    ] = None,
    keys_folder: Annotated[
        Path | None,
        Option("--keys", help="Folder with the public keys (NAME.pub) of accepted sites."),
    ] = None,
    insecure: Annotated[
        bool,
        Option("--insecure", help="No encryption, and every site is accepted; only for tests."),
    ] = False,
    clients: Annotated[int | None, Option(min=1, help="Number of sites that are expected.")] = None,
    min_clients: Annotated[
        int | None, Option(min=1, help="Fewest sites that a round closes with. Default: all.")
    ] = None,
    round_timeout: Annotated[
        float | None,
        Option(
            min=0.1,
            help="Seconds until a round closes without missing sites, if --min-clients replied.",
        ),
    ] = None,
    min_rows: Annotated[
        int | None,
        Option(
            min=0, help="Sites withhold moments, learners and centroids of fewer rows than this."
        ),
    ] = None,
    max_share: Annotated[
        float | None,
        Option(
            min=0.0,
            max=1.0,
            help="Largest share of all rows that a site counts for. Default: three times the median site.",
        ),
    ] = None,
    max_norm: Annotated[
        float | None,
        Option(
            min=1.0,
            help="Sums per row that are more than this many times the median of the sites count less. "
            "Default: 3, and 10 with fewer than six sites.",
        ),
    ] = None,
    robust: Annotated[
        str | None,
        Option(
            help="none adds the sums of the sites; trimmed and centred take robust means of them. Default: "
            "none."
        ),
    ] = None,
    serve: Annotated[
        bool, Option("--serve", help="Continue after training and give the model to new sites.")
    ] = False,
) -> None:
    """Run the server of a federation: wait for the sites, train, evaluate, report. Rows stay at the sites.

    Options that are not given are read from the section [server] of the config.

    Started again, the server resumes from its last checkpoint. After the last round, it gives the model
    to sites that join with --adapt-only.

    Example: fedgmm server --config federation.toml --out run --tls-cert server.crt --tls-key server.key
    --tls-ca ca.crt --keys keys

    Example: fedgmm server --config federation.toml --out run --host 127.0.0.1 --insecure
    """
    with _imports_finish_first():
        from fedgmm.federation.network.server import ServerAddress, read_server_options, run_server
        from fedgmm.federation.server import check_start
        from fedgmm.federation.settings import read_settings

    settings = read_settings(
        config,
        clients=clients,
        min_clients=min_clients,
        round_timeout=round_timeout,
        min_rows=min_rows,
        max_share=max_share,
        max_norm=max_norm,
        robust=robust,
    )
    options = read_server_options(
        config,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        keys=keys_folder,
        insecure=insecure or None,
    )
    plain = bool(options.get("insecure", False))
    address = ServerAddress(
        options.get("host", "127.0.0.1" if plain else _HOST),
        options.get("port", _PORT),
        _tls(
            options.get("tls_cert"),
            options.get("tls_key"),
            options.get("tls_ca"),
            options.get("keys"),
            plain,
        ),
        options.get("keys"),
    )
    check_start(settings, out)
    with _sigterm_interrupts(), _log_lines(out) as notify:
        run_server(settings, out, address, serve=serve, notify=notify)


def client(
    server_address: Annotated[
        str,
        Option("--server", help="host:port of the server; the host must be in its certificate."),
    ],
    data: Annotated[
        list[Path],
        Option(
            help="The site's file (CSV, TSV, Parquet, npz), or with --images its folder of images."
        ),
    ],
    out: Annotated[Path, Option(help="The site's run folder.")],
    name: Annotated[
        str | None, Option(help="Name of the site. Default: name of the key, or of the file.")
    ] = None,
    key: Annotated[Path | None, Option(help="The site's private key (NAME.key).")] = None,
    ca: Annotated[
        Path | None, Option(help="Certificate of the server's authority (ca.crt).")
    ] = None,
    insecure: Annotated[bool, Option("--insecure", help="No encryption; only for tests.")] = False,
    share_metrics: Annotated[
        bool, Option("--share-metrics", help="Send the metrics of held-out rows to the server.")
    ] = False,
    adapt_only: Annotated[
        bool,
        Option(
            "--adapt-only",
            help="Only learn this site's weights for the finished model; send nothing about rows.",
        ),
    ] = False,
    min_rows: Annotated[
        int,
        Option(
            min=0,
            help="Send nothing that stands for fewer rows than this. Default: 5; 0 switches it off.",
        ),
    ] = 5,
    blur: Annotated[
        float,
        Option(
            min=0.0,
            max=0.5,
            help="Spread of the random weights of rows in each reply. Default: 0.1; 0 sends exact sums.",
        ),
    ] = 0.1,
    categorical: Annotated[
        list[str] | None,
        Option(help="Column whose texts are sent even if they look like names. May be repeated."),
    ] = None,
    no_header: NoHeader = False,
    names: Names = None,
    missing_values: MissingValues = None,
    date_format: DateFormat = None,
    min_count: Annotated[
        int,
        Option(
            min=0, help="Do not send categories and labels of fewer rows than this. Default: 5."
        ),
    ] = 5,
    labels: Annotated[
        list[str] | None,
        Option(help="Label that is sent however few rows have it. May be repeated."),
    ] = None,
    max_rounds: Annotated[
        int | None,
        Option(min=1, help="Rounds that you allow. Default: those of the server's plan."),
    ] = None,
    max_epsilon: Annotated[
        float | None, Option(help="Limit of ε over all runs; runs without noise are refused, too.")
    ] = None,
    max_delta: Annotated[
        float | None,
        Option(
            help="Largest δ of a run. Default: 1e-5 with --max-epsilon, else that of the server's plan."
        ),
    ] = None,
    peers: Annotated[
        Path | None,
        Option(
            help="Folder with the other sites' public keys (NAME.pub), for secure aggregation. Without "
            "it, masks protect only against a server that follows the protocol."
        ),
    ] = None,
    min_sites: Annotated[
        int | None,
        Option(min=3, help="Send sums only under masks, and only if this many sites are added up."),
    ] = None,
    forget: Annotated[
        bool,
        Option("--forget", help="Forget the plan that this folder agreed to; agree to a new one."),
    ] = False,
    images: Annotated[
        bool,
        Option(
            "--images", help="The data are images, which are embedded here first; see fedgmm embed."
        ),
    ] = False,
    text: TextColumn = None,
    encoder: EncoderName = None,
    image_column: ImageColumn = None,
    weights: Weights = None,
    size: Size = None,
    download: Download = False,
) -> None:
    """Take part in a federation with the rows of this site. The rows stay here.

    A key NAME.key and a certificate ca.crt are found in the working folder and in --out.

    The client waits for the server, reconnects if necessary, and ends with the federation.

    Example: fedgmm client --server host:9092 --data oslo.csv --out oslo --key oslo.key --ca ca.crt

    Example: fedgmm client --server host:9092 --data images/ --images --weights resnet18.safetensors --out
    oslo --key oslo.key --ca ca.crt

    Example: fedgmm client --server host:9092 --data bergen.csv --out bergen --key bergen.key --ca ca.crt
    --adapt-only
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
    written = file_options(no_header, names, missing_values, date_format, None)
    given = embedding_options(images, text, encoder, image_column, weights, size, download)
    embedding = None if given is None else Embedding(**given)
    if embedding is not None:
        data = _embedded(data, embedding, out)
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
        min_count=min_count,
        labels=tuple(labels or ()),
        max_rounds=max_rounds,
        forget=forget,
        blur=blur,
        key=connection.key,
        max_epsilon=max_epsilon,
        max_delta=max_delta,
        peers=peers,
        min_sites=min_sites,
        embedding=embedding,
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
    print_notes([f"{site.name}: skipped {line}." for site in found for line in site.skipped])
    return [site.path for site in found]


def audit(
    site: Annotated[Path, Argument(help="The folder of a site (--out of fedgmm client).")],
    as_json: JsonFlag = False,
) -> None:
    """Show every request that a site received, and what left with the reply.

    Example: fedgmm audit oslo/
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
    folder: Annotated[Path, Argument(help="The folder of a site or of a private run.")],
    delta: Annotated[
        float, Option(help="The δ at which ε is computed; below 1 / number of rows.")
    ] = 1e-5,
    as_json: JsonFlag = False,
) -> None:
    """Show the privacy that all releases about a table have spent, over all runs.

    A damaged or shortened ledger, or an older copy, is refused.

    Example: fedgmm ledger oslo/
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


def _tls(
    certificate: Path | None,
    key: Path | None,
    authority: Path | None,
    keys_folder: Path | None,
    insecure: bool,
) -> Tls | None:
    """Return the TLS files of the server; ``None`` with ``--insecure``."""
    from fedgmm.federation.network.certificates import Tls

    given = [one for one in (certificate, key, authority) if one is not None]
    if insecure:
        if given or keys_folder is not None:
            raise typer.BadParameter(
                "--insecure cannot be combined with --tls-cert, --tls-key, --tls-ca or --keys, because "
                "keys need TLS."
            )
        return None
    if certificate is None or key is None or authority is None:
        raise typer.BadParameter(
            "Give --tls-cert, --tls-key and --tls-ca (for tests, make them with fedgmm keys "
            "certificate), or --insecure to run without TLS."
        )
    return Tls(certificate, key, authority)


@contextmanager
def _imports_finish_first() -> Iterator[None]:
    """Delay Ctrl-C until the imports are done, because some libraries crash if it interrupts theirs."""
    interrupted = False

    def remember(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only the main thread handles signals
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
