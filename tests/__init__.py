"""The tests: `unit` needs no other process, `multirank` starts ranks on this host, `gpu` a CUDA device."""
