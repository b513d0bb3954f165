"""A cost model of dispatch and combine between nodes: what they would take on a machine that is not here.

    from moecomm.model import MACHINES, MODELS, Shape, predict

    shape = Shape(nodes=16, ranks_per_node=8, tokens=4096, **MODELS["deepseek-v3"])
    print(predict(MACHINES["h200"], shape))

`python -m moecomm.model` prints the same for many numbers of nodes. Formula, assumptions and limits are in
docs/model.md. Nothing here needs a GPU, a network or torch.
"""

from __future__ import annotations

from moecomm.model.fitting import Line, fit
from moecomm.model.machine import MACHINES, Machine
from moecomm.model.predict import Operation, Prediction, Stage, predict
from moecomm.model.shape import MODELS, Shape
from moecomm.model.traffic import Traffic, count, expected, expected_owners

__all__ = [
    "MACHINES",
    "MODELS",
    "Line",
    "Machine",
    "Operation",
    "Prediction",
    "Shape",
    "Stage",
    "Traffic",
    "count",
    "expected",
    "expected_owners",
    "fit",
    "predict",
]
