"""The test suite: `unit` needs no other process, `multirank` starts ranks on this host, `gpu` needs a CUDA device."""
