"""Kernels of routers and experts: routing, grouped products, weighted activations."""
