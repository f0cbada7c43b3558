"""What is imported when: the core without Flower, and Flower's side without torch."""

import subprocess
import sys

import pytest


def imported(statement):
    code = f"import sys; {statement}; print(' '.join(sorted(sys.modules)))"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


@pytest.mark.parametrize(
    "statement",
    [
        "import fedgmm.cli",
        "import fedgmm.federation.coordinator, fedgmm.federation.site",
        "from fedgmm import fit, train, FedGMMClassifier",
    ],
)
def test_the_core_never_imports_flower(statement):
    modules = imported(statement)

    assert "flwr" not in modules
    assert "fedgmm.flower.inner" not in modules


def test_the_app_of_a_node_and_its_programs_are_light():
    modules = imported(
        "import fedgmm.flower.client_app, fedgmm.flower.client, fedgmm.flower.supernode, "
        "fedgmm.flower.superlink"
    )

    assert not {"torch", "pandas", "sklearn", "scipy", "pyarrow"} & modules
