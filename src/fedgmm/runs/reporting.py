"""The report of a run, made from the files of its folder."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgmm.core.paired import Estimate
from fedgmm.data.embed import originals
from fedgmm.data.tables.files import Notify, client_name
from fedgmm.data.tables.loading import read_rows
from fedgmm.methods.base import TITLES
from fedgmm.report.contents import AdaptationRecord, ExampleGroup
from fedgmm.report.examples import THUMBNAIL, SiteRows, gather_examples
from fedgmm.report.gathering import gather
from fedgmm.report.page import write_report
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunError, RunFolder, read_history, read_json

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel
    from fedgmm.runs.run import FederatedRun


def write_run_report(
    run: FederatedRun, notify: Notify = lambda _: None, *, pictures: bool = False
) -> Path:
    """Write ``report.html`` into the run folder; the data files are read again if necessary.

    Args:
        run: the run.
        notify: called with a line before each step.
        pictures: put thumbnails of images, or excerpts of texts, into the page.
    """
    folder = run.folder
    dataset = run.data(notify)
    examples = _examples(run, notify) if pictures else []
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
            columns=_columns(run),
            baselines=baselines,
            differences=differences,
            adaptations=_adaptations(folder, run.model.names),
            notes=[*run.metrics.get("notes", []), *notes],
            examples=examples,
        )
        return write_report(contents, folder.report)


def _examples(run: FederatedRun, notify: Notify) -> list[ExampleGroup]:
    """Read the images or texts behind the vectors of the run, and choose some of them."""
    position = {name: code for code, name in enumerate(run.model.names)}
    sites = []
    for path in map(Path, run.config.files):
        notify(f"looking at the images or texts of {path.stem}")
        found = originals(path, THUMBNAIL)
        if found is None:
            raise RunError(
                f"{path.name} does not name images or texts, so there are no pictures to show. They are "
                "known if fedgmm embed, or fedgmm fit with --images or --text, made the vectors."
            )
        rows = read_rows(path, run.preprocessing, ids=[found.id_column], notify=notify)
        codes = [position.get(name, -1) for name in rows.clients or [client_name(path)]]
        whose = np.broadcast_to(np.array(codes), len(rows.matrix))
        known = np.flatnonzero(whose >= 0)
        labels = None if rows.labels is None else rows.labels[known]
        ids = rows.ids[found.id_column][known].tolist()
        sites.append(
            SiteRows(rows.matrix[known], whose[known], labels, list(map(str, ids)), found.load)
        )
    return gather_examples(run.model, sites)


def _columns(run: FederatedRun) -> dict[str, list[int]]:
    """Return the inputs that each column of the files becomes; entries of a vector count together."""
    groups = run.preprocessing.feature_groups
    if run.model.projection is None:
        return groups
    together: dict[str, list[int]] = {}
    for name, places in groups.items():
        vector, _, entry = name.rpartition("_")
        is_entry = entry.isdecimal() and f"{vector}_0" in groups
        together.setdefault(vector if is_entry else name, []).extend(places)
    return together


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
