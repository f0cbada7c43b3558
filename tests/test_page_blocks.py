"""Every code block of the pages is run, with stand-ins for what is not at hand.

The kind of a block decides which test runs it, so a new block is run, too, and fails if it cannot be:

- ``python``: all blocks of a page, one after the other, in this process.
- ``sh``: all blocks of a page, as one script, by a slow test. `STAND_INS` has what a block needs beside it
  (files, a server, free ports) and which of its words are replaced. Each command and option is also
  compared with the command line, without running it.
- ``toml``: read by the reader of configurations.
- ``text``: formulas and output; no line of it is a command.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

from fedgmm.cli import studies
from fedgmm.federation.demo import free_port
from fedgmm.federation.settings import read_settings
from fedgmm.runs.config import read_config
from small_runs import works
from tiny_images import write_cifar10, write_femnist, write_folders, write_mnist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(one for one in (ROOT / "docs").rglob("*.md") if "generated" not in one.parts),
    *sorted((ROOT / ".github").rglob("*.md")),
]
FENCE = re.compile(r"^(`{3,}|~{3,})(.*)\n((?:.*\n)*?)\1$", re.MULTILINE)
COMMAND = re.compile(r"^\s*(?:\$ )?(fedgmm|make|python3?|openssl|torchrun|pip|pytest|flwr|git) ")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its first line, its kind and its text."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Return the commands without comments, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.split(" #")[0].strip() for line in lines if COMMAND.match(line)]

    @property
    def is_measurement(self) -> bool:
        """Return whether all commands are benchmarks, which ``test_benchmarks.py`` runs."""
        return all(one.startswith("python benchmarks/") for one in self.commands)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(3)) + 1, found[2].strip(), found[3])
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def pages_with(kind: str) -> list[Path]:
    return list(dict.fromkeys(block.page for block in of_kind(kind)))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---------------------------------------------------------------------- all kinds


def test_every_block_has_a_kind_that_a_test_runs():
    kinds = {"python", "sh", "toml", "text", "{eval-rst}", "{toctree}"}
    wrong = [
        f"{block}: {block.kind or 'no kind'}"
        for block in BLOCKS
        if block.kind not in kinds and not block.kind.startswith("{include} ")
    ]
    assert not wrong
    fences = [
        line
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith(("```", "~~~"))
    ]
    assert len(fences) == 2 * len(BLOCKS)  # none is indented or left open


def test_commands_stand_in_blocks_that_run():
    wrong = [
        str(block) for block in of_kind("text") if any(map(COMMAND.match, block.text.splitlines()))
    ]
    for page in PAGES:  # an indented line after an empty one is a block, too
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        wrong += [
            f"{named(page)}: {line}"
            for line in re.findall(r"(?<=\n\n)    .*", text)
            if COMMAND.match(line)
        ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "kind", "commands"),
    [
        ("```\nfedgmm fit x\n```\n", "", ["fedgmm fit x"]),
        ("```text\n$ make test\n```\n", "text", ["$ make test"]),
        ("~~~sh\npip install \\\n x  # y\n~~~\n", "sh", ["pip install   x"]),
    ],
)
def test_blocks_and_their_commands_are_found(text, kind, commands, tmp_path):
    (tmp_path / "page.md").write_text(f"# Title\n\n{text}")
    (block,) = blocks_of(tmp_path / "page.md")
    assert (block.line, block.kind, block.commands) == (4, kind, commands)


# ---------------------------------------------------------------------- Python


def python_of(page: Path) -> str:
    """Return all Python blocks of a page, padded so that errors have the line numbers of the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in blocks_of(page):
        if block.kind == "python":
            code = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("page", pages_with("python"), ids=named)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(page), str(page), "exec"), {"__name__": "__page__"})


