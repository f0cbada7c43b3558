"""Wrong options and files end with an error before anything is started."""

import shutil

import pytest

from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.keys import new_pair
from small_runs import fails, works, write_sites

GOOD = '[data]\nlabel = "state"\n[federation]\nclients = 2\n'


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    home = tmp_path_factory.mktemp("office")
    write_sites(home)
    trial_certificates(["127.0.0.1"], home / "tls")
    trial_certificates(["127.0.0.1"], home / "other_tls")
    (home / "keys").mkdir()
    new_pair("oslo", home)
    shutil.copy(home / "oslo.pub", home / "keys")
    (home / "good.toml").write_text(GOOD)
    return home


@pytest.fixture
def office(prepared, tmp_path, monkeypatch):
    home = shutil.copytree(prepared, tmp_path / "office")
    monkeypatch.chdir(home)
    return home


TLS = ["--tls-cert", "tls/server.crt", "--tls-key", "tls/server.key", "--tls-ca", "tls/ca.crt"]
KEYS = ["--keys", "keys"]


def server(*more, config="good.toml", code=1):
    return fails("server", "--config", config, "--out", "run", *more, code=code)


def client(*more, data="oslo.csv", out="site", code=1, key="oslo.key", ca="tls/ca.crt"):
    who = ["--key", key, "--ca", ca]
    where = ["--server", "127.0.0.1:9", "--data", data, "--out", out]
    return fails("client", *where, *who, *more, code=code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--tls-cert"),
        (["--insecure", *TLS], "--insecure"),
        (["--insecure", *KEYS], "keys need TLS"),
        ([*TLS, *KEYS, "--port", 99999], "99999"),
    ],
)
def test_wrong_options_of_the_server(office, arguments, words):
    printed = server(*arguments, code=2)
    assert words in " ".join(printed.replace("│", " ").split())
    assert not (office / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (TLS, "--keys FOLDER is missing"),
        ([*TLS, "--keys", "nowhere"], "There is no folder nowhere"),
        ([*TLS[:3], "other_tls/server.key", *TLS[4:], *KEYS], "is not the key of"),
        ([*TLS[:5], "other_tls/ca.crt", *KEYS], "would refuse"),
        ([*TLS[:1], "oslo.key", *TLS[2:], *KEYS], "is not a certificate"),
        ([*TLS[:1], "missing.crt", *TLS[2:], *KEYS], "There is no file missing.crt"),
        ([*TLS, *KEYS, "--host", "10.9.8.7"], "not for 10.9.8.7"),
        (["--insecure", "--clients", 2, "--min-clients", 5], "min_clients=5 is more than"),
        (["--insecure", "--host", "0.0.0.0"], "loopback address only"),
    ],
)
def test_files_of_the_server_that_do_not_fit(office, arguments, words):
    assert words in server(*arguments)


@pytest.mark.parametrize("content", ["hello", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEmP oslo"])
def test_a_key_of_another_kind_at_the_server(office, content):
    (office / "keys/bergen.pub").write_text(content)
    assert "bergen.pub is not a public key" in server(*TLS, *KEYS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "there is no section [x]"),
        ('[data]\nlabel = "y"\n[trainin]\n', "there is no section [trainin]"),
        (GOOD + "[training]\nrounds = 'three'", "rounds must be an integer"),
        (GOOD + "[training]\nalgorithm = 'magic'", "algorithm must be one of"),
        (GOOD + "[training]\npersonal_labels = true", "personal_labels"),
        (GOOD + "[training]\nlearner = 'resnet18'", "learner must be one of"),
        (GOOD.replace("[fed", 'files = ["a.csv"]\n[fed'), "each site names its own with --data"),
        (GOOD.replace("[fed", 'client = "me"\n[fed'), "each site has its own name"),
        ("[federation]\nclients = 2", 'label = "COLUMN"'),
        (GOOD + "round_timeout = nan", "round_timeout must be finite"),
        (GOOD + "round_timeout = 'soon'", "round_timeout must be a number"),
        (GOOD.replace("2", "true"), "clients must be an integer"),
    ],
)
def test_wrong_settings_are_refused_before_the_server_starts(office, text, words):
    (office / "wrong.toml").write_text(text)
    assert words in server("--insecure", config="wrong.toml")
    assert not (office / "run").exists()


