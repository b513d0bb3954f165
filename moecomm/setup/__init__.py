"""The setup of a communicator: checks of its arguments, rendezvous and handshake of its ranks, which of them
share a node, the size of the window, symmetric memory, and the facts about a machine that `python -m moecomm`
prints."""
