"""Statistics of batch normalisation, side by side: which of them serve the same weights best?

FedAvg trains MobileNet-V2 on a part of CIFAR-10, with random crops and flips. After some of its rounds the
statistics of the very weights are taken twice, of the training images as they are and cropped and flipped
as in training, and each is scored on validation rows of the clients and on rows of clients that were away.

    python benchmarks/batch_statistics.py --data-dir data --pretrained mobilenet_v2_imagenet.safetensors
    python benchmarks/batch_statistics.py --quick          # pictures that are made up, in a minute
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedgmm import FederatedDataset, FederatedModel, TrainingOptions, train
from fedgmm.algorithms.statistics import settled
from fedgmm.data.dataset import LabelledRows
from fedgmm.experiments.image_study import ImageStudy, dealt
from fedgmm.experiments.workplace import Workplace
from fedgmm.federation.checkpoint import Checkpoint

AWAY = 5  # one client of so many does not train
SIDES = {"as they are": False, "cropped and flipped": True}


@dataclass(frozen=True)
class Score:
    """Accuracy and mean log-likelihood of labels on some rows."""

    accuracy: float
    log_likelihood: float

    def __str__(self) -> str:
        return f"{100 * self.accuracy:5.1f} % {self.log_likelihood:7.3f}"


def score(model: FederatedModel, rows: LabelledRows) -> Score:
    """What FedAvg's common model says of rows, whoever they belong to."""
    found, labels = model.predict_proba(rows.inputs.numpy()), rows.labels.numpy()
    own = found[np.arange(len(labels)), labels]
    right = found.argmax(1) == labels
    return Score(float(right.mean()), float(np.log(np.maximum(own, 1e-12)).mean()))


def compare(dataset: FederatedDataset, options: TrainingOptions) -> list[dict[str, Any]]:
    """Scores of both sides after a quarter, half, and four fifths of the rounds, and after all."""
    names = list(dataset.names)
    away = names[::AWAY]
    home = dataset.select([name for name in names if name not in away])
    strangers = dataset.select(away).validation
    rounds = options.rounds
    results = []
    with TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder) / "training.safetensors", rounds)
        for until in sorted({max(1, rounds // 4), max(1, rounds // 2), 4 * rounds // 5, rounds}):
            model = train(home, options=options, checkpoint=checkpoint, until=until)
            for side, augment in SIDES.items():
                own = replace(model, prediction=settled(model.prediction, home.train, augment))
                scores = {"clients": score(own, home.validation), "away": score(own, strangers)}
                print(
                    f"round {until:3}  {side:20} clients {scores['clients']}   away {scores['away']}",
                    flush=True,
                )
                plain = {who: vars(found) for who, found in scores.items()}
                results.append({"round": until, "side": side, **plain})
    return results


def made_up(seed: int) -> FederatedDataset:
    """Bright and dark pictures on five clients."""
    rng = np.random.default_rng(seed)
    labels = np.arange(100) % 2
    pictures = rng.integers(0, 128, size=(100, 3, 32, 32)) + 100 * labels[:, None, None, None]
    return FederatedDataset.from_arrays(pictures.astype(np.uint8), labels, np.arange(100) % AWAY)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder of the image data sets")
    parser.add_argument("--pretrained", help="ImageNet weights that MobileNet-V2 starts from")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=0.25, help="share of the images")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--no-shift", action="store_true", help="images and labels as they are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="two rounds with made-up pictures")
    parser.add_argument("--json", type=Path, help="write the scores here")
    given = parser.parse_args()

    study = ImageStudy(
        dataset="cifar10",
        track="tuned",
        methods=("fedavg",),
        clients=given.clients,
        fraction=given.fraction,
        rounds=2 if given.quick else given.rounds,
        shift=not given.no_shift,
        pretrained=given.pretrained,
        device=given.device,
    )
    if given.quick:
        dataset = made_up(given.seed)
    else:
        workplace = Workplace(given.data_dir, None, print)
        dataset = dealt(study, given.seed, workplace, shift=study.shift).dataset
    options = replace(study.options("fedavg", given.seed), lr=given.lr, server_momentum=0.9)
    results = compare(dataset, options)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
