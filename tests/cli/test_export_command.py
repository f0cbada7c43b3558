"""Commands that hand a run to others: the ONNX file of a client, and the model card."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime

import fedgmm
from fedgmm.data.tables.loading import read_rows
from small_runs import fails, works


def test_export_answers_as_predict_does(finished, tmp_path):
    out = tmp_path / "oslo.onnx"
    assert "oslo.onnx" in works(
        "export", finished / "run", "--client", "oslo", "--out", out
    ).stderr.replace("\n", "")
    run = fedgmm.open_run(finished / "run")
    session = onnxruntime.InferenceSession(out)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["columns"]) == list(run.preprocessing.feature_names)
    matrix = read_rows(finished / "new.csv", run.preprocessing).matrix
    label, _, proba, density = session.run(None, {"X": matrix})
    found = run.predict(finished / "new.csv", "oslo")
    assert label.tolist() == found.labels.tolist()
    np.testing.assert_allclose(proba, found.probabilities, atol=1e-5)
    np.testing.assert_allclose(density, found.log_density, rtol=1e-5)


def test_export_without_a_client_and_its_errors(finished, tmp_path):
    home, out = finished / "run", tmp_path / "all.onnx"
    record = json.loads(works("export", home, "--out", out, "--json").stdout)
    assert record["client"] is None
    assert out.is_file()
    assert "paris" in fails("export", home, "--client", "paris", "--out", out)
    assert "no_such_folder" in fails("export", home, "--out", tmp_path / "no_such_folder" / "a")


def test_card_is_written_beside_the_run_or_elsewhere(finished, tmp_path):
    home, out = finished / "run", tmp_path / "mine.md"
    assert str(home / "card.md") in works("card", home).stdout
    assert json.loads(works("card", home, "--out", out, "--json").stdout) == {"card": str(out)}
    assert out.read_bytes() == (home / "card.md").read_bytes()
    assert "no_such_run" in fails("card", tmp_path / "no_such_run")
