"""Node maps: pure arithmetic, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.setup.topology import NodeMap, find_nodes


def hosts(*counts: int) -> list[str]:
    """Ranks of so many on each host."""
    return [f"host{number}" for number, count in enumerate(counts) for _ in range(count)]


@given(st.integers(1, 40), st.integers(1, 12))
def test_rank_node_and_local_index_are_one_to_one(count: int, per_node: int) -> None:
    nodes = NodeMap(count * per_node, per_node)
    assert nodes.nodes == count
    for rank in range(nodes.ranks):
        node, local = nodes.node_of(rank), nodes.local_of(rank)
        assert 0 <= node < count and 0 <= local < per_node
        assert node * per_node + local == rank
        rail, mates = nodes.rail(rank), nodes.local_ranks(rank)
        assert [nodes.node_of(peer) for peer in rail] == list(range(count))
        assert {nodes.local_of(peer) for peer in rail} == {local}
        assert [nodes.local_of(mate) for mate in mates] == list(range(per_node))
        assert {nodes.node_of(mate) for mate in mates} == {node}
        assert rail[node] == mates[local] == rank


@pytest.mark.parametrize(("ranks", "per_node"), [(0, 1), (4, 0), (4, 3), (4, -2), (-4, 2), (4, 8)])
def test_unequal_nodes_are_no_map(ranks: int, per_node: int) -> None:
    with pytest.raises(InvalidArgument, match=f"ranks_per_node is {per_node} for {ranks} ranks"):
        NodeMap(ranks, per_node)


@pytest.mark.parametrize("rank", [-1, 6, 1000])
def test_ranks_out_of_range(rank: int) -> None:
    nodes = NodeMap(6, 2)
    for ask in (nodes.node_of, nodes.local_of, nodes.rail, nodes.local_ranks):
        with pytest.raises(InvalidArgument, match=f"rank is {rank}, expected one of 0 to 5"):
            ask(rank)


def test_hosts_with_different_numbers_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        find_nodes(hosts(4, 2), None)
    text = str(caught.value)
    assert "4 ranks: 0-3; 2 ranks: 4-5" in text
    assert "ranks_per_node=2" in text and "MOECOMM_RANKS_PER_NODE=2" in text
    # The way out that the text offers is one.
    assert find_nodes(hosts(4, 2), 2).nodes == 3
    with pytest.raises(Unsupported, match=r"8 ranks: 0-7; 8 ranks: 8-15; 1 rank: 16.*ranks_per_node=1"):
        find_nodes(hosts(8, 8, 1), None)


def test_a_long_list_of_hosts_is_cut() -> None:
    with pytest.raises(Unsupported) as caught:
        find_nodes(hosts(*[8] * 127, 4), None)
    text = str(caught.value)
    assert "8 ranks: 0-7;" in text and "and 122 more" in text and len(text) < 600


def test_ranks_that_go_round_the_hosts_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        find_nodes(["a", "b", "a", "b"], None)
    text = str(caught.value)
    assert "0 and 2 share one, and rank 1 is on another" in text and "--distribution=block" in text
    with pytest.raises(Unsupported, match="0-1 and 4-5 share one, and rank 3 is on another"):
        find_nodes(["a", "a", "b", "b", "a", "a"], None)


def test_a_node_does_not_span_hosts() -> None:
    with pytest.raises(InvalidArgument) as caught:
        find_nodes(hosts(6, 2), 4)
    text = str(caught.value)
    assert "ranks_per_node is 4" in text and "ranks 4-7" in text
    assert "2 ranks: 4-5; 2 ranks: 6-7" in text and "MOECOMM_RANKS_PER_NODE" in text
    with pytest.raises(InvalidArgument, match=r"ranks 0-3.*2 ranks: 0-1; 2 ranks: 2-3"):
        find_nodes(hosts(2, 2), 8)


def test_nobody() -> None:
    for per_node in (None, 1):
        with pytest.raises(InvalidArgument, match="hosts is empty"):
            find_nodes([], per_node)


def is_map(names: list[str], per_node: int) -> bool:
    """Is each run of `per_node` ranks, of which the ranks are a multiple, on one host?"""
    starts = range(0, len(names), per_node)
    return len(names) % per_node == 0 and all(len(set(names[at : at + per_node])) == 1 for at in starts)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), min_size=1, max_size=6),
    st.none() | st.integers(1, 25),
)
def test_nodes_are_accepted_where_each_is_within_a_host(
    runs: list[tuple[str, int]], per_node: int | None
) -> None:
    """Without a number each host is a node; a number makes nodes within hosts, which may alternate, and one
    of all ranks or more makes a single node."""
    names = [name for name, count in runs for _ in range(count)]
    wanted = names.count(names[0]) if per_node is None else min(per_node, len(names))
    hosts_are_nodes = per_node is not None or wanted * len(set(names)) == len(names)
    if is_map(names, wanted) and hosts_are_nodes:
        assert find_nodes(names, per_node) == NodeMap(len(names), wanted)
    else:
        with pytest.raises((InvalidArgument, Unsupported)):
            find_nodes(names, per_node)
