"""The report and the model card of a run, made from the files of its folder."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgmm.data.embed import originals
from fedgmm.data.tables.files import Notify, client_name
from fedgmm.data.tables.loading import read_rows
from fedgmm.files import write_atomically
from fedgmm.methods.base import DENSITY, TITLES
from fedgmm.privacy.ledger import LEDGER, Ledger, accounts
from fedgmm.report.contents import AdaptationRecord, ExampleGroup
from fedgmm.report.examples import THUMBNAIL, SiteRows, gather_examples
from fedgmm.report.gathering import gather
from fedgmm.report.page import metric_text, metric_title, templates, write_report
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunError, RunFolder, read_history, read_json
from fedgmm.support.paired import Estimate
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.model.model import FederatedModel
    from fedgmm.runs.run import FederatedRun

_METRICS = ("accuracy", "auc", "log_loss", "rmse", "r2", "coverage", "log_density")
_FEW_ROWS = 30  # test rows of a client; an accuracy of 80 % is then uncertain by 15 points
_MOST_CLIENTS = 50
_DELTA = 1e-5  # of a site's ledger, as in fedgmm ledger
_COMMANDS = {
    "run": "fedgmm fit --config config.toml --out again/",
    "server": "fedgmm server --config config.toml --out again/",
    "site": "",  # the server has the configuration
}
_SPECIAL = re.compile(r"([\\`*_|<>\[\]#])")  # characters that act in Markdown
_BLANK = re.compile(r"[\x00-\x1f\x7f]+")


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


# ------------------------------------------------------------------ model card


def write_card(run: FederatedRun, out: str | Path | None = None) -> Path:
    """Write the model card of a run, by default ``card.md`` in its folder, and return the path."""
    path = run.folder.card if out is None else Path(out)
    write_atomically(path, render_card(run).encode("utf-8", "replace"))
    return path


def render_card(run: FederatedRun) -> str:
    """Return the model card; it contains no path of this machine."""
    card = _Card(run)
    # Markdown is not escaped like HTML
    template = templates(_plain, autoescape=False).get_template("card.md")
    text = template.render(card=card)
    # notes may name the folders of the data and of the run
    files = card.sections["data"].get("files", [])
    paths = [PurePath(file).parent for file in files] + [run.folder.home.resolve().parent]
    folders = {str(path) for path in paths if path.is_absolute() and path.name}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{_plain(folder)}/", "").replace(f"{folder}/", "")
    return text


def _plain(value: Any) -> Any:
    """Escape a text, so that a name cannot end a cell or start a link; keep trusted Markdown."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _SPECIAL.sub(r"\\\1", _BLANK.sub(" ", value))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 10
    return ", ".join(names[:10]) + (f" and {counted(more, 'further client')}" if more > 0 else "")


