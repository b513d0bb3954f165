"""Merged microbatches on GPUs: the same bits as one after the other, and errors that end nothing."""

from __future__ import annotations

from tests.multirank.test_merged import (
    test_a_graphed_step,
    test_a_language_model,
    test_an_exception_in_a_node,
    test_borders_that_do_not_fit,
    test_chunks_and_a_record,
    test_layers_that_cannot_be_cut,
    test_one_fixed_order,
    test_pairs_by_hand,
    test_pairs_that_do_not_go,
    test_same_bits_as_one_after_the_other,
    test_three_ranks_one_without_tokens,
    test_what_borders_hold,
)
from tests.multirank.test_merged_pipeline import test_a_pipeline_of_two, test_a_stage_by_itself

__all__ = [
    "test_a_graphed_step",
    "test_a_language_model",
    "test_a_pipeline_of_two",
    "test_a_stage_by_itself",
    "test_an_exception_in_a_node",
    "test_borders_that_do_not_fit",
    "test_chunks_and_a_record",
    "test_layers_that_cannot_be_cut",
    "test_one_fixed_order",
    "test_pairs_by_hand",
    "test_pairs_that_do_not_go",
    "test_same_bits_as_one_after_the_other",
    "test_three_ranks_one_without_tokens",
    "test_what_borders_hold",
]
