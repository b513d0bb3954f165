"""Access to a GPU for the rest of moecomm: the driver's API, and torch's streams and events at low cost."""
