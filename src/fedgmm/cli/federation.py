"""Commands of a federation over several machines: server, client, keys."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgmm.cli.output import escaped, sidelines

if TYPE_CHECKING:
    from fedgmm.federation.flower.certificates import Tls

_HOST, _PORT = "0.0.0.0", 9092

keys = typer.Typer(
    no_args_is_help=True, help="Key pairs of sites, and certificates to try out with."
)


def server(
    config: Annotated[Path, typer.Option(help="TOML file: what is trained, and with whom.")],
    out: Annotated[Path, typer.Option(help="The run folder; an interrupted run goes on there.")],
    host: Annotated[
        str | None, typer.Option(help=f"Address to listen on; {_HOST} by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help=f"Port to listen on; {_PORT} by default.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the server (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Certificate of who signed it.")] = None,
    keys_folder: Annotated[
        Path | None,
        typer.Option("--keys", help="Folder with the public keys (NAME.pub) of the sites let in."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text, every site is let in: to try out.")
    ] = False,
    clients: Annotated[int | None, typer.Option(min=1, help="Sites that are expected.")] = None,
    min_clients: Annotated[
        int | None,
        typer.Option(min=1, help="A round closes with at least so many; all by default."),
    ] = None,
    round_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds until a round closes without the rest.")
    ] = None,
    min_rows: Annotated[
        int | None,
        typer.Option(min=0, help="Moments of components with fewer rows at a site are withheld."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Hand out the model when the training is over, too.")
    ] = False,
) -> None:
    """Run a federation: wait for the sites, train, evaluate, report. Rows never come here.

    What is not given here is looked up in the config's section [server].

    Started again, it goes on from its last checkpoint; after the end, it hands the model to sites that
    join with --adapt-only.

    Example: fedgmm server --config federation.toml --out run --tls-cert server.crt --tls-key server.key
    --tls-ca ca.crt --keys keys

    Example: fedgmm server --config federation.toml --out run --host 127.0.0.1 --insecure
    """
    _need_flower()
    with _unbroken():
        from fedgmm.federation.flower.server import Doors, read_doors, run_server
        from fedgmm.federation.server import check_start
        from fedgmm.federation.settings import read_settings

    settings = read_settings(
        config,
        clients=clients,
        min_clients=min_clients,
        round_timeout=round_timeout,
        min_rows=min_rows,
    )
    told = read_doors(
        config,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        keys=keys_folder,
        insecure=insecure or None,
    )
    doors = Doors(
        told.get("host", _HOST),
        told.get("port", _PORT),
        _tls(
            told.get("tls_cert"),
            told.get("tls_key"),
            told.get("tls_ca"),
            told.get("keys"),
            told.get("insecure", False),
        ),
        told.get("keys"),
    )
    check_start(settings, out)
    with _ended_politely(), _log_lines(out) as notify:
        run_server(settings, out, doors, serve=serve, notify=notify)


def client(
    server_address: Annotated[
        str, typer.Option("--server", help="host:port, with the host as in the certificate.")
    ],
    data: Annotated[list[Path], typer.Option(help="The site's file (CSV, TSV, Parquet, npz).")],
    out: Annotated[Path, typer.Option(help="The site's own folder.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the site; that of its key, or of its file.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key (NAME.key).")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Certificate of who signed the server's (ca.crt).")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text: only for trying out.")
    ] = False,
    share_metrics: Annotated[
        bool,
        typer.Option("--share-metrics", help="The server may know how good the model is here."),
    ] = False,
    adapt_only: Annotated[
        bool,
        typer.Option(
            "--adapt-only", help="Take the finished model, learn its weights, send nothing."
        ),
    ] = False,
    min_rows: Annotated[
        int, typer.Option(min=0, help="Withhold moments of components with fewer rows than this.")
    ] = 0,
) -> None:
    """Take part in a federation with the rows of this site, which stay here.

    A key NAME.key and a certificate ca.crt in this folder, or in --out, need not be named.

    Waits for the server, connects again by itself, and ends when the federation has.

    Example: fedgmm client --server host:9092 --data oslo.csv --out oslo --key oslo.key --ca ca.crt

    Example: fedgmm client --server host:9092 --data bergen.csv --out bergen --key bergen.key --ca ca.crt
    --adapt-only
    """
    _need_flower()
    with _unbroken():
        from fedgmm.data.tables.files import client_name
        from fedgmm.federation.flower.client import (
            Connection,
            check_authority,
            read_address,
            take_part,
        )
        from fedgmm.federation.flower.keys import check_private_key
        from fedgmm.federation.settings import SiteSettings
        from fedgmm.federation.site import Site
        from fedgmm.federation.site_table import SiteTable

    host, port = read_address(server_address)
    if insecure and (ca is not None or key is not None):
        raise typer.BadParameter("--insecure goes without --ca and --key.")
    if not insecure:
        own = name or client_name(data[0])
        key = key or _lying_about(f"{own}.key", out)
        ca = ca or _lying_about("ca.crt", out)
        if ca is None or key is None:
            raise typer.BadParameter(
                "Say --ca ca.crt, which you have from the server, and --key NAME.key, which you make "
                "with fedgmm keys new NAME; or --insecure for trying out."
            )
        check_authority(ca)
        name = name or check_private_key(key).name
    connection = Connection(
        host, port, ca.resolve() if ca else None, key.resolve() if key else None
    )
    SiteTable.found(tuple(data), name, notify=lambda _: None)  # before anything is written
    settings = SiteSettings(tuple(data), out, name, share_metrics, adapt_only, min_rows)
    with _ended_politely(), _log_lines(out) as notify:
        take_part(Site(settings, notify=notify), connection, out, notify=notify)


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    out: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path(),
) -> None:
    """Make a key pair: NAME.key stays at the site, NAME.pub goes to whoever runs the server.

    Example: fedgmm keys new oslo
    """
    _need_flower()
    from fedgmm.federation.flower.keys import check_private_key, new_pair

    private, public = new_pair(name, out)
    typer.echo(f"{private}: keep it here, and show it to nobody.")
    typer.echo(f"{public}: send it to whoever runs the server, who puts it into the --keys folder.")
    typer.echo(f"Fingerprint, to compare by telephone: {check_private_key(private).fingerprint}")


@keys.command("list")
def list_keys(
    folder: Annotated[Path, typer.Argument(help="Folder with public keys.")] = Path(),
) -> None:
    """Show the public keys of a folder, as the server would let them in."""
    _need_flower()
    from fedgmm.federation.flower.keys import read_public_keys

    for key in read_public_keys(folder):
        typer.echo(f"{key.fingerprint}  {key.name}")


@keys.command("certificate")
def certificate(
    host: Annotated[
        list[str], typer.Option(help="Name or address that clients use. May be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the three files.")] = Path(),
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long it is good for.")] = 365,
) -> None:
    """Make a certificate for trying out, and the authority that signs it; see docs/deployment.md.

    Example: fedgmm keys certificate --host localhost --host 127.0.0.1 --out certificates
    """
    _need_flower()
    from fedgmm.federation.flower.certificates import try_out_certificates

    files = try_out_certificates(host, out, days)
    typer.echo(f"{files.certificate}, {files.key}: for the server (--tls-cert, --tls-key).")
    typer.echo(f"{files.authority}: for the server (--tls-ca) and every client (--ca).")


def _lying_about(name: str, out: Path) -> Path | None:
    """A file in the working folder, or in the site's own."""
    return next((path for path in (Path(name), out / name) if path.is_file()), None)


