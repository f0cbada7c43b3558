"""The tables say what the result says."""

from rich.console import Console

from fedgmm.experiments.demo import run_demo
from fedgmm.experiments.tables import demo_table


def text_of(table):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_demo_table_has_a_line_a_client_and_the_mean_error():
    result = run_demo(clients=3, seed=0)
    text = text_of(demo_table(result))
    for name, error in zip(result.data.rows, result.weight_errors, strict=True):
        (line,) = [line for line in text.splitlines() if f" {name} " in line]
        assert f"{error:.3f}" in line
    assert f"{result.weight_errors.mean():.3f}" in text


def test_demo_table_leaves_out_what_is_too_long():
    text = text_of(demo_table(run_demo(clients=5, seed=0), most_clients=2))
    assert "client 2" in text
    assert "client 3" not in text
    assert "3 more" in text
