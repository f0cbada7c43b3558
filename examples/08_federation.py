"""A federation on one machine: a server and three hospitals, one process each.

The processes communicate over TLS, with a key per hospital, as on four machines. Rows stay in the
process that reads them; the server sees sums. [Federation](../deployment.md) explains every
command.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from fedgmm.data.examples import write_hospitals

SITES = ("oslo", "trondheim", "stavanger")
SETTINGS = """[data]
label = "diagnosis"

[training]
components = 3
learners = 3
rounds = 8

[federation]
clients = 3
"""


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a fedgmm command in a folder; its output goes to a file."""
    log = (folder / f"{words[0]}_{words[-1].replace('/', '_')}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, "-m", "fedgmm", *words], cwd=folder, stdout=log, stderr=log
    )


def main(out: Path) -> None:
    """Run the federation and draw the likelihood by round and the accuracy of each hospital."""
    folder = Path(tempfile.mkdtemp())
    write_hospitals(folder)
    (folder / "federation.toml").write_text(SETTINGS)
    made = [start(folder, "keys", "certificate", "--host", "127.0.0.1", "--out", "tls")]
    made += [start(folder, "keys", "new", site, "--out", site) for site in SITES]
    if any(process.wait() for process in made):
        raise RuntimeError("keys could not be made")
    (folder / "keys").mkdir()
    for site in SITES:  # a hospital sends its public key to the server's administrator
        shutil.copy(folder / site / f"{site}.pub", folder / "keys")
    with socket.socket() as free:  # any port that is free now
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tls = ("--tls-cert", "tls/server.crt", "--tls-key", "tls/server.key", "--tls-ca", "tls/ca.crt")
    where = ("--host", "127.0.0.1", "--port", port, "--keys", "keys")
    server = start(folder, "server", "--config", "federation.toml", *where, *tls, "--out", "run")
    clients = [
        start(
            folder, "client", "--server", f"127.0.0.1:{port}", "--data", f"site_{site}.csv",
            "--key", f"{site}/{site}.key", "--ca", "tls/ca.crt", "--out", site,
        )
        for site in SITES
    ]  # fmt: skip
    try:
        codes = [process.wait(600) for process in (*clients, server)]
    finally:
        for process in (*clients, server):
            process.kill()
    if any(codes):
        raise RuntimeError("\n".join(path.read_text()[-300:] for path in folder.glob("*.log")))

    history = [json.loads(line) for line in (folder / "run/history.jsonl").read_text().splitlines()]
    tests = [json.loads((folder / site / "metrics.json").read_text())["test"] for site in SITES]
    accuracy = [100 * test["mean_accuracy"] for test in tests]
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    curve.plot(
        [entry["round"] for entry in history], [entry["log_likelihood"] for entry in history], "o-"
    )
    curve.set(xlabel="round", ylabel="log-likelihood per row", title="at the server")
    bars.bar(SITES, accuracy)
    bars.set(ylabel="test accuracy (%)", title="at each hospital", ylim=(0, 100))
    figure.savefig(out, dpi=80)
    print(dict(zip(SITES, accuracy, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("federation.png"), help="the picture")
    main(parser.parse_args().out)
