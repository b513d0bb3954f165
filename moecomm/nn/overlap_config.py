"""What a layer computes beside its transfers, and what it keeps meanwhile: one value, replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moecomm.errors import InvalidArgument

Keep = Literal["all", "rows", "nothing"]
"""The tensors per row that a forward keeps for its backward. "all": the rows and the first product, P * (H +
I) values. "rows": the rows; the first product is made again. "nothing": the rows are sent once more along the
kept plan, together with the gradients, and the first product is made again."""

IN_ORDER = {"keep": "all", "keep_shared": True, "defer_weights": False, "record": False}
"""The only values of the fields that mean the layer's own backward, where autograd differentiates instead."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """How a MoELayer hides its communication. Checks itself: a bad value raises `InvalidArgument`.

        layer = MoELayer(config, comm, overlap=OverlapConfig(keep="rows"))
        layer.overlap = dataclasses.replace(layer.overlap, record=True)    # between forwards, as a whole

    Attributes:
        overlap: True: transfers beside products. False: one stage after another, on one stream,
            differentiated by autograd, with the same bits in the output and in the experts' gradients. keep,
            keep_shared, defer_weights and record would have no effect then, and must have their
            defaults.
        keep: what a forward keeps of the experts' rows for its backward: "all", "rows" (the first product is
            computed again) or "nothing" (the rows are dispatched again, along the kept plan).
        keep_shared: whether a forward keeps the shared experts' first product. False: the backward computes
            it again, beside the gradients on their way to the experts.
        defer_weights: True: backwards leave the gradients of the experts' weights to
            `MoELayer.backward_weights`.
        record: True: measure when stages run, for `MoELayer.timelines`.
    """

    overlap: bool = True
    keep: Keep = "all"
    keep_shared: bool = True
    defer_weights: bool = False
    record: bool = False

    def __post_init__(self) -> None:
        for name in ("overlap", "keep_shared", "defer_weights", "record"):
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        self._require(self.keep in ("all", "rows", "nothing"), "keep", "'all', 'rows' or 'nothing'")
        for name, only in () if self.overlap else IN_ORDER.items():
            fits = getattr(self, name) == only
            self._require(fits, name, f"{only!r} with overlap=False, where autograd does the backward")

    def _require(self, condition: bool, name: str, bound: str) -> None:
        if not condition:
            raise InvalidArgument(f"OverlapConfig.{name} is {getattr(self, name)!r}, must be {bound}")
