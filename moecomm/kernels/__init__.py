"""What experts compute with: grouped products, activations with the routing weight inside, fp8 operands."""
