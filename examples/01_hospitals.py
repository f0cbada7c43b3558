"""Six hospitals, from CSV files to predictions.

Each hospital has one file. The same measurements suggest an illness in one kind of patient and
health in another, and hospitals have different shares of each kind. FedGMM finds the kinds; FedAvg
has one linear model for all of them. Both train with their defaults here; ``fedgmm compare`` tunes
every method, and tries networks, too.
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedgmm
from fedgmm.data.examples import write_hospitals


def main(out: Path) -> None:
    """Train both methods on the files and draw the accuracy at each hospital."""
    folder = Path(tempfile.mkdtemp())
    write_hospitals(folder)
    files = sorted(folder.glob("site_*.csv"))
    found = {}
    for method in ("fedgmm", "fedavg"):
        run = fedgmm.fit(files, "diagnosis", folder / method, algorithm=method, rounds=50)
        found[method] = run.evaluate()
        print(method, found[method].headline())

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for number, (method, result) in enumerate(found.items()):
        accuracy, (low, high) = result.metrics["accuracy"], np.array(result.intervals["accuracy"]).T
        places = np.arange(len(accuracy)) + 0.2 * number - 0.1
        reach = [100 * (accuracy - low), 100 * (high - accuracy)]
        axes.errorbar(places, 100 * accuracy, reach, fmt="o", capsize=3, label=method)
    names = [str(name).removeprefix("site_") for name in found["fedgmm"].clients]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="test accuracy (%), 95 % interval", title="Accuracy at each hospital")
    axes.legend()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("hospitals.png"), help="the picture")
    main(parser.parse_args().out)
