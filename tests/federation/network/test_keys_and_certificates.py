"""Key pairs and certificates: bad ones are refused before anything starts; keys may change later."""

import shutil
import stat
from datetime import timedelta
from pathlib import Path

import pytest

from fedgmm.cli import app
from fedgmm.federation.network import certificates, keys
from fedgmm.federation.network.certificates import (
    CertificateError,
    Tls,
    check_tls,
    trial_certificates,
)
from fedgmm.federation.network.keys import (
    AcceptedKeys,
    SiteKeyError,
    check_private_key,
    new_pair,
    read_public_keys,
)
from small_runs import RUNNER


def test_the_keys_of_a_pair_fit_and_the_private_one_is_protected(tmp_path):
    private, public = new_pair("oslo", tmp_path)

    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert read_public_keys(tmp_path) == [check_private_key(private)]
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    assert "PRIVATE" not in public.read_text()


def test_existing_keys_are_not_overwritten(tmp_path):
    private, public = new_pair("oslo", tmp_path)
    before = private.read_bytes()
    with pytest.raises(SiteKeyError, match="exists"):
        new_pair("oslo", tmp_path)
    public.unlink()
    with pytest.raises(SiteKeyError, match="exists"):
        new_pair("oslo", tmp_path)

    assert private.read_bytes() == before
    assert not public.exists()


@pytest.mark.parametrize("name", ["", "../oslo", "a/b", "a\nb", "x" * 65, ".hidden"])
def test_a_name_that_is_not_a_file_name_is_refused(name, tmp_path):
    with pytest.raises(SiteKeyError, match="name"):
        new_pair(name, tmp_path / "keys")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    private, _ = new_pair("oslo", tmp_path)
    private.chmod(0o644)

    with pytest.raises(SiteKeyError, match="chmod"):
        check_private_key(private)


def test_a_folder_of_bad_keys_is_refused(tmp_path):
    with pytest.raises(SiteKeyError, match="folder"):
        read_public_keys(tmp_path / "none")
    with pytest.raises(SiteKeyError, match="no public"):
        read_public_keys(tmp_path)
    _, public = new_pair("oslo", tmp_path)
    (tmp_path / "bergen.pub").write_bytes(public.read_bytes())
    with pytest.raises(SiteKeyError, match="same key"):
        read_public_keys(tmp_path)
    (tmp_path / "bergen.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(SiteKeyError, match="not a public key"):
        read_public_keys(tmp_path)


def test_a_private_key_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "a.key"
    path.write_text("nonsense")
    path.chmod(0o600)

    with pytest.raises(SiteKeyError, match="private"):
        check_private_key(path)
    with pytest.raises(SiteKeyError, match="no key"):
        check_private_key(tmp_path / "b.key")


def test_the_trial_certificate_is_valid_for_its_hosts(tmp_path):
    files = trial_certificates(["localhost", "127.0.0.1"], tmp_path)

    assert check_tls(files, "127.0.0.1") == ["localhost", "127.0.0.1"]
    assert check_tls(files, "0.0.0.0") == ["localhost", "127.0.0.1"]
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    with pytest.raises(CertificateError, match="exists"):
        trial_certificates(["localhost"], tmp_path)


def test_a_wrong_host_authority_or_key_is_refused(tmp_path):
    one = trial_certificates(["localhost"], tmp_path / "one")
    two = trial_certificates(["localhost"], tmp_path / "two")

    with pytest.raises(CertificateError, match="not for"):
        check_tls(one, "10.0.0.1")
    with pytest.raises(CertificateError, match="would refuse"):
        check_tls(Tls(one.certificate, one.key, two.authority), "localhost")
    with pytest.raises(CertificateError, match="not the key"):
        check_tls(Tls(one.certificate, two.key, one.authority), "localhost")
    with pytest.raises(CertificateError, match="no file"):
        check_tls(Tls(one.certificate, one.key, tmp_path / "none"), "localhost")
    with pytest.raises(CertificateError, match="not a certificate"):
        check_tls(Tls(one.key, one.key, one.authority), "localhost")
    with pytest.raises(CertificateError, match="not a certificate"):
        check_tls(Tls(one.certificate, one.key, one.key), "localhost")


def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    class Earlier(certificates.datetime):
        @classmethod
        def now(cls, zone=None):
            return super().now(zone) - timedelta(days=400)

    monkeypatch.setattr(certificates, "datetime", Earlier)
    files = trial_certificates(["localhost"], tmp_path)

    with pytest.raises(CertificateError, match="expired"):
        check_tls(files, "localhost")


def run(*arguments):
    return RUNNER.invoke(app, list(map(str, arguments)))


def test_the_commands(tmp_path):
    made = run("keys", "new", "oslo", "--out", tmp_path / "keys")
    listed = run("keys", "list", tmp_path / "keys")
    signed = run("keys", "certificate", "--host", "localhost", "--out", tmp_path)

    assert (made.exit_code, listed.exit_code, signed.exit_code) == (0, 0, 0)
    assert listed.stdout.split()[0] in made.stdout  # the fingerprint
    assert "oslo" in listed.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "keys",
        "ca.crt",
        "server.crt",
        "server.key",
    }
    again = run("keys", "new", "oslo", "--out", tmp_path / "keys")
    assert again.exit_code == 1
    assert "exists" in again.stderr


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "federation.toml"
    path.write_text('[data]\nlabel = "diagnosis"\n[federation]\nclients = 2\n')
    return path


