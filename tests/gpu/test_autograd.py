"""Gradients as torch asks for them, on GPUs: the tests of the CPU ranks. The bits of gradients are checked by
test_sizes.py."""

from tests.multirank.test_autograd import (  # noqa: F401
    test_a_backward_twice,
    test_checkpointing_gives_the_same_bits_and_reuses_plans,
    test_finite_differences_across_ranks,
    test_what_needs_no_gradient_gets_none,
)
