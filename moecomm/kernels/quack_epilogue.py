"""The epilogue of the experts' first product on quack-kernels: SwiGLU and the routing weight in one.

quack finds an epilogue by its module and name, so it has a module of its own, which imports quack.
"""

from typing import Any

from quack.activation import swiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad


@gemm_epilogue(outputs=("postact",), ops={"weight": ColVecLoad("weight")}, mode="acc_pair")  # type: ignore[untyped-decorator, unused-ignore]
def weighted_swiglu(acc: Any, weight: Any) -> dict[str, Any]:
    """Returns the product as D, a gate and its up value in neighbouring columns, and silu(gate) * up * weight
    as postact."""
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "postact": swiglu(gate, up) * weight}
