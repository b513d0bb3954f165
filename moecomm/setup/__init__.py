"""The setup of a communicator: checks of its arguments, the rendezvous and handshake of its ranks, their
nodes, the size of the window, symmetric memory, and the facts about a machine that `python -m moecomm`
prints."""
