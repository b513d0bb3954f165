"""The plan of a dispatch on a GPU: words of its memory, and the views of them that an output has."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import moecomm._C as _C
from moecomm.types import Layout


class TensorPlan(NamedTuple):
    """A plan as a tensor, with the numbers that the host knows without reading the tensor."""

    blob: Tensor
    """(words,) int32 with the fields of `PlanFields` and the backend's own words. Replays of a CUDA graph
    write it anew."""
    layout: Layout
    tokens: int
    rows: int
    stream: int = 0
    """The CUDA stream that the blob's memory belongs to."""


class PlanFields(NamedTuple):
    """Positions of a plan's views (PLAN_VIEWS) in a blob of `words` int32 words. `expert_rows` is the view
    tokens_per_expert."""

    words: int
    overflow: int
    expert_rows: slice
    expert_starts: slice
    """0, followed by the ends of the experts' groups in expert-major order."""
    source_ends: slice
    """Ends of the rows of each source rank, in the rank layout."""

    @property
    def expert_offsets(self) -> slice:
        """The ends of the experts' groups in expert-major order."""
        return slice(self.expert_starts.start + 1, self.expert_starts.stop)

    def view(self, blob: Tensor, layout: Layout, name: str) -> Tensor:
        """Returns the view of that name, one of PLAN_VIEWS, of the plan in `blob`."""
        if name == "tokens_per_expert":
            return blob[self.expert_rows]
        if name == "overflow":
            return blob[self.overflow]
        if name == "expert_starts":
            return blob[self.expert_starts]
        return blob[self.source_ends if (name, layout) == ("offsets", "rank") else self.expert_offsets]


def plan_fields_of(shape: _C.DeviceShape) -> PlanFields:
    """Returns the positions of the views (PLAN_VIEWS) within the words of a plan on the device."""
    return PlanFields(**_C.device_plan_fields(shape))