# ---------------------------------------------------------------------- TOML


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_configurations_are_read(block, tmp_path):
    text, given = block.text, tomllib.loads(block.text)
    path = tmp_path / "settings.toml"
    if "files" in given.get("data", {}):
        path.write_text(text)
        assert read_config(path)["data"]["label"] == given["data"]["label"]
        return
    for section, line in (("data", 'label = "diagnosis"'), ("federation", "clients = 3")):
        if section not in given:
            text = f"{text}\n[{section}]\n{line}\n"
    path.write_text(text)
    assert read_settings(path).clients in (3, 4)


# ---------------------------------------------------------------------- shell


@dataclass(frozen=True)
class StandIn:
    """What a block needs in order to run here.

    Attributes:
        before: commands before the block.
        replace: words of the block, and what stands in for them; each must occur.
        after: commands after the block, which check what it left.
        files: writes files into the empty folder in which the page's blocks run.
    """

    before: str = ""
    replace: Mapping[str, str] = field(default_factory=dict)
    after: str = ""
    files: Callable[[Path], None] = lambda _: None


def image_files(folder: Path) -> None:
    """Write images of two sites, new ones, reviews, and random weights of the encoder."""
    import torch
    from safetensors.torch import save_file

    from fedgmm.nets.backbones import ResNet18

    write_folders(folder / "sites" / "oslo", 0, images=14)
    write_folders(folder / "sites" / "rome", 1, images=14)
    write_folders(folder / "new_images", 2, images=2)
    torch.manual_seed(0)
    save_file(ResNet18(None).state_dict(), folder / "resnet18.safetensors")
    for site in ("oslo", "rome"):
        texts = ["a lovely film,good", "terrible and boring,bad", "great joy,good"] * 12
        (folder / f"reviews_{site}.csv").write_text("\n".join(["review,sentiment", *texts]))


def settings_of_deployment(folder: Path) -> None:
    """Write the settings that the page prints, with names, sizes and a port that are at hand."""
    (block,) = (one for one in of_kind("toml") if named(one.page) == "docs/deployment.md")
    text = block.text
    for printed, small in {
        "clients = 4": "clients = 1",
        "min_clients = 3": "min_clients = 1",
        "rounds = 50": "rounds = 3",
        '"patient_id"': '"heart_rate"',
        '"ward_number"': '"ward"',
        "port = 9092": f"port = {PORT}",
    }.items():
        assert printed in text
        text = text.replace(printed, small)
    (folder / "printed.toml").write_text(text)


PORT, FLOWER, NODE = (str(free_port()) for _ in range(3))
DRY_RUN = {"make ": f"make --dry-run --directory {shlex.quote(str(ROOT))} "}
"""The targets would install, build and test all of this again."""
A_SERVER = {
    "fedgmm server ": f"fedgmm server --port {PORT} ",
    "localhost:9092": f"localhost:{PORT}",
}
SERVER_OF_IMAGES = f"""
mkdir federation keys && cp -r new_images federation && cp -r sites/oslo federation/images
cd federation
cp ../resnet18.safetensors . && fedgmm keys certificate --host localhost --out .
fedgmm keys new oslo && cp oslo.pub ../keys
cat > settings.toml <<END
[data]
label = "label"
id = "id"
[training]
rounds = 2
components = 1
learners = 1
pca = 4
[federation]
clients = 1
END
fedgmm server --config settings.toml --out run --port {PORT} --tls-cert server.crt \
  --tls-key server.key --tls-ca ca.crt --keys ../keys &
"""
FLOWER_SETTINGS = f"""
mkdir -p flower/home && cd flower && fedgmm demo --write-files . && mv site_oslo.csv oslo.csv
export FLWR_HOME=$PWD/home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
cat > home/config.toml <<END
[superlink]
default = "mine"
[superlink.mine]
address = "127.0.0.1:{FLOWER}"
insecure = true
END
cat > federation.toml <<END
[data]
label = "diagnosis"
[training]
rounds = 1
components = 1
learners = 1
[federation]
clients = 1
END
"""

