import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import TopologyError
from duoka.topology.membership import Membership
from duoka.topology.placement import place
from duoka.topology.tree import Node, fold, parents, root, subtrees

replicas_and_workers = st.integers(1, 40).flatmap(lambda r: st.tuples(st.just(r), st.integers(1, r)))


def expression(num_replicas, nodes):
    """The sum as nested pairs: two equal expressions round in the same way."""

    def of(node):
        return node.start if node.is_leaf else tuple(of(child) for child in node.children)

    nodes = tuple(nodes)
    return fold(num_replicas, nodes, [of(node) for node in nodes], lambda left, right: (left, right))


@given(replicas_and_workers)
def test_every_number_of_workers_adds_in_the_same_order(sizes):
    num_replicas, num_workers = sizes
    partials = place(num_replicas, range(num_workers)).partials
    assert expression(num_replicas, partials) == expression(num_replicas, [root(num_replicas)])


@given(replicas_and_workers)
def test_every_replica_is_placed_once_and_evenly(sizes):
    num_replicas, num_workers = sizes
    placement = place(num_replicas, range(num_workers))
    assert [r for w in range(num_workers) for r in placement.replicas_of(w)] == list(range(num_replicas))
    counts = placement.counts().values()
    assert max(counts) - min(counts) <= 1


@given(replicas_and_workers, st.data())
def test_a_loss_moves_only_lost_replicas_and_keeps_the_order_of_the_sum(sizes, data):
    num_replicas, num_workers = sizes
    placement = place(num_replicas, range(num_workers))
    while len(placement.workers) > 1 and data.draw(st.booleans()):
        lost = data.draw(st.sets(st.sampled_from(placement.workers), min_size=1, max_size=len(placement.workers) - 1))
        after = placement.without(lost)
        for share in placement.shares:
            if share.worker not in lost:
                assert share in after.shares
        assert sorted(r for share in after.shares for r in share.replicas) == list(range(num_replicas))
        assert not lost & set(after.workers)
        assert expression(num_replicas, after.partials) == expression(num_replicas, [root(num_replicas)])
        placement = after


@given(st.integers(1, 64), st.data())
def test_subtrees_cover_exactly_the_owned_replicas_and_start_at_different_ones(num_replicas, data):
    owned = data.draw(st.sets(st.integers(0, num_replicas - 1)))
    nodes = subtrees(num_replicas, owned)
    assert sorted(r for node in nodes for r in node.replicas()) == sorted(owned)
    assert len({node.start for node in nodes}) == len(nodes)
    parent_of = parents(num_replicas)
    for node in nodes:
        if node in parent_of:
            assert not owned.issuperset(parent_of[node].replicas())


def test_a_contiguous_block_is_at_most_two_log_r_subtrees():
    for start in range(16):
        for stop in range(start + 1, 17):
            assert len(subtrees(16, range(start, stop))) <= 6


def test_eight_replicas_on_three_workers_are_dealt_three_three_two():
    assert place(8, [0, 1, 2]).counts() == {0: 3, 1: 3, 2: 2}


def test_the_tree_of_three_is_one_and_then_two():
    assert root(3).children == (Node(0, 1), Node(1, 3))


@pytest.mark.parametrize(("num_replicas", "num_workers"), [(0, 1), (-1, 1), (2, 3), (2, 0)])
def test_sizes_that_do_not_fit_are_refused(num_replicas, num_workers):
    with pytest.raises(TopologyError):
        place(num_replicas, range(num_workers))


def test_too_few_replicas_name_both_ways_out():
    with pytest.raises(TopologyError, match=r"(?s)4 replicas cannot be placed on 6 workers.*replicas=6"):
        place(4, range(6))


def test_losing_everybody_is_an_error():
    with pytest.raises(TopologyError, match="No worker is left"):
        place(2, [0, 1]).without({0, 1})


def test_generations_only_go_up():
    membership = Membership(0, (0, 1, 2))
    assert membership.lose({1}) == Membership(1, (0, 2))
    assert membership.lose({1}).join(1) == Membership(2, (0, 2, 1), juniors=(1,))
