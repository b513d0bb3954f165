"""The kernels of the experts: grouped products, activations with the routing weight inside, fp8 operands."""