UNTIL_SERVED = "for second in $(seq 60); do grep -q http page && break; sleep 1; done; kill $!;"

STAND_INS: dict[str, dict[str, StandIn]] = {
    "README.md": {"make demo": StandIn(replace=DRY_RUN)},
    "CONTRIBUTING.md": {"make test": StandIn(replace=DRY_RUN)},
    "docs/files.md": {
        "fedgmm fit site_*.csv": StandIn(
            before="mkdir watched && cd watched && fedgmm demo --write-files .",
            replace={
                "fedgmm watch run/ ": f"fedgmm watch run/ --port {PORT} 2> page & {UNTIL_SERVED}"
            },
            after=f"grep -q http://127.0.0.1:{PORT}/ page; wait; test -f run/metrics.json",
        )
    },
    "docs/deployment.md": {
        "fedgmm demo": StandIn(
            replace=A_SERVER, after="test -s predictions.csv", files=settings_of_deployment
        ),
        "# once: the authority": StandIn(
            before="mkdir ../authority && cd ../authority",
            replace={"DNS:fed.hospital.org": "DNS:localhost"},
        ),
        "fedgmm server": StandIn(
            before="""
            fedgmm demo --write-files . && mv site_oslo.csv oslo.csv && cp ../printed.toml federation.toml
            mkdir keys && for site in oslo bergen; do fedgmm keys new $site; mv $site.pub keys; done
            """,
            replace={"--keys keys": "--keys keys & server=$!"},
        ),
        "fedgmm client --server fed.hospital.org:9092 --data oslo.csv": StandIn(
            replace={"fed.hospital.org:9092": f"localhost:{PORT}"}, after="wait $server"
        ),
        "fedgmm client --server fed.hospital.org:9092 --data bergen.csv": StandIn(
            before="fedgmm server --config federation.toml --out run & server=$!",
            replace={"fed.hospital.org:9092": f"localhost:{PORT}"},
            after="kill $server; fedgmm evaluate bergen/",
        ),
        "APP=": StandIn(
            before=FLOWER_SETTINGS,
            replace={
                "--port 9093": f"--port {FLOWER} & link=$!; sleep 10",
                "127.0.0.1:9093": f"127.0.0.1:{FLOWER}",
                "--port 9094": f"--port {NODE}",
                'out="/srv/oslo"\'': 'out="/srv/oslo"\' & node=$!; sleep 10',
                "/srv/": "'$PWD'/",
            },
            after="""
            for second in $(seq 120); do test -f run/metrics.json && break; sleep 1; done
            kill $node $link; test -f oslo/metrics.json
            """,
        ),
    },
    "docs/embeddings.md": {
        "fedgmm fit": StandIn(files=image_files),
        "fedgmm client": StandIn(
            before=SERVER_OF_IMAGES, replace={"HOST:9092": f"localhost:{PORT}"}, after="wait"
        ),
    },
    "docs/privacy.md": {
        "fedgmm demo": StandIn(replace={**A_SERVER, "rounds = 20": "rounds = 3"}, after="wait")
    },
    "docs/scale.md": {
        "torchrun": StandIn(
            before="fedgmm demo --write-files .",
            replace={
                "--nproc-per-node 8": "--nproc-per-node 2",
                "--nproc-per-node 4": "--nproc-per-node 2",
                "torchrun --nnodes 4": "mv run first; torchrun --nnodes 1",
                "host0:29400": f"localhost:{PORT}",
                "--label diagnosis": "--label diagnosis --rounds 3",
            },
        )
    },
}
"""By page and by the beginning of a block."""


def stand_in_of(block: Block) -> StandIn:
    found = [
        one
        for start, one in STAND_INS.get(named(block.page), {}).items()
        if block.text.startswith(start)
    ]
    assert len(found) < 2, str(block)
    return found[0] if found else StandIn()