def test_a_server_refuses_to_start_without_certificates_or_keys(tmp_path, config):
    out = tmp_path / "run"
    files = trial_certificates(["localhost"], tmp_path / "c")
    tls = ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]

    plain = run("server", "--config", config, "--out", out)
    no_keys = run("server", "--config", config, "--out", out, *tls)
    both = run("server", "--config", config, "--out", out, "--insecure", *tls)

    assert plain.exit_code == 2
    assert "--insecure" in plain.stderr
    assert no_keys.exit_code == 1
    assert "--keys" in no_keys.stderr
    assert both.exit_code == 2


def test_a_client_refuses_to_start_without_certificates_or_keys(tmp_path):
    base = ["client", "--server", "localhost:9", "--data", "x.csv", "--out", tmp_path / "o"]

    assert run(*base).exit_code == 2
    assert "keys new NAME" in run(*base).stderr
    wrong = run(
        "client", "--server", "localhost", "--data", "x.csv", "--out", tmp_path, "--insecure"
    )
    assert wrong.exit_code == 1
    assert "host:port" in wrong.stderr


# ---------------------------------------------------------------------- changes while the server runs


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_WATCH_INTERVAL", 0.0)
    for name in ("bergen", "oslo", "tromso"):
        new_pair(name, tmp_path / "made")
    folder = tmp_path / "keys"
    folder.mkdir()
    shutil.copy(tmp_path / "made/oslo.pub", folder)
    lines = []
    return tmp_path / "made", folder, AcceptedKeys(folder, lines.append), lines


def test_an_unchanged_folder_changes_nothing(watched):
    _, _, accepted, lines = watched
    assert not any(accepted.refresh() for _ in range(3))
    assert lines == []
    assert list(accepted.names.values()) == ["oslo"]


def test_a_new_key_is_accepted_and_a_deleted_one_is_not(watched):
    made, folder, accepted, lines = watched
    shutil.copy(made / "bergen.pub", folder)
    assert accepted.refresh()
    assert lines == ["The key of bergen is now accepted."]
    assert sorted(accepted.names.values()) == ["bergen", "oslo"]
    (folder / "oslo.pub").unlink()
    assert accepted.refresh()
    assert lines[1:] == ["The key of oslo is no longer accepted."]
    assert list(accepted.names.values()) == ["bergen"]


def test_a_site_may_get_a_new_key(watched):
    made, folder, accepted, lines = watched
    before = set(accepted.names)
    shutil.copy(made / "tromso.pub", folder / "oslo.pub")
    assert accepted.refresh()
    assert lines == ["oslo has a new key; the old one is no longer accepted."]
    assert not before & set(accepted.names)


def test_a_file_that_is_not_a_key_changes_nothing(watched):
    made, folder, accepted, lines = watched
    (folder / "bergen.pub").write_text("half of it")
    assert not accepted.refresh()
    assert not accepted.refresh()
    (line,) = lines
    assert "not changed" in line
    shutil.copy(made / "bergen.pub", folder)
    assert accepted.refresh()
    assert sorted(accepted.names.values()) == ["bergen", "oslo"]


@pytest.mark.parametrize(
    ("host", "covered"),
    [("a.org", True), ("x.b.org", True), ("b.org", False), ("y.x.b.org", False), ("", False)],
)
def test_hosts_that_a_certificate_covers(host, covered):
    assert certificates.covers(("a.org", "*.b.org"), host) is covered
