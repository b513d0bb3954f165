"""Checks of what tests between nodes need of this machine."""

import pytest

from moecomm import _C

needs_fabric = pytest.mark.skipif(
    _C.fabric_missing() is not None, reason="no libfabric: see what is left out on this machine"
)