def script_of(page: Path) -> str:
    """Return the blocks of a page as one script."""
    parts = []
    for block in blocks_of(page):
        if block.kind != "sh" or block.is_measurement:
            continue
        stand_in, text = stand_in_of(block), block.text
        for printed, here in stand_in.replace.items():
            assert printed in text, f"{block}: {printed}"
            text = text.replace(printed, here)
        parts += [stand_in.before, text, stand_in.after]
    return "\n".join(parts)


STUDIES = ROOT / "docs" / "images.md"
"""Hours on a GPU, so a test of its own runs its commands on small data."""
SCRIPTS = [
    page
    for page in pages_with("sh")
    if page != STUDIES
    and any(not block.is_measurement for block in blocks_of(page) if block.kind == "sh")
]


def test_every_stand_in_has_its_block():
    assert set(STAND_INS) <= {named(page) for page in SCRIPTS}
    for page, stand_ins in STAND_INS.items():
        texts = [block.text for block in blocks_of(ROOT / page) if block.kind == "sh"]
        for start in stand_ins:
            assert sum(text.startswith(start) for text in texts) == 1, f"{page}: {start}"


@pytest.mark.parametrize("page", SCRIPTS, ids=named)
def test_shell_blocks_are_correct_shell(page):
    done = subprocess.run(["bash", "-n", "-c", script_of(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", SCRIPTS, ids=named)
def test_shell_blocks_run(page, tmp_path):
    """Run them in an empty folder, with the command on the path."""
    for block in blocks_of(page):
        stand_in_of(block).files(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        # the programs in the background end with the script
        ["timeout", "900", "bash", "-e", "-c", f"trap 'kill 0' TERM\n{script_of(page)}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Traceback" not in done.stderr


def test_commands_of_the_page_about_files_work(tmp_path, monkeypatch):
    """Run the printed commands in this process, which need not import torch for each of them."""
    monkeypatch.chdir(tmp_path)
    first = next(block for block in blocks_of(ROOT / "docs" / "files.md") if block.kind == "sh")
    for line in first.text.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        else:
            assert words[0] == "fedgmm"
            files = [sorted(Path().glob(word)) if "*" in word else [word] for word in words[1:]]
            # slow tests run the blocks as printed
            sizes = ["--components", "2", "--learners", "2"]
            fewer = {
                "fit": ["--rounds", "5"],
                "compare": ["--rounds", "2", "--learner", "linear", *sizes],
            }.get(words[1], [])
            works(*chain.from_iterable(files), *fewer)
    assert (tmp_path / "hospitals" / "run" / "report.html").is_file()


def test_the_shell_blocks_show_every_command():
    def lines_of(name: str) -> list[str]:
        blocks = [block for block in blocks_of(ROOT / name) if block.kind == "sh"]
        lines = chain.from_iterable(block.text.splitlines() for block in blocks)
        return [line.split("#")[0].strip() for line in lines if not line.startswith("make ")]

    commands = set(lines_of("docs/files.md"))
    shown = {line.split()[1] for line in commands if line.startswith("fedgmm ")}
    assert shown >= {"demo", "inspect", "fit", "evaluate", "predict", "adapt", "detect", "compare"}
    assert shown >= {"report", "resume", "watch"}
    for page in ("README.md", "docs/index.md"):  # they show the beginning of the same commands
        assert set(lines_of(page)) <= commands


@pytest.mark.slow
@pytest.mark.usefixtures("thin_mobilenet")
def test_the_printed_studies_run(tmp_path, monkeypatch):
    """Small data sets in the layouts of the real ones, and random weights instead of ImageNet's."""
    import torch
    from safetensors.torch import save_file

    from fedgmm.nets import backbones

    monkeypatch.chdir(tmp_path)
    few = {"feature_choices": (4,), "scatter_clients": 2, "scatter_rows": 30}
    for module, study, *_ in studies._CODE.values():
        if module.startswith("paper.") and study not in ("", "Size"):
            code = import_module(f"fedgmm.experiments.{module}")
            smaller = {"features": 4, **(few if study == "NoveltyStudy" else {})}
            monkeypatch.setattr(code, study, partial(getattr(code, study), **smaller))
    write_femnist(tmp_path / "data")
    write_mnist(tmp_path / "data", monkeypatch)
    write_cifar10(tmp_path / "data", monkeypatch)
    torch.manual_seed(0)
    weights = backbones.MobileNetV2(1000).state_dict()
    save_file(weights, tmp_path / "mobilenet_v2_imagenet.safetensors")
    small = ["--rounds", "2", "--tuning-rounds", "1", "--seeds", "1", "--encoder", "pixels"]
    small += ["--components", "2", "--learners", "2", "--clients", "5"]
    lines = [line for block in blocks_of(STUDIES) for line in block.commands]
    assert len(lines) >= 5
    for number, line in enumerate(lines):
        words = shlex.split(line.replace("cuda", "cpu"))[1:]
        learner = [] if "--pretrained" in words else ["--learner", "linear"]
        methods = "fedavg" if "--pretrained" in words else "fedavg,fedgmm"
        methods = "fedgmm" if "sensitivity" in words else methods
        works(*words, *small, *learner, "--methods", methods, "--out", "out")
        assert list((tmp_path / "out").glob(f"{words[1]}*.md")), line
        (tmp_path / "out").rename(f"out{number}")


# ---------------------------------------------------------------------- options, without running

INLINE = re.compile(r"`((?:fedgmm|python benchmarks/)[^`]*)`")


def shown_commands(start: str) -> list[tuple[str, list[str]]]:
    """Return the words of all commands in blocks and in backticks, with the place of each."""
    found = [
        (str(block), line[line.index(start) :])
        for block in of_kind("sh")
        for line in block.commands
        if start in line
    ]
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        found += [(named(page), one) for one in INLINE.findall(text) if one.startswith(start)]
    return [(place, line.split()) for place, line in found]


def test_commands_and_options_of_all_shown_commands_exist():
    options = {
        name: {
            one
            for parameter in command.params
            for one in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in generate.commands()
    }
    groups = {name.rpartition(" ")[0] for name in options}
    shown, wrong = shown_commands("fedgmm "), []
    for place, words in shown:
        given = {word.split("=")[0].rstrip(",;") for word in words if word.startswith("--")}
        name = " ".join(words[: 3 if " ".join(words[:2]) in groups - {"fedgmm"} else 2])
        if name.startswith("fedgmm -"):
            continue  # options of all commands
        if name not in options or not given - {"--help"} <= options[name]:
            wrong.append(f"{place}: {' '.join(words)}")
    assert len(shown) > 100
    assert not wrong


def test_options_of_shown_benchmarks_exist_and_every_benchmark_is_tried():
    shown = shown_commands("python benchmarks/")
    assert len(shown) >= 9
    for place, words in shown:
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        given = [word for word in words if word.startswith("--")]
        assert all(f'add_argument("{option}"' in source for option in given), place
    tried = (ROOT / "tests" / "test_benchmarks.py").read_text(encoding="utf-8")
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        if "ArgumentParser" in script.read_text(encoding="utf-8"):
            assert f'"{script.name}"' in tried, script.name


def test_extras_that_pages_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"fedgmm\[([a-z]+)\]", text))
    assert len(shown) >= 4
    assert shown <= set(project["optional-dependencies"])


def test_the_printed_app_is_where_the_page_says():
    package = importlib.util.find_spec("fedgmm")
    assert (Path(package.origin).parent / "federation" / "flower" / "app").is_dir()


def test_there_is_something_to_run():
    assert "FederatedGaussianMixture" in python_of(ROOT / "docs" / "federated-gmm.md")
    assert "train(" in python_of(ROOT / "README.md")
