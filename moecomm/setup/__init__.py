"""Sets up a communicator: checks its arguments, brings its ranks together, finds their nodes, computes the
size of a window, and makes symmetric memory. Also collects what `python -m moecomm` prints about a
machine."""
