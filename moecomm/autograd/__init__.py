"""Gradients of dispatch and combine (also as operators for torch.compile), and of the experts' weights."""
