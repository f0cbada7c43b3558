"""The report of a run, made from the files of its folder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgmm.data.tables.files import Notify
from fedgmm.report.contents import AdaptationRecord
from fedgmm.report.gathering import gather
from fedgmm.report.page import write_report
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunFolder, read_history, read_json

if TYPE_CHECKING:
    from fedgmm.runs.run import FederatedRun


def write_run_report(run: FederatedRun, notify: Notify = lambda _: None) -> Path:
    """Write ``report.html`` into the run folder; the data files are read again if necessary."""
    folder = run.folder
    dataset = run.data(notify)
    notify("writing the report")
    with folder.lock():
        contents = gather(
            run.model,
            dataset,
            title=folder.home.resolve().name,
            history=read_history(folder.history),
            configuration=_configuration(folder),
            feature_names=run.preprocessing.feature_names,
            baselines=_baselines(folder, run.model.algorithm),
            adaptations=_adaptations(folder, run.model.names),
            notes=run.metrics.get("notes", []),
        )
        return write_report(contents, folder.report)


def _configuration(folder: RunFolder) -> dict[str, Any]:
    """Return the configuration without the paths of the files, which a reader need not know."""
    sections = read_config(folder.config)
    files = sections["data"].pop("files", [])
    sections["data"]["files"] = len(files)
    return sections


def _baselines(folder: RunFolder, own: str) -> dict[str, Mapping[Any, float]]:
    """Return the accuracies of the other methods in ``comparison.json``, per client."""
    if not folder.comparison.is_file():
        return {}
    return {
        entry["algorithm"]: entry["clients"]
        for entry in read_json(folder.comparison, list)
        if entry["algorithm"] != own and "clients" in entry
    }


def _adaptations(folder: RunFolder, known: Sequence[Hashable]) -> list[AdaptationRecord]:
    """Return the clients that joined after training and that the model knows."""
    found = []
    for path in sorted(folder.weights.glob("*.json")):
        record = read_json(path)
        if record.get("took_part", True) or record["client"] not in known:
            continue
        curve = record.get("curve") or []
        found.append(
            AdaptationRecord(
                client=str(record["client"]),
                rows=[int(point["rows"]) for point in curve] or [int(record["rows"])],
                accuracy=[float(point["accuracy"]) for point in curve] if curve else None,
                log_likelihoods=list(record["log_likelihoods"]),
                labelled=bool(record["labelled"]),
            )
        )
    return found
