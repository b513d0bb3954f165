"""What sets a communicator up: checks of its arguments, rendezvous and handshake of its ranks, which of them
share a node, the size of the window, symmetric memory, and what `python -m moecomm` finds on a machine."""