def _need_flower() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise ValueError("This command needs Flower; say: pip install 'fedgmm[flower]'.")


def _tls(
    certificate: Path | None,
    key: Path | None,
    authority: Path | None,
    keys_folder: Path | None,
    insecure: bool,
) -> Tls | None:
    from fedgmm.federation.flower.certificates import Tls

    given = [one for one in (certificate, key, authority) if one is not None]
    if insecure:
        if given or keys_folder is not None:
            raise typer.BadParameter(
                "--insecure goes without --tls-cert, --tls-key, --tls-ca and --keys: keys need TLS."
            )
        return None
    if certificate is None or key is None or authority is None:
        raise typer.BadParameter(
            "Say --tls-cert, --tls-key and --tls-ca (to try out: fedgmm keys certificate), or "
            "--insecure to go without."
        )
    return Tls(certificate, key, authority)


@contextmanager
def _unbroken() -> Iterator[None]:
    """Ctrl-C waits until the imports are done: some libraries die of it in the middle of theirs."""
    asked = False

    def remember(*_: object) -> None:
        nonlocal asked
        asked = True

    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield
        return
    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@contextmanager
def _ended_politely() -> Iterator[None]:
    """A polite request to end is as good as Ctrl-C: children are ended, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _log_lines(out: Path) -> Iterator[Callable[[str], None]]:
    """Lines with the time of day, on the side and in ``federation.log``."""
    from datetime import datetime

    from fedgmm.federation.messages import one_line

    console = sidelines()
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder.")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "federation.log").open("a", encoding="utf-8") as file:

        def notify(line: str) -> None:
            now, line = datetime.now(), one_line(line)  # others choose some of the words
            console.print(
                f"[dim]{now:%H:%M:%S}[/] {escaped(line)}", soft_wrap=True, highlight=False
            )
            file.write(f"{now:%Y-%m-%d %H:%M:%S} {line}\n")
            file.flush()

        yield notify
