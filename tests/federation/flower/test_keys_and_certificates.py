"""Key pairs and certificates, and what is said of bad ones before anything starts."""

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgmm.cli import app
from fedgmm.federation.flower import certificates
from fedgmm.federation.flower.certificates import (
    CertificateError,
    Tls,
    check_tls,
    try_out_certificates,
)
from fedgmm.federation.flower.keys import (
    SiteKeyError,
    check_private_key,
    new_pair,
    read_public_keys,
)


def test_a_pair_is_private_and_its_halves_belong_together(tmp_path):
    private, public = new_pair("oslo", tmp_path)

    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert read_public_keys(tmp_path) == [check_private_key(private)]
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    assert "PRIVATE" not in public.read_text()


def test_nothing_is_overwritten(tmp_path):
    private, public = new_pair("oslo", tmp_path)
    before = private.read_bytes()
    with pytest.raises(SiteKeyError, match="there already"):
        new_pair("oslo", tmp_path)
    public.unlink()
    with pytest.raises(SiteKeyError, match="there already"):
        new_pair("oslo", tmp_path)

    assert private.read_bytes() == before
    assert not public.exists()


@pytest.mark.parametrize("name", ["", "../oslo", "a/b", "a\nb", "x" * 65, ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(name, tmp_path):
    with pytest.raises(SiteKeyError, match="cannot be a name"):
        new_pair(name, tmp_path / "keys")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    private, _ = new_pair("oslo", tmp_path)
    private.chmod(0o644)

    with pytest.raises(SiteKeyError, match="chmod 600"):
        check_private_key(private)


def test_what_is_wrong_with_a_folder_of_keys_is_told(tmp_path):
    with pytest.raises(SiteKeyError, match="no folder"):
        read_public_keys(tmp_path / "none")
    with pytest.raises(SiteKeyError, match="no public keys"):
        read_public_keys(tmp_path)
    _, public = new_pair("oslo", tmp_path)
    (tmp_path / "bergen.pub").write_bytes(public.read_bytes())
    with pytest.raises(SiteKeyError, match="bergen and oslo have the same key"):
        read_public_keys(tmp_path)
    (tmp_path / "bergen.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(SiteKeyError, match=r"bergen\.pub is not a public key"):
        read_public_keys(tmp_path)


def test_a_private_key_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "a.key"
    path.write_text("nonsense")
    path.chmod(0o600)

    with pytest.raises(SiteKeyError, match="not a private key"):
        check_private_key(path)
    with pytest.raises(SiteKeyError, match="no key"):
        check_private_key(tmp_path / "b.key")


def test_the_try_out_certificate_serves_its_hosts(tmp_path):
    files = try_out_certificates(["localhost", "127.0.0.1"], tmp_path)

    assert check_tls(files, "127.0.0.1") == ["localhost", "127.0.0.1"]
    assert check_tls(files, "0.0.0.0") == ["localhost", "127.0.0.1"]
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    with pytest.raises(CertificateError, match="there already"):
        try_out_certificates(["localhost"], tmp_path)


def test_a_wrong_host_authority_or_key_is_told_before_anything_starts(tmp_path):
    one = try_out_certificates(["localhost"], tmp_path / "one")
    two = try_out_certificates(["localhost"], tmp_path / "two")

    with pytest.raises(CertificateError, match=r"is for localhost, not for 10\.0\.0\.1"):
        check_tls(one, "10.0.0.1")
    with pytest.raises(CertificateError, match="would refuse"):
        check_tls(Tls(one.certificate, one.key, two.authority), "localhost")
    with pytest.raises(CertificateError, match="is not the key of"):
        check_tls(Tls(one.certificate, two.key, one.authority), "localhost")
    with pytest.raises(CertificateError, match="no file"):
        check_tls(Tls(one.certificate, one.key, tmp_path / "none"), "localhost")
    with pytest.raises(CertificateError, match="not a certificate"):
        check_tls(Tls(one.key, one.key, one.authority), "localhost")
    with pytest.raises(CertificateError, match="not a certificate"):
        check_tls(Tls(one.certificate, one.key, one.key), "localhost")


def test_an_old_certificate_is_told(tmp_path, monkeypatch):
    class Earlier(certificates.datetime):
        @classmethod
        def now(cls, zone=None):
            return super().now(zone) - timedelta(days=400)

    monkeypatch.setattr(certificates, "datetime", Earlier)
    files = try_out_certificates(["localhost"], tmp_path)

    with pytest.raises(CertificateError, match="expired"):
        check_tls(files, "localhost")


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


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
    assert "there already" in again.stderr


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "federation.toml"
    path.write_text('[data]\nlabel = "diagnosis"\n[federation]\nclients = 2\n')
    return path


def test_a_server_refuses_to_start_without_certificates_or_keys(tmp_path, config):
    out = tmp_path / "run"
    files = try_out_certificates(["localhost"], tmp_path / "c")
    tls = ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]

    plain = run("server", "--config", config, "--out", out)
    no_keys = run("server", "--config", config, "--out", out, *tls)
    both = run("server", "--config", config, "--out", out, "--insecure", *tls)

    assert plain.exit_code == 2
    assert "--insecure" in plain.stderr
    assert no_keys.exit_code == 1
    assert "--keys FOLDER" in no_keys.stderr
    assert both.exit_code == 2


def test_a_client_refuses_to_start_without_certificates_or_keys(tmp_path):
    base = ["client", "--server", "localhost:9", "--data", "x.csv", "--out", tmp_path / "o"]

    assert run(*base).exit_code == 2
    assert "keys new NAME" in run(*base).stderr
    wrong = run(
        "client", "--server", "localhost", "--data", "x.csv", "--out", tmp_path, "--insecure"
    )
    assert wrong.exit_code == 1
    assert "write host:port" in wrong.stderr
