"""Check an installed package as a user would: from files to a report, a new site, and a site's keys.

``python smoke.py`` runs the installed command ``fedgmm`` in an empty folder and stops with the output of
the first command that fails. It needs no other file of the project.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

COMMANDS = """\
fedgmm --version
fedgmm demo --write-files .
fedgmm inspect site_*.csv --label diagnosis
fedgmm fit site_*.csv --label diagnosis --rounds 10 --out run
fedgmm evaluate run
fedgmm predict run --client oslo new_patients.csv --out predicted.csv
fedgmm adapt run --client bergen bergen.csv
fedgmm detect run batch.csv --out scores.csv
fedgmm report run
fedgmm card run
fedgmm keys new oslo
"""
WRITTEN = ("run/report.html", "predicted.csv", "scores.csv", "oslo.pub")


def main() -> int:
    """Run the commands and return the exit code."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS.splitlines():
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            print(f"{'FAILED' if done.returncode else 'ok'}: {command}", flush=True)
            if done.returncode:
                print(done.stdout + done.stderr)
                return 1
        missing = [name for name in WRITTEN if not (Path(folder) / name).exists()]
    if missing:
        print(f"FAILED: {', '.join(missing)} was not written")
        return 1
    print(f"Python {sys.version.split()[0]}: all commands succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
