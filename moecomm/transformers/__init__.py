"""moecomm as an expert-parallel implementation of Hugging Face transformers.

    import moecomm.transformers

    parallel = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moecomm")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=parallel)

Importing this registers the name "moecomm"; no other call is needed. transformers builds a `MoecommEP` for
each module of experts, and the experts' weights stay where transformers has put them (docs/transformers.md).
Where they are not spread over ranks, as on one GPU, `experts_implementation="moecomm"` runs them.
"""

from __future__ import annotations

import re

from moecomm.errors import Unsupported
from moecomm.setup.version import version_of

OLDEST = (5, 23)
"""The first version of transformers in which implementations of expert parallelism can be registered."""


def _require_transformers() -> None:
    found = version_of("transformers") or "not installed"
    numbers = tuple(int(each) for each in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unsupported(
            f"moecomm.transformers needs transformers {oldest} or newer, which has ep_implementation; it is "
            f"{found}: pip install 'transformers>={oldest}'"
        )


_require_transformers()

from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

from moecomm.transformers.graphed import Graphed  # noqa: E402
from moecomm.transformers.implementation import MoecommEP  # noqa: E402
from moecomm.transformers.recompute import keep_plans  # noqa: E402
from moecomm.transformers.resume import Resumable  # noqa: E402
from moecomm.transformers.whole_experts import experts_forward  # noqa: E402

EPImplementationInterface.register("moecomm", MoecommEP)
ALL_EXPERTS_FUNCTIONS.register("moecomm", experts_forward)

__all__ = ["Graphed", "MoecommEP", "Resumable", "keep_plans"]