class _Card:
    """The facts of a run that the template of the model card shows."""

    def __init__(self, run: FederatedRun) -> None:
        self.run, self.model, self.labels = run, run.model, run.preprocessing.labels
        self.title = run.folder.home.resolve().name
        self.metrics, self.sections = run.metrics, read_config(run.folder.config)
        self.versions = read_json(run.folder.environment)
        self.clients: dict[str, Any] = self.metrics["clients"]
        records = [read_json(path) for path in sorted(run.folder.weights.glob("*.json"))]
        self.trained, self.joined = (
            {
                str(one["client"]): one["rows"]
                for one in records
                if one.get("took_part", True) == took
            }
            for took in (True, False)
        )
        # a server knows its sites by the bytes they sent, because rows and weights stay with them
        self.names = sorted({*self.trained, *self.clients, *self.metrics.get("traffic", {})})
        known = {name for one in self.clients.values() for name in one}
        wanted = dict.fromkeys([self.metrics.get("leading_metric"), *_METRICS])
        self.shown = [name for name in wanted if name is not None and name in known]
        # of a run in one process, of a server, or of a site
        audited = (run.folder.home / "audit.jsonl").is_file()
        self.role = "server" if self.sections["federation"] else "site" if audited else "run"
        self.command = _COMMANDS[self.role]
        self.listed = _listed(self.names)
        self.titles = [metric_title(name) for name in self.shown]
        self.more = max(0, len(self.clients) - _MOST_CLIENTS)

    @property
    def purpose(self) -> str:
        if self.model.algorithm == DENSITY:
            aim = "scores how familiar a row of a table is"
        else:
            kind = "class" if self.model.target is None else "number"
            aim = (
                f"predicts the column {self.labels.name} (a {kind}) from the other columns of a row"
            )
        count = len(self.names)
        source = {
            "run": f"on the rows of {counted(count, 'client')}, all read on one machine",
            "server": f"by a federation of {counted(count, 'site')}, whose rows stayed with them",
            "site": "by a federation, of which this page shows one site",
        }[self.role]
        return f"This model {aim}. It was trained {source}."

    @property
    def data(self) -> list[str]:
        rows = f", {counted(sum(self.trained.values()), 'row')}" if self.trained else ""
        found = [f"{counted(len(self.names), 'client')}{rows}."]
        if shares := self.sections["data"].get("split"):
            kinds = ("training", "validation", "test")
            parts = (f"{share:.0%} {kind}" for share, kind in zip(shares, kinds, strict=True))
            found.append(f"Split within each client: {', '.join(parts)}.")
        if self.model.target is not None:
            found.append(f"Predicted number: {self.labels.name}.")
        elif self.model.algorithm != DENSITY:
            classes = ", ".join(map(str, self.model.classes.tolist()))
            found.append(f"Predicted column: {self.labels.name}, with the classes {classes}.")
        if self.joined:
            own = ", ".join(f"{name} ({counted(int(n), 'row')})" for name, n in self.joined.items())
            found.append(
                f"Weights that were learned after training, and are not in the results: {own}."
            )
        return found

    @property
    def columns(self) -> list[tuple[str, str]]:
        found = []
        for one in self.run.preprocessing.columns:
            use: str = one.role
            if one.role == "ignored":
                use = f"not used: {one.reason}" if one.reason else "not used"
            elif one.role == "category":
                use = counted(len(one.categories), "category", "categories")
            missing = ", and whether it is missing" if one.indicator else ""
            found.append((one.name, use + missing))
        return found

    @property
    def method(self) -> str:
        model, density = self.model, self.model.algorithm == DENSITY
        parts = ["Federated Gaussian mixture" if density else TITLES[model.algorithm]]
        if model.prediction.gaussians is not None:
            kind = model.prediction.gaussians.covariance_type.replace("diag", "diagonal")
            parts.append(f"{counted(model.n_components, 'Gaussian')} ({kind} covariances)")
        if not density:
            parts.append(f"{counted(model.n_learners, 'learner')} ({model.options.get('learner')})")
        if model.prediction.labels is not None:
            parts.append("label frequencies of each client")
        parts.append(counted(self.metrics["rounds"], "round"))
        stopped = self.metrics.get("stopped")
        return f"{', '.join(parts)}." + (f" Training stopped early: {stopped}." if stopped else "")

    @property
    def options(self) -> str:
        """The configuration without files and addresses; other paths become names."""
        import tomli_w

        kept = {name: dict(one) for name, one in self.sections.items() if name != "server" and one}
        kept["data"].pop("files", None)
        for values in kept.values():
            for name, value in values.items():
                if isinstance(value, str) and PurePath(value).is_absolute():
                    values[name] = PurePath(value).name
        return tomli_w.dumps(kept)

    @property
    def headline(self) -> str:
        if not self.clients:
            rows = "There are no results."
        elif "test" in self.metrics:
            rows = "The results are those of test rows, which Gaussians and learners did not see"
            declared = self.model.privacy is not None
            rows += "." if declared else "; means and categories of columns come from all rows."
        elif "train" in self.metrics:
            rows = "There are no test rows, so the results are those of training rows and too good."
        else:
            rows = "The results are mean log densities; compare them within this run only."
        return f"{self.metrics.get('headline') or ''} {rows}".strip()

    @property
    def results(self) -> list[tuple[str, list[str]]]:
        """Name and cells of a row per client, and of one for all rows together."""
        clients = dict(list(self.clients.items())[:_MOST_CLIENTS])
        if self.metrics.get("pooled"):
            clients["all rows"] = self.metrics["pooled"]

        def number(value: Any) -> float:
            return math.nan if value is None else float(value)  # null stands for NaN

        def text(record: Mapping[str, Any], name: str) -> str:
            value = metric_text(name, number(record.get(name)))
            low, high = map(number, record.get("intervals", {}).get(name) or (None, None))
            if not (math.isfinite(low) and math.isfinite(high)):
                return value
            return f"{value} ({metric_text(name, low)} to {metric_text(name, high)})"

        return [
            (name, [f"{int(one['rows']):,}", *(text(one, metric) for metric in self.shown)])
            for name, one in clients.items()
        ]

    @property
    def limits(self) -> list[str]:
        model = self.model
        few = [name for name, one in self.clients.items() if one["rows"] < _FEW_ROWS]
        found = [model.impersonal]
        if few:
            found.append(
                f"Fewer than {_FEW_ROWS} rows of results, which are uncertain: {_listed(few)}."
            )
        if not self.clients:
            found.append("No client has test rows, so the quality of predictions is not known.")
        if model.prediction.gaussians is None:
            found.append("The model has no density, so it cannot say whether a row is unusual.")
        elif not model.calibration:
            found.append(
                "Novelty is not calibrated, so false alarms are not limited to a chosen rate."
            )
        found.append("Results are those of one split, and of rows like the training data.")
        privacy = "Differential privacy: "  # has a section of its own
        notes = self.metrics.get("notes", [])
        found += [note for note in notes if not note.startswith(privacy)]
        return [line for line in dict.fromkeys(found) if line]

    @property
    def privacy(self) -> list[str]:
        """Lines about noise and masks, from the model, the history and the configuration."""
        home, found = self.run.folder.home, []
        history = read_history(self.run.folder.history)
        spent = [entry["epsilon"] for entry in history if "epsilon" in entry]
        if (home / LEDGER).is_file():
            # the last account of a unit is that of all tables
            totals = {one.unit: one for one in accounts(Ledger.found(home).entries(), _DELTA)}
            found += [
                f"Ledger of all runs of this folder: ε = {one.epsilon:.3g} (δ = {_DELTA:g}, per "
                f"{unit}), {counted(one.releases, 'release')}."
                for unit, one in totals.items()
            ]
        if self.model.privacy is not None:
            found += [
                f"Differential privacy: {self.model.budget}.",
                "Not covered: the weights of each client, and the results on this page, which are exact.",
            ]
        elif spent:
            found.append(f"Differential privacy: ε = {spent[-1]:.3g} was spent.")
        elif not found:
            found.append(
                "No differential privacy: parameters of the model may reveal something about single "
                "rows."
            )
        if self.sections["privacy"].get("secure_aggregation"):
            found.append("Secure aggregation: the server saw sums over clients only.")
        found.append(
            "The page names clients and columns, and has counts of rows; check both before passing it on."
        )
        return found

    @property
    def files(self) -> list[tuple[str, str]]:
        found = list(self.versions.get("files", {}).items())[:_MOST_CLIENTS]
        return [(PurePath(name).name, facts["sha256"]) for name, facts in found]
