"""Backends: each turns tensors into pointers for one kind of memory. No other code passes torch's tensors to
the runtime."""
