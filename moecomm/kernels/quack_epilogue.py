"""Epilogues of the experts' products on quack-kernels: biases, SwiGLU and the routing weight in the product.

quack finds an epilogue by its module and name, so this module has nothing else; it imports quack. `acc` is
the product, `weight` a row's routing weight. With SwiGLU a gate and its up value are in neighbouring columns.
Output D is these pairs before the activation; output postact is the activation times the weight. In a
backward `acc` is the gradient of postact, and `c` is the forward's D. Its outputs are D (the gradient of
`c`), dweight (the gradient of the weight) and the recomputed postact.
"""

# mypy: disable-error-code="untyped-decorator,unused-ignore"

from typing import Any

from quack.activation import dswiglu, dswiglu_oai, swiglu, swiglu_oai
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad

_LIMIT = 7.0  # of swiglu_clamped, whose factor 1.702 is quack's default


@gemm_epilogue(ops={"bias": RowVecLoad("bias"), "weight": ColVecLoad("weight")})
def weighted_bias(acc: Any, bias: Any, weight: Any) -> dict[str, Any]:
    """Returns as D the product plus the bias times the weight of the row."""
    return {"D": acc + bias * weight}


@gemm_epilogue(outputs=("postact",), ops={"weight": ColVecLoad("weight")}, mode="acc_pair")
def weighted_swiglu(acc: Any, weight: Any) -> dict[str, Any]:
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "postact": swiglu(gate, up) * weight}


@gemm_epilogue(
    outputs=("postact",), ops={"bias": RowVecLoad("bias"), "weight": ColVecLoad("weight")}, mode="acc_pair"
)
def weighted_swiglu_clamped(acc: Any, bias: Any, weight: Any) -> dict[str, Any]:
    gate, up = unpack(acc + bias)
    return {"D": pack(gate, up), "postact": swiglu_oai(gate, up, limit=_LIMIT) * weight}


@gemm_epilogue(
    outputs=("postact",),
    ops={"weight": ColVecLoad("weight")},
    reduces={"dweight": ColVecReduce("dweight", scaled=True)},
    mode="packed_cd_b16x2",
)
def weighted_swiglu_backward(acc: Any, c: Any, weight: Any) -> dict[str, Any]:
    gate, up = unpack(c)
    dgate, dup, value = dswiglu(gate, up, acc * weight)
    return {"D": pack(dgate, dup), "postact": value * weight, "dweight": (value, acc)}


@gemm_epilogue(
    outputs=("postact",),
    ops={"weight": ColVecLoad("weight")},
    reduces={"dweight": ColVecReduce("dweight", scaled=True)},
    mode="packed_cd_b16x2",
)
def weighted_swiglu_clamped_backward(acc: Any, c: Any, weight: Any) -> dict[str, Any]:
    gate, up = unpack(c)
    dgate, dup, value = dswiglu_oai(gate, up, acc * weight, limit=_LIMIT)
    return {"D": pack(dgate, dup), "postact": value * weight, "dweight": (value, acc)}
