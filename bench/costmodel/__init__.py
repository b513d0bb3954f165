"""A cost model of dispatch and combine between nodes: what they would take on a machine that is not here.

    from bench.costmodel import MACHINES, MODELS, Shape, predict

    shape = Shape(nodes=16, ranks_per_node=8, tokens=4096, **MODELS["deepseek-v3"])
    print(predict(MACHINES["h200"], shape))

`python -m bench.costmodel` prints the same for many numbers of nodes. Formula, assumptions and limits are in
docs/model.md. Nothing here needs a GPU, a network or torch.
"""

from __future__ import annotations

from bench.costmodel.machine import MACHINES, Machine
from bench.costmodel.predict import Operation, Prediction, Stage, predict
from bench.costmodel.shape import MODELS, Shape
from bench.costmodel.traffic import Traffic, expected, expected_owners

__all__ = [
    "MACHINES",
    "MODELS",
    "Machine",
    "Operation",
    "Prediction",
    "Shape",
    "Stage",
    "Traffic",
    "expected",
    "expected_owners",
    "predict",
]
