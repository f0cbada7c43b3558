"""A ledger never counts too little: killed, damaged, shortened, copied back or deleted."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedgmm.privacy import ledger as module
from fedgmm.privacy.accounting import Release, epsilon_of, mu_of
from fedgmm.privacy.ledger import (
    Budget,
    BudgetError,
    Entry,
    Ledger,
    LedgerError,
    accounts,
    witness_of,
)
from small_runs import fails, works


def entry(mu=0.1, what="round", run="a", table="t", unit="row", **options):
    return Entry(Release(mu, **options), what, run, table, unit)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "oslo", tmp_path / "keys" / "oslo.ledger")


@pytest.fixture
def used(ledger):
    for number in range(4):
        ledger.charge(entry(what=f"round {number}"))
    return ledger


def test_releases_are_kept_and_composed(used):
    assert [one.what for one in used.entries()] == [f"round {k}" for k in range(4)]
    again = Ledger(used.path.parent, used.witness)
    assert again.spent("row", 1e-5) == pytest.approx(epsilon_of(0.2, 1e-5))


def test_the_limit_counts_all_runs_and_tables(ledger):
    limit = Budget(1.0, 1e-5)
    share = mu_of(1.0, 1e-5) / 2  # four of these are the whole budget
    for run, table in (("a", "t"), ("a", "t"), ("b", "t"), ("b", "longer t")):
        ledger.charge(entry(share, run=run, table=table), limit)
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetError, match="limit is 1"):
        ledger.charge(entry(0.01, run="c"), limit)
    with pytest.raises(BudgetError, match="limit is 1"):
        ledger.check("row", [Release(0.01)], limit)
    assert ledger.path.read_bytes() == before
    ledger.check("row", [Release(0.01)], Budget(1.1, 1e-5))


def test_a_run_keeps_to_its_own_budget(ledger):
    plan = Budget(1.0, 1e-5)
    ledger.charge(entry(2.0, run="earlier"))
    ledger.charge(entry(mu_of(1.0, 1e-5), run="now"), None, plan)
    with pytest.raises(BudgetError, match="run"):
        ledger.charge(entry(0.01, run="now"), None, plan)


def test_a_release_about_a_client_concerns_its_rows(ledger):
    ledger.charge(entry(0.3, unit="client"))
    ledger.charge(entry(0.8, unit="row"))
    assert ledger.spent("row", 1e-5) == pytest.approx(epsilon_of(1.0, 1e-5))
    assert ledger.spent("person", 1e-5) == pytest.approx(epsilon_of(0.6, 1e-5))
    assert ledger.spent("client", 1e-5) == pytest.approx(epsilon_of(0.3, 1e-5))
    with pytest.raises(ValueError, match="unit"):
        ledger.charge(entry(unit="house"))


def test_a_release_about_a_client_counts_twice_for_its_rows(ledger):
    limit = Budget(1.0, 1e-5)
    mu = mu_of(1.0, 1e-5)
    ledger.charge(entry(mu, unit="client"), limit)  # its own limit only: no run had unit row
    assert ledger.spent("client", 1e-5) == pytest.approx(1.0)
    assert ledger.spent("row", 1e-5) == pytest.approx(epsilon_of(2 * mu, 1e-5))
    with pytest.raises(BudgetError, match="per row"):
        ledger.charge(entry(0.01, unit="row", run="b"), limit)
    ledger.charge(entry(0.01, unit="row", run="b"))
    with pytest.raises(BudgetError, match="per row"):
        ledger.check("client", [Release(1e-6)], Budget(1.5, 1e-5))
    rows, clients = accounts(ledger.entries(), 1e-5)
    assert rows.epsilon == pytest.approx(epsilon_of(math.hypot(2 * mu, 0.01), 1e-5))
    assert clients.epsilon == pytest.approx(1.0)


def test_a_release_about_a_client_keeps_to_the_limit_of_its_rows(ledger):
    limit = Budget(1.0, 1e-5)
    ledger.charge(entry(mu_of(1.0, 1e-5), unit="row"), limit)
    with pytest.raises(BudgetError, match="per row"):
        ledger.check("client", [Release(0.1)], limit)
    with pytest.raises(BudgetError, match="per row"):
        ledger.charge(entry(0.1, unit="client"), limit)
    assert len(ledger.entries()) == 1


def damaged(line):
    return line.replace(b'"mu": 0.1', b'"mu": 0.01')


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:-1],
        lambda lines: lines[:1],
        lambda lines: [],
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], damaged(lines[2]), *lines[3:]],
        lambda lines: [*lines[:-1], damaged(lines[-1])],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines[:-1], lines[-1][:-9]],
        lambda lines: [b"\x00" * 40 + b"\n", *lines[1:]],
        lambda lines: [*lines[:2], b"{}\n", *lines[3:]],
    ],
    ids=["last", "most", "all", "one", "order", "edited", "tail", "twice", "torn", "zeros", "{}"],
)
def test_a_changed_ledger_is_refused(used, change):
    lines = used.path.read_bytes().splitlines(keepends=True)
    used.path.write_bytes(b"".join(change(lines)))
    with pytest.raises(LedgerError, match="ledger"):
        used.charge(entry())
    with pytest.raises(LedgerError, match="ledger"):
        used.entries()


def test_an_older_copy_is_refused(used, tmp_path):
    shutil.copytree(used.path.parent, tmp_path / "backup")
    used.charge(entry())
    shutil.rmtree(used.path.parent)
    shutil.copytree(tmp_path / "backup", used.path.parent)
    with pytest.raises(LedgerError, match="older copy"):
        used.charge(entry())


def test_a_deleted_ledger_or_witness_is_refused(used):
    kept = used.path.read_bytes()
    used.path.unlink()
    with pytest.raises(LedgerError, match="missing"):
        used.charge(entry())
    used.path.write_bytes(kept)
    used.witness.write_bytes(b"{")
    with pytest.raises(LedgerError, match="damaged"):
        used.charge(entry())
    used.witness.unlink()
    with pytest.raises(LedgerError, match="witness"):
        used.charge(entry())


def test_the_same_table_is_not_counted_twice_in_two_folders(used, tmp_path):
    other = Ledger(tmp_path / "elsewhere", used.witness)
    with pytest.raises(LedgerError, match="use that folder"):
        other.charge(entry())
    other.charge(entry(table="another"))
    used.charge(entry())


def test_a_moved_folder_keeps_its_account(used, tmp_path):
    used.path.parent.rename(tmp_path / "moved")
    moved = Ledger(tmp_path / "moved", used.witness)
    moved.charge(entry())
    assert len(moved.entries()) == 5


def test_accounts_per_table_and_unit(used):
    used.charge(entry(0.3, run="b", unit="client", table="u"))
    row_t, row_u, rows, client = accounts(used.entries(), 1e-5)
    assert (row_t.table, row_t.runs, row_t.releases) == ("t", 1, 4)
    assert row_t.epsilon == pytest.approx(epsilon_of(0.2, 1e-5))
    assert rows.epsilon == used.spent("row", 1e-5)
    assert client.epsilon == pytest.approx(epsilon_of(0.3, 1e-5))
    assert (row_u.epsilon, row_u.unit) == (pytest.approx(epsilon_of(0.6, 1e-5)), "row")


def test_the_command_prints_what_was_spent(used):
    found = json.loads(works("ledger", used.path.parent, "--json").stdout)
    assert found[0]["releases"] == 4
    assert found[0]["epsilon"] == pytest.approx(used.spent("row", 1e-5))
    assert f"{used.spent('row', 1e-5):.3g}" in works("ledger", used.path.parent).stdout
    used.path.write_bytes(used.path.read_bytes()[:-200])
    assert "shortened" in fails("ledger", used.path.parent)
    assert "no ledger" in fails("ledger", used.witness.parent)


def test_the_witness_lies_beside_the_key_or_the_folder(tmp_path):
    assert witness_of(tmp_path / "oslo", tmp_path / "k" / "o.key") == tmp_path / "k" / "o.ledger"
    assert witness_of(tmp_path / "oslo") == tmp_path / ".oslo.ledger"


class Died(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_a_crash_at_any_step_never_counts_too_little(ledger, monkeypatch, step):
    """Every write and every flush to disk may be the last thing that a process does."""
    left, calls, real = 0, 0, os.fsync

    def dies(handle):
        nonlocal calls
        calls += 1
        if calls == step + 1:
            raise Died
        real(handle)

    for number in range(2):
        with monkeypatch.context() as patch:
            if number == 0 or step >= 4:
                patch.setattr(os, "fsync", dies)
            try:
                ledger.charge(entry())
                left += 1
            except Died:
                pass
    ledger.charge(entry())
    left += 1
    assert len(ledger.entries()) >= left


def test_a_half_written_line_was_not_released(used):
    with used.path.open("ab") as file:
        file.write(b'{"number": 5, "bef')
    used.charge(entry(what="after"))
    assert [one.what for one in used.entries()][-2:] == ["round 3", "after"]


CHILD = """
import sys
from pathlib import Path
from fedgmm.privacy.accounting import Release
from fedgmm.privacy.ledger import Entry, Ledger

