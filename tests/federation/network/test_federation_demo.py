"""A small version of the demonstration of a federation."""

import pytest

from fedgmm.federation.demo import FederationDemo


@pytest.mark.slow
def test_the_demonstration_runs_from_files_to_report(tmp_path, capsys):
    demo = FederationDemo(tmp_path / "demo", sites=3, rounds=3)

    found = demo.run()

    assert set(found) == {"oslo", "trondheim", "stavanger"}
    assert all(metrics["test"]["mean_accuracy"] > 0.5 for metrics in found.values())
    assert (tmp_path / "demo" / "run" / "report.html").is_file()
    assert (tmp_path / "demo" / "bergen" / "metrics.json").is_file()  # it joined later
    assert demo.seconds["in all"] < 180
    assert len(demo.seconds) == 8  # every phase was seen
    assert "$ fedgmm client" in capsys.readouterr().out
    log = (tmp_path / "demo" / "oslo" / "audit.jsonl").read_text()
    assert '"mask/vector"' in log
    assert '"rows"' not in log
