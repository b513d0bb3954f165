"""The experts' kernels: grouped products, activations with the routing weight, fp8 operands."""
