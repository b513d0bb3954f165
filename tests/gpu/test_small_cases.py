"""Small whole jobs against the oracle, bit for bit: the tests of the CPU ranks, on GPUs."""

from tests.multirank.test_dispatch_combine import (  # noqa: F401
    test_a_slow_rank_is_seen_by_the_others,
    test_all_tokens_to_one_rank,
    test_extreme_values,
    test_hidden_sizes,
    test_layouts_alignments_and_capacities,
    test_many_steps_on_one_communicator,
    test_nothing_to_do,
    test_several_communicators_at_once,
    test_stats_count_calls_rows_and_bytes,
    test_top_k,
    test_two_subgroups_and_the_world,
)
from tests.multirank.test_fixed_groups import test_groups_of_one_size, test_what_is_refused  # noqa: F401
