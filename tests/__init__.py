"""The tests: `unit` needs no other process, `multirank` starts ranks on this host, `gpu` a CUDA device."""

import os

# Read as torch is imported. Threads of OpenMP otherwise spin while they wait, on cores that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
