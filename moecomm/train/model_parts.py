"""Collects a model's modules, MoELayers and parameters in one walk, for the functions of moecomm.train."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moecomm.arguments import require_module
from moecomm.errors import InvalidArgument
from moecomm.kernels.parameters import is_expert_parameter
from moecomm.nn.experts import GroupedExperts
from moecomm.nn.layer import MoELayer
from moecomm.parallel.shards import refuse_mixed_shards
from moecomm.parallel.spread import spread_parameters


class ModelParts:
    """A model's modules, layers and parameters as they are at one moment. Each walk over a model of 48 layers
    takes the host milliseconds, so a call makes one and hands it on. Raises InvalidArgument if `model` is no
    nn.Module. Reshards FSDP2's units first, so that parameters are those that have gradients.

    Attributes:
        modules: all modules, each once, with its first name.
        layers: the MoELayers among them.
        named: all parameters by name, each once, as `model.named_parameters()` yields them.
        spread_of: `moecomm.parallel.spread.spread_parameters`, computed once for each layer.
    """

    def __init__(self, model: nn.Module) -> None:
        require_module(model)
        self.modules: dict[nn.Module, str] = {}
        self.named: dict[str, nn.Parameter] = {}
        self.spread_of: Callable[[MoELayer], dict[str, nn.Parameter]] = functools.cache(spread_parameters)
        seen: set[nn.Parameter] = set()
        for prefix, module in model.named_modules():  # marks the experts' parameters
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves the outermost unit unsharded, without gradients
            self.modules[module] = prefix
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    self.named[f"{prefix}.{name}" if prefix else name] = parameter
        self.layers = [module for module in self.modules if isinstance(module, MoELayer)]

    @property
    def spread_layers(self) -> list[MoELayer]:
        """The layers whose experts are spread over several ranks."""
        return [layer for layer in self.layers if layer.comm.size > 1]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU for a model without any."""
        return next((local(each).device for each in self.named.values()), torch.device("cpu"))

    @functools.cached_property
    def zero(self) -> Tensor:
        """A float64 zero on `device`. In float64 the order in which shards are added does not affect a
        norm."""
        return torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.named.values() if parameter.requires_grad]

    @functools.cached_property
    def owners(self) -> dict[nn.Parameter, MoELayer]:
        """The parameters that differ between ranks, each with its layer.

        They are asked of the layers, since the parameters with which FSDP replaces others have no mark.
        Experts that every rank holds are left out. Raises InvalidArgument for a parameter that the experts of
        all ranks share, for experts that fully_shard has sharded over ranks that hold other experts, and for
        parameters that are marked as an expert's outside of MoELayers.
        """
        owners: dict[nn.Parameter, MoELayer] = {}
        marked = {parameter: name for name, parameter in self.named.items() if is_expert_parameter(parameter)}
        for module in self.modules:
            if isinstance(module, MoELayer) and module.comm.size > 1:
                refuse_mixed_shards(module.experts)
                owners |= dict.fromkeys(self.spread_of(module).values(), module)
            elif isinstance(module, MoELayer) or (isinstance(module, GroupedExperts) and module.has_all):
                of_all = module.experts if isinstance(module, MoELayer) else module
                for parameter in of_all.parameters():
                    owners.pop(parameter, None)
                    marked.pop(parameter, None)
        for parameter, name in marked.items():
            if parameter not in owners:
                raise InvalidArgument(
                    f"{name} is marked as an expert's, and in no MoELayer: which ranks hold it is unknown. "
                    "Make its module the experts of a MoELayer (experts=...)"
                )
        return owners

    def refuse_shared_with_experts(self) -> None:
        """Raises InvalidArgument if a parameter of experts that are spread over ranks is used outside them
        too: its gradient would need averages over different ranks. The experts module itself may have two
        names."""
        roots = {layer.experts: layer for layer in self.spread_layers}
        own = {each: (root, name) for root in roots for name, each in self.spread_of(roots[root]).items()}
        inside = {module for root in roots for module in root.modules()}
        for module, path in self.modules.items():
            if module in inside:
                continue
            used = [(name, each) for name, each in module._parameters.items() if each is not None]
            for name, child in module._modules.items():
                if child is not None and child in inside and child not in roots:
                    used += child.named_parameters(name)
            for name, parameter in used:
                if parameter in own:
                    root, own_name = own[parameter]
                    other = f"{path}.{name}".lstrip(".")
                    raise InvalidArgument(
                        f"{self.modules[root]}.{own_name} is the same parameter as {other}: one of experts, "
                        "which other ranks do not have, must be in no other part of the model. Give each a "
                        "parameter of its own"
                    )


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zero_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros in the dtype that torch allows as the parameter's gradient."""
    return torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
