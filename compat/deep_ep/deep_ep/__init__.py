"""DeepEP's Python module, on moecomm: what is written for `deep_ep` runs on it unchanged.

It has DeepEP's `Buffer` (version 1), its `ElasticBuffer` (version 2) and the `HybridEPBuffer` of its branch
hybrid-ep, also for ranks that are processes on CPUs. docs/deep_ep.md lists the arguments.
"""

from importlib import metadata

import torch


def _refuse_beside_deep_ep() -> None:
    try:
        found = metadata.version("deep_ep")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"DeepEP {found} is installed beside moecomm-deep-ep, and both provide the module deep_ep: "
        "uninstall one of them (pip uninstall deep_ep, or pip uninstall moecomm-deep-ep) and install the "
        "other one again"
    )


_refuse_beside_deep_ep()

from deep_ep.buffer import Buffer  # noqa: E402
from deep_ep.config import Config  # noqa: E402
from deep_ep.elastic import ElasticBuffer, EPBuffer, EPHandle  # noqa: E402
from deep_ep.hybrid_ep_buffer import HybridEPBuffer  # noqa: E402
from deep_ep.utils import EventHandle, EventOverlap  # noqa: E402

topk_idx_t = torch.int64
"""The dtype of expert ids."""

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "topk_idx_t",
]
