"""The benchmark runs, prints what it promises, and counts what it says it counts."""

import importlib.util
import json
import mmap
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "federated_gmm.py"


def script_as_module(script):
    spec = importlib.util.spec_from_file_location(f"{script.stem}_benchmark", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark():
    return script_as_module(SCRIPT)


def quick_run(script, folder, *arguments):
    """What a script prints, and the results that it writes."""
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, script, "--quick", *arguments, "--json", results],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(results.read_text())


@pytest.mark.slow
def test_quick_run_prints_tables_and_writes_json(tmp_path):
    sizes = ["--setting", "4x50x4x2", "--scaling-rows", "400", "--scaling-clients", "2", "40"]
    printed, found = quick_run(SCRIPT, tmp_path, *sizes, "--split-rows", "400")
    assert printed.strip().splitlines()[-1].startswith("ratio: min ")
    for heading in ("rows/s", "CPU s/iter", "of GEMM", "peak/data", "k-means start"):
        assert heading in printed
    assert {s["side"] for s in found["comparisons"]} == {
        "fedgmm",
        "fedgmm, shared weights",
        "scikit-learn, pooled",
    }
    assert [
        p["setting"]["clients"] for p in found["scaling"]["The same rows, split over clients"]
    ] == [
        2,
        40,
    ]


def test_setting_is_read_from_text(benchmark):
    setting = benchmark.Setting.parse("300x3000x32x3")
    assert (setting.all_rows, setting.columns, setting.components) == (900_000, 32, 3)
    assert setting.flops_per_iteration == 4 * 3 * 32**2 * 900_000
    assert benchmark.Setting.parse("2x3x4x5:dict").form == "dict"


@pytest.mark.parametrize("text", ["", "1x2x3", "1x2x3x0", "axbxcxd", "1x2x3x4:list"])
def test_bad_settings_are_refused(benchmark, text):
    with pytest.raises(ArgumentTypeError, match="expected"):
        benchmark.Setting.parse(text)


@pytest.mark.parametrize("form", ["ids", "dict"])
def test_both_sides_get_the_same_rows(benchmark, form):
    setting = benchmark.Setting(5, 7, 3, 2, form)
    rows = benchmark.make_rows(setting)
    inputs = benchmark.client_inputs(setting, rows)
    if form == "dict":
        np.testing.assert_array_equal(np.concatenate(list(inputs["X"].values())), rows)
        assert all(np.shares_memory(part, rows) for part in inputs["X"].values())
    else:
        assert inputs["X"] is rows
        np.testing.assert_array_equal(np.bincount(inputs["clients"]), [7] * 5)


def test_cost_of_an_iteration_is_the_difference_of_two_fits(benchmark):
    assert benchmark.per_iteration((3.0, 11.0), (2, 6)) == 2.0
    assert benchmark.per_iteration((3.0, 2.4), (2, 6)) == pytest.approx(0.4)  # lost in noise


def test_memory_counts_an_array_that_is_made(benchmark):
    before = benchmark.memory_now()
    size = 32_000_000
    # straight from the system: memory that an earlier test gave back could be used again
    with mmap.mmap(-1, size) as fresh:
        fresh.write(b"1" * size)
        assert benchmark.memory_now() - before > 0.9 * size
        assert benchmark.memory_peak() >= benchmark.memory_now() - 2**20


def test_different_numbers_are_an_error(benchmark):
    def summary(side, bound):
        setting = benchmark.Setting(1, 1, 1, 1)
        return benchmark.Summary(setting, 1, side, 1, 1, 1, 1, 1, 1, 1, bound, 1, (1.0,))

    reference = summary(benchmark.REFERENCE, -2.0)
    assert benchmark.check_same_numbers([reference, summary(benchmark.SHARED, -2.0)]) == 0
    with pytest.raises(RuntimeError, match="did not compute the same"):
        benchmark.check_same_numbers([reference, summary(benchmark.SHARED, -2.1)])


def test_ratio_is_taken_against_the_fastest_reference(benchmark):
    def summary(side, threads, seconds):
        setting = benchmark.Setting(1, 1, 1, 1)
        return benchmark.Summary(setting, threads, side, seconds, 1, 1, 1, 1, 1, 1, 1, 1, (1.0,))

    ours = summary(benchmark.PRIVATE, 2, 1.0)
    slow_on_two = [summary(benchmark.REFERENCE, 1, 3.0), summary(benchmark.REFERENCE, 2, 9.0)]
    assert benchmark.ratio(ours, slow_on_two) == 3.0


FEDERATION_ROUNDS = SCRIPT.with_name("federation_rounds.py")
SCALE = SCRIPT.with_name("federation_scale.py")
ROUNDS_ON_A_GPU = SCRIPT.with_name("gpu_rounds.py")


