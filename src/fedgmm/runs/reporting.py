"""The report of a run, made from the files of its folder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgmm.core.paired import Estimate
from fedgmm.data.tables.files import Notify
from fedgmm.methods.base import TITLES
from fedgmm.report.contents import AdaptationRecord
from fedgmm.report.gathering import gather
from fedgmm.report.page import write_report
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunFolder, read_history, read_json

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel
    from fedgmm.runs.run import FederatedRun


def write_run_report(run: FederatedRun, notify: Notify = lambda _: None) -> Path:
    """Write ``report.html`` into the run folder; the data files are read again if necessary."""
    folder = run.folder
    dataset = run.data(notify)
    notify("writing the report")
    with folder.lock():
        baselines, differences, notes = _comparison(folder, run.model)
        contents = gather(
            run.model,
            dataset,
            title=folder.home.resolve().name,
            history=read_history(folder.history),
            configuration=_configuration(folder),
            feature_names=run.preprocessing.feature_names,
            columns=run.preprocessing.feature_groups,
            baselines=baselines,
            differences=differences,
            adaptations=_adaptations(folder, run.model.names),
            notes=[*run.metrics.get("notes", []), *notes],
        )
        return write_report(contents, folder.report)


def _configuration(folder: RunFolder) -> dict[str, Any]:
    """Return the configuration without the paths of the files, which a reader need not know."""
    sections = read_config(folder.config)
    files = sections["data"].pop("files", [])
    sections["data"]["files"] = len(files)
    return sections


def _comparison(
    folder: RunFolder, model: FederatedModel
) -> tuple[dict[str, Mapping[Any, float]], dict[str, Estimate], list[str]]:
    """Return other methods' accuracies per client, the run's lead over each, and remarks.

    All are empty without ``comparison.json``. Earlier versions wrote a list without tests.
    """
    if not folder.comparison.is_file():
        return {}, {}, []
    record = read_json(folder.comparison, object)
    methods = record["methods"] if isinstance(record, dict) else record
    baselines = {
        entry["algorithm"]: entry["clients"]
        for entry in methods
        if entry["algorithm"] != model.algorithm and "clients" in entry
    }
    own: dict[str, Any] = next((one for one in methods if one["algorithm"] == model.algorithm), {})
    against = own.get("against", {})
    notes = [record["intervals"]] if isinstance(record, dict) else []
    splits = len(record.get("seeds", [])) if isinstance(record, dict) else 1
    if splits > 1:
        notes.append(
            f"Leads over other methods and ties are those of {splits} splits; the chart and all other "
            "figures are those of the run's own split."
        )
    if isinstance(record, dict) and record.get("metric", "mean_accuracy") != "mean_accuracy":
        against, notes = {}, [record["headline"], *notes]  # the page compares accuracies
        if model.target is not None:
            baselines = {}
    learner = model.options.get("learner")
    if own.get("learner", learner) != learner:
        notes.append(
            f"fedgmm compare chose {own['learner']} learners for {TITLES[model.algorithm]} on validation "
            f"rows ({100 * own['mean_accuracy']:.1f} % of the test rows right) and tested those against "
            f"the other methods; this run has {learner} learners."
        )
    return baselines, {name: Estimate.from_record(one) for name, one in against.items()}, notes


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
