"""Imports: the core imports neither Flower nor gRPC, and Flower's app does not import torch."""

import subprocess
import sys

CORE = (
    "import fedgmm.cli",
    "import fedgmm.federation.server, fedgmm.federation.site",
    "from fedgmm import fit, train, FedGMMClassifier",
)


def imported(*statements):
    """Return the names of all loaded modules after each statement, in one process."""
    code = "import sys\n" + "".join(
        f"{one}\nprint(' '.join(sorted(sys.modules)))\n" for one in statements
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    return [set(line.split()) for line in printed.splitlines()]


def test_the_core_never_imports_a_transport():
    for statement, modules in zip(CORE, imported(*CORE), strict=True):
        assert "fedgmm" in modules, statement
        assert "flwr" not in modules, statement
        assert "grpc" not in modules, statement


def test_the_app_of_a_node_is_light():
    (modules,) = imported("import fedgmm.federation.flower.client_app")

    assert not {"torch", "pandas", "sklearn", "scipy", "pyarrow"} & modules
