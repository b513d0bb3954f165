"""Dispatch and combine for torch: autograd functions, and operators of torch.library for torch.compile."""
