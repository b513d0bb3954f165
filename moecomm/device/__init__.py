"""What the rest asks of a GPU: the driver's API, and torch's streams and events at little cost."""
