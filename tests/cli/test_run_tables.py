"""Terminal tables: complete, cut short if they are long, and safe for any name."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from fedgmm.cli.run_tables import (
    adaptation_table,
    confusion_table,
    evaluation_table,
    inspection_tables,
    metrics_table,
    pooled_table,
)
from fedgmm.data.tables.inspection import inspect_tables
from fedgmm.data.tables.loading import read_tables
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.model.adaptation import Adaptation
from fedgmm.model.decisions import Decision
from fedgmm.model.metrics import Evaluation, evaluate
from fedgmm.runs.run import Adapted
from small_runs import SITES, write_csv, write_sites


def shown(*tables, width=160):
    screen = io.StringIO()
    for table in tables:
        Console(file=screen, width=width).print(table)
    return " ".join(screen.getvalue().split())


def evaluation(clients):
    accuracy = np.linspace(0.9, 0.5, clients)
    return Evaluation(
        tuple(f"[red]c{i}" for i in range(clients)),
        np.arange(1, clients + 1),
        accuracy,
        np.full(clients, 0.25),
        np.full(clients, 0.125),
    )


def test_the_worst_client_comes_first():
    text = shown(evaluation_table(evaluation(3)))
    places = [text.index(f"[red]c{i}") for i in (2, 1, 0)]
    assert places == sorted(places)
    assert "70.0 %" in text  # mean over clients
    assert "all rows together" in text
    assert f"{100 * (0.9 + 1.4 + 1.5) / 6:.1f} %" in text
    assert "0.125" in text


def rare(clients=3, rows=300):
    rng = np.random.default_rng(0)
    labels = np.zeros(clients * rows, dtype=int)
    labels[:: rows // 3] = 1
    labels[:rows] = 0  # the first client has no positive row
    p = np.where(labels == 1, 0.4, 0.05) + 0.1 * rng.random(len(labels))
    codes = np.repeat(np.arange(clients), rows)
    names = tuple(f"c{i}" for i in range(clients))
    return evaluate(
        np.log(np.stack([1 - p, p], 1)),
        labels,
        codes,
        names,
        classes=("fine", "[b]fraud"),
        decision=Decision(1, 0.3),
    )


def test_a_rare_class_puts_average_precision_first():
    found = rare()
    text = shown(evaluation_table(found))
    assert text.index("average precision") < text.index("base rate") < text.index("AUC")
    assert text.index("c1") < text.index("c0")  # undefined values come last
    assert "c0 │ 300 │ – │ 0.0 % │ –" in text
    pooled = shown(pooled_table(found))
    assert "positive class [b]fraud, predicted from a probability of 0.3 on" in pooled
    assert pooled.index("average precision") < pooled.index("base rate") < pooled.index("accuracy")
    assert "sensitivity │ 100.0 % │ 54.1 % to 100.0 %" in pooled  # six rows: 0.025^(1/6)
    assert "AUC │ 1.000 │ │" in pooled
    assert "predicted [b]fraud" in shown(confusion_table(found))


def test_the_final_table_of_a_rare_class():
    summary = rare().summary()
    metrics = {"algorithm": "fedgmm", "rounds": 7, "test": summary}
    assert "average precision" not in shown(metrics_table(metrics))
    text = shown(metrics_table({**metrics, "leading_metric": "average_precision"}))
    assert f"test │ {summary['average_precision']:.3f} │ {summary['base_rate']:.1%}"[:-1] in text


def test_only_clients_metrics_make_one_table():
    assert pooled_table(evaluation(3)) is None
    assert confusion_table(evaluation(3)) is None


def test_many_clients_are_cut_short():
    text = shown(evaluation_table(evaluation(75)))
    assert "… 15 more" in text
    assert "[red]c74" in text  # the worst
    assert "[red]c0 " not in text  # the best


def test_metrics_of_the_splits_there_are():
    own = {
        "mean_accuracy": 0.875,
        "weighted_accuracy": 0.625,
        "worst_decile": 0.75,
        "worst_accuracy": 0.5,
        "mean_log_loss": 0.3,
    }
    text = shown(metrics_table({"algorithm": "fedgmm", "rounds": 7, "train": own, "test": own}))
    assert "fedgmm, 7 rounds" in text
    assert "87.5 %" in text
    assert "62.5 %" in text
    assert "train" in text
    assert "validation" not in text


def test_sizes_that_were_chosen_are_shown():
    metrics = {"algorithm": "fedgmm", "rounds": 7}
    assert "chosen" not in shown(metrics_table({**metrics, "selection": None}))
    chosen = {"components": 1, "learners": 2}
    text = shown(metrics_table({**metrics, "selection": chosen}))
    assert "1 Gaussian and 2 learners, chosen" in text


def test_weights_of_a_newcomer():
    weights = np.array([[0.5, 0.25], [0.125, 0.125]])
    curve = [{"rows": 0, "accuracy": 0.5}, {"rows": 20, "accuracy": 0.75}]
    adapted = Adapted(Adaptation("[b]x", weights, []), 41, True, curve, [])
    text = shown(adaptation_table(adapted))
    assert "[b]x joined with 41 labelled rows" in text
    assert "0.500" in text
    assert "50.0 % with the federation's weights, 75.0 % with its own from 20 rows" in text
    plain = shown(adaptation_table(Adapted(adapted.adaptation, 41, False, [], [])))
    assert "unlabelled" in plain
    assert "held-out" not in plain


def test_clients_and_columns_of_files(tmp_path):
    write_sites(tmp_path)
    found = inspect_tables(read_tables([tmp_path], TableOptions("state")))
    text = shown(*inspection_tables(found))
    for name in (*SITES, "age", "dose", "ward", "class ill", "class well"):
        assert name in text
    assert "3 clients, 200 rows" in text
    assert "labels differ by" in text
    without = inspect_tables(read_tables([tmp_path], TableOptions(None)))
    assert "labels differ by" not in shown(*inspection_tables(without))


def test_no_name_is_cut_on_a_narrow_screen(tmp_path):
    long = "a_category_of_many_words"
    rows = [{"x": i, "colour": f"{long}_{i % 6}", "y": i % 2} for i in range(60)]
    sites = ("site_of_the_north_tromso", "site_of_the_north_trondheim")
    for name in sites:
        write_csv(tmp_path / f"{name}.csv", rows)
    found = inspect_tables(read_tables([tmp_path], TableOptions("y")))
    text = shown(*inspection_tables(found), width=80)
    assert "…" not in text.replace(", …", "")
    for name in ("colour", "category", "missing"):
        assert name in text
    clients, *_ = inspection_tables(found)
    column = [line.split("│")[1].strip() for line in _lines(clients, 60) if "│" in line]
    assert "".join(column) == "".join(sites)


def _lines(table, width):
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    return screen.getvalue().splitlines()


def test_many_classes_are_joined(tmp_path):
    rows = [{"x": number, "y": f"k{number % 9}"} for number in range(90)]
    write_csv(tmp_path / "a.csv", rows)
    found = inspect_tables(read_tables([tmp_path], TableOptions("y")))
    text = shown(*inspection_tables(found))
    assert "other classes" in text
    assert " 30 " in text  # three classes of ten rows