@pytest.mark.slow
def test_federation_rounds_compares_both_sides_and_counts_every_method(tmp_path):
    printed, found = quick_run(FEDERATION_ROUNDS, tmp_path)
    assert printed.strip().splitlines()[-1].startswith("overhead: ")
    assert found["apart"] < 1e-5
    assert found["federation"]["startup"] > 0
    assert min(found["federation"]["rounds"]) > min(found["in_process"]["rounds"]) > 0
    assert len(found["bytes"]) == 11  # eight methods, the density alone, two more of FedGMM
    assert found["bytes"]["fedgmm, mlp, float16"][1] < 0.6 * found["bytes"]["fedgmm, mlp"][1]
    for payload in found["payloads"]:
        for way in ("wire_to_client", "wire_to_server"):
            assert payload["bytes"] < payload[way] < 2 * payload["bytes"] + 50_000


@pytest.mark.slow
def test_federation_scale_loads_the_server_and_the_network(tmp_path):
    _, found = quick_run(SCALE, tmp_path)
    small, large = found["alone"]
    assert large["bytes_received"] > 5 * small["bytes_received"]
    assert all(one["seconds"] > 0 for one in found["alone"])
    (sites,) = found["sites"]
    assert sites["exchanges"][0]["seconds"] > 0


@pytest.mark.slow
def test_gpu_rounds_compares_both_sides_on_any_device(tmp_path):
    printed, found = quick_run(ROUNDS_ON_A_GPU, tmp_path, "--device", "cpu")
    assert printed.strip().splitlines()[-1].startswith("ratio: min ")
    for one in found:
        assert min(one["seconds"].values()) > 0
        assert one["few_clients_apart"]["round"]["learners"] < 1e-10
        assert one["few_clients_apart"]["round"]["losses"] < 1e-5


def gpu_rounds_of_two_clients():
    benchmark = script_as_module(ROUNDS_ON_A_GPU)
    small = replace(benchmark.QUICK[0], clients=2, rows=20, largest=10, shape=(1, 8, 8))
    return benchmark, small


def test_gpu_rounds_refuses_to_time_two_sides_that_differ(monkeypatch):
    benchmark, small = gpu_rounds_of_two_clients()
    cpu = benchmark.torch.device("cpu")
    assert benchmark.compare(small, cpu)["round"].learners < 1e-10
    train = benchmark._train

    def forgets_the_last_row(own, rows, order, *rest):
        train(own, rows, order[:-1], *rest)

    monkeypatch.setattr(benchmark, "_train", forgets_the_last_row)
    with pytest.raises(SystemExit, match="FEMNIST, small: with 2 clients the two sides differ"):
        benchmark.compare(small, cpu)


def test_gpu_rounds_refuses_a_side_that_is_not_a_number(monkeypatch):
    benchmark, small = gpu_rounds_of_two_clients()
    monkeypatch.setattr(benchmark, "_distance", lambda *_: float("nan"))
    with pytest.raises(SystemExit, match="differ"):
        benchmark.compare(small, benchmark.torch.device("cpu"))


@pytest.mark.slow
def test_the_benchmark_of_masks_checks_its_sums(tmp_path):
    printed, found = quick_run(SCRIPT.with_name("privacy.py"), tmp_path)
    assert "client ms" in printed
    assert [(one["sites"], one["dropped"]) for one in found] == [(10, 0), (10, 1)]


@pytest.mark.slow
def test_ranks_print_seconds_and_bytes(tmp_path):
    script = SCRIPT.with_name("ranks.py")
    printed, found = quick_run(script, tmp_path, "--ranks", "1", "2")
    assert "bytes/round" in printed
    assert {one["ranks"] for one in found} == {1, 2}
    assert all((one["bytes"] > 0) == (one["ranks"] > 1) for one in found)


@pytest.mark.slow
def test_vectors_are_trained_on_by_all_sides(tmp_path):
    printed, found = quick_run(SCRIPT.with_name("embeddings.py"), tmp_path)
    assert "LogisticRegression" in printed
    assert all(one["seconds"] > 0 and one["accuracy"] > 0.7 for one in found)


@pytest.mark.slow
def test_endurance_ends_with_the_parameters_of_an_undisturbed_run(tmp_path):
    _, found = quick_run(SCRIPT.with_name("federation_endurance.py"), tmp_path)
    assert set(found) >= {"restarts", "kills", "soak"}
    assert all(found[name]["difference"] <= 1e-10 for name in ("restarts", "kills"))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["files.py", "rounds.py"])
def test_other_benchmarks_print_what_they_measured(script, tmp_path):
    printed, found = quick_run(SCRIPT.with_name(script), tmp_path)
    assert printed.strip()
    assert found
