"""Texts at two support desks that mean different things by "urgent".

A frozen encoder of words (``wordllama``, whose weights come with the package) turns each message
into a vector. One desk calls machines urgent, the other invoices. Each desk gets its own mixture
of the two meanings.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedgmm import FederatedDataset, train
from fedgmm.data.encoders import encoder

MACHINES = ["the pump is broken", "the motor makes noise", "the valve leaks", "the fan has stopped"]
INVOICES = ["the invoice is wrong", "the payment is late", "the bill has errors", "a refund is due"]
ENDINGS = ["since Monday", "again", "in hall two", "please call me", "for our customer", "today"]
DESKS = ("factory", "office", "garage", "bank")


def messages(rows: int, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """Draw messages, and whether each is about a machine."""
    machine = rng.random(rows) < 0.5
    kinds = [rng.choice(MACHINES if one else INVOICES) for one in machine]
    return [f"{kind} {rng.choice(ENDINGS)}" for kind in kinds], machine


def main(out: Path) -> None:
    """Embed the messages, train, and draw what each desk calls urgent."""
    rng = np.random.default_rng(0)
    texts, machine = messages(400, rng)
    desks = np.repeat(DESKS, 100)
    urgent = np.where(np.isin(desks, ("factory", "garage")), machine, ~machine)
    vectors = encoder("wordllama").encode(texts).numpy()
    dataset = FederatedDataset.from_arrays(vectors, urgent, desks)
    model = train(dataset, components=1, learners=2, rounds=20, pca=8)
    print(model.evaluate("test").headline())

    asked = ["the motor has stopped", "the invoice has errors"]
    rows = encoder("wordllama").encode(asked).numpy()
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for number, text in enumerate(asked):
        chances = [100 * model.predict_proba(rows[[number]], desk)[0, 1] for desk in DESKS]
        axes.bar(np.arange(4) + 0.4 * number - 0.2, chances, 0.38, label=f'"{text}"')
    axes.set_xticks(range(4), DESKS)
    axes.set(ylabel="probability of urgent (%)", ylim=(0, 130))
    axes.legend(ncols=2)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("texts.png"), help="the picture")
    main(parser.parse_args().out)
