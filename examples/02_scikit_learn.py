"""A scikit-learn pipeline, cross-validated with the client of each row.

Shops answer the same question in two ways. The shop is a column of the table, so that every fold
keeps it: ``client_column=-1`` is the column that the preprocessing passes through.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedgmm import FedGMMClassifier


def shops(rows: int = 1500) -> tuple[pd.DataFrame, pd.Series]:
    """Draw customers of five shops; two of them keep the customers whom the others lose."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "age": rng.normal(45, 12, rows),
            "visits": rng.gamma(3, 2, rows),
            "city": rng.choice(["north", "south", "west"], rows),
            "shop": rng.integers(5, size=rows),
        }
    )
    table.loc[rng.random(rows) < 0.05, "visits"] = np.nan
    score = (table.age - 45) / 12 + (table.visits.fillna(6) - 6) / 3 + (table.city == "west")
    score = np.where(table["shop"] < 2, -score, score) + 0.3 * rng.normal(size=rows)
    return table, pd.Series(score > 0, name="returns")


def main(out: Path) -> None:
    """Compare a personalised model with one logistic regression, in five folds."""
    X, y = shops()
    inputs = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age", "visits"]),
        (OneHotEncoder(), ["city"]),
        ("passthrough", ["shop"]),
    )
    personal = FedGMMClassifier(1, 2, client_column=-1, rounds=20, random_state=0)
    models = {"FedGMM, by shop": personal, "logistic regression": LogisticRegression()}
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    scores = {
        name: cross_val_score(make_pipeline(inputs, model), X, y, cv=folds, scoring="roc_auc")
        for name, model in models.items()
    }

    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    for row, values in enumerate(scores.values()):
        axes.plot(values, np.full(len(values), row), "o", alpha=0.6)
        axes.text(values.mean(), row + 0.18, f"{values.mean():.2f}", ha="center")
    axes.set_yticks(range(len(scores)), list(scores))
    axes.set(xlabel="area under the curve, one point per fold", xlim=(0.4, 1.02), ylim=(-0.5, 1.5))
    figure.savefig(out, dpi=80)
    print({name: round(float(values.mean()), 3) for name, values in scores.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scikit_learn.png"), help="the picture")
    main(parser.parse_args().out)