ledger = Ledger(Path(sys.argv[1]), Path(sys.argv[2]))
print("ready", flush=True)
while True:
    ledger.charge(Entry(Release(0.1), "round", "run", "table", "row"))
    print("release", flush=True)  # it has left when the parent can read it
"""


def killed(folder, witness, moment):
    """Releases that left a process before it was killed, after so many lines and microseconds."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(witness)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])},
    )
    lines, wait = moment
    read = [child.stdout.readline() for _ in range(lines + 1)]
    assert read == [b"ready\n"] + [b"release\n"] * lines
    end = time.perf_counter() + wait
    while time.perf_counter() < end:
        pass
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    child.wait()
    return lines + rest.count(b"release")


@pytest.mark.parametrize(
    "kills", [pytest.param(3), pytest.param(60, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_kill_9_never_counts_too_little(tmp_path, kills):
    folder, witness = tmp_path / "site", tmp_path / "keys" / "site.ledger"
    moments, left = random.Random(), 0
    for _ in range(kills):
        left += killed(folder, witness, (moments.randrange(4), moments.uniform(0, 4e-3)))
        counted = len(Ledger(folder, witness).entries())
        assert left <= counted
    assert counted <= left + kills  # at most one release per kill was counted and did not leave


def test_files_are_flushed_before_charge_returns(ledger, monkeypatch):
    flushed = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda h: (flushed.append(os.fstat(h).st_ino), real(h)))
    ledger.charge(entry())
    assert ledger.path.stat().st_ino in flushed
    assert ledger.witness.stat().st_ino in flushed