def test_a_folder_with_other_files_is_not_changed(office):
    (office / "run").mkdir()
    (office / "run/thesis.txt").write_text("all my work")
    assert "is not empty" in server("--insecure")
    assert [path.name for path in (office / "run").iterdir()] == ["thesis.txt"]
    (office / "run/config.toml").write_text('[data]\nfiles = ["a.csv"]\nlabel = "y"\n')
    assert "holds a run of one machine" in server("--insecure")
    assert "holds a run of one machine" in client(out="run")
    assert "is a file" in fails(
        "server", "--config", "good.toml", "--out", "good.toml", "--insecure"
    )
    assert "is a file" in client(out="good.toml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": "none.csv"}, "there is no such file"),
        ({"data": "good.toml"}, "this kind of file cannot be read"),
        ({"data": "empty.csv"}, "empty"),
        ({"data": "."}, "A site has one table, but 4 were given"),
        ({"key": "none.key"}, "There is no key none.key"),
        ({"key": "oslo.pub"}, "is the public key"),
        ({"key": "tls/server.key"}, "is not a private key of a site"),
        ({"ca": "none.crt"}, "There is no file none.crt"),
        ({"ca": "good.toml"}, "is not a certificate"),
        ({"ca": "oslo.key"}, "is not a certificate"),
    ],
)
def test_files_of_a_client_that_cannot_be_used(office, arguments, words):
    (office / "empty.csv").write_text("")
    assert words in client(**arguments)
    assert not (office / "site").exists()


def test_a_key_that_others_can_read(office):
    (office / "oslo.key").chmod(0o644)
    assert "chmod 600" in client()


@pytest.mark.parametrize("address", ["nowhere", "host:", ":9", "host:99999", "host:port"])
def test_a_malformed_address(office, address):
    arguments = ["--data", "oslo.csv", "--out", "site", "--insecure"]
    assert "is not an address" in fails("client", "--server", address, *arguments)


@pytest.mark.parametrize("host", ["a b", "*.örg", "-x", ""])
def test_no_certificate_for_a_malformed_host(office, host):
    printed = fails("keys", "certificate", "--host", host, "--out", "new")
    assert "neither an address nor a host name" in printed
    assert not (office / "new").exists()


# ---------------------------------------------------------------------- the two commands in short


SERVER = """
[server]
host = "127.0.0.1"
port = 0
tls_cert = "tls/server.crt"
tls_key = "tls/server.key"
tls_ca = "tls/ca.crt"
keys = "keys"
"""


def test_options_of_the_server_may_be_in_its_config(office, monkeypatch):
    (office / "sub").mkdir()
    for folder in ("tls", "keys"):
        shutil.move(office / folder, office / "sub" / folder)
    (office / "sub" / "full.toml").write_text(GOOD + SERVER.replace("port = 0", "port = 9"))
    seen = []
    monkeypatch.setattr(
        "fedgmm.federation.network.server.run_server",
        lambda settings, out, address, **_: seen.append(address),
    )
    works("server", "--config", "sub/full.toml", "--out", "run")
    works("server", "--config", "sub/full.toml", "--out", "run", "--port", "77")
    assert [(address.host, address.port) for address in seen] == [
        ("127.0.0.1", 9),
        ("127.0.0.1", 77),
    ]
    assert seen[0].tls.certificate.samefile(office / "sub" / "tls" / "server.crt")
    assert seen[0].keys.samefile(office / "sub" / "keys")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("port = true", "port must be of type int"),
        ('port = "9"', "port must be of type int"),
        ("keys = 3", "keys must be of type str"),
        ("gate = 3", "no option"),
    ],
)
def test_a_config_with_a_wrong_server(office, line, words):
    (office / "wrong.toml").write_text(GOOD + f"[server]\n{line}\n")
    assert words in " ".join(server(config="wrong.toml").split())


@pytest.mark.parametrize("place", [".", "site"])
def test_key_and_certificate_are_found_in_the_folders(office, monkeypatch, place):
    (office / "site").mkdir()
    shutil.move(office / "oslo.key", office / "elsewhere.key")
    shutil.copy(office / "elsewhere.key", office / place / "oslo.key")
    shutil.copy(office / "tls" / "ca.crt", office / place / "ca.crt")
    seen = []
    monkeypatch.setattr(
        "fedgmm.federation.network.client.take_part",
        lambda site, connection, out, **_: seen.append(connection),
    )
    works("client", "--server", "127.0.0.1:9", "--data", "oslo.csv", "--out", "site")
    assert seen[0].key.samefile(office / place / "oslo.key")
    assert seen[0].authority.samefile(office / place / "ca.crt")
