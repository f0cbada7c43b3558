"""Small settings of the study on novel images."""

from __future__ import annotations

from dataclasses import replace

from fedgmm.experiments.paper.novelty_setup import NoveltyStudy
from tiny_images import FAST

SMALL = NoveltyStudy(
    track="tuned",
    clients=4,
    representation_choices=("plain", "direction"),
    feature_choices=(4,),
    component_choices=(2,),
    reg_covar_choices=(1e-2,),
    scatter_clients=3,
    scatter_rows=30,
    **FAST,
)
"""Two representations to choose from."""

FIXED = replace(SMALL, representation_choices=("direction",))
"""One density, so no choice."""
