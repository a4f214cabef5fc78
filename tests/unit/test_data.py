from hypothesis import given
from hypothesis import strategies as st

from duoka.data.seeds import derive
from duoka.data.shares import rows_to_compute, share


@given(st.integers(0, 300), st.integers(1, 40))
def test_shares_cover_the_batch_in_order_and_differ_by_at_most_one_row(num_rows, num_replicas):
    shares = [share(num_rows, num_replicas, replica) for replica in range(num_replicas)]
    assert [row for part in shares for row in part] == list(range(num_rows))
    sizes = [len(part) for part in shares]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(1, 40))
def test_a_replica_without_rows_gets_up_to_two_real_ones(num_rows, num_replicas):
    for replica in range(num_replicas):
        rows = rows_to_compute(num_rows, num_replicas, replica)
        assert rows == (share(num_rows, num_replicas, replica) or range(min(2, num_rows)))
        assert len(rows) >= 1


@given(st.lists(st.integers(-(2**62), 2**62), max_size=4), st.lists(st.integers(-(2**62), 2**62), max_size=4))
def test_seeds_differ_where_anything_differs(first, second):
    assert (derive("body", *first) == derive("body", *second)) == (first == second)
    assert derive("body", *first) != derive("order", *first)
    assert 0 <= derive("body", *first) < 2**63
