"""The kernels of a layer's rows under Triton's interpreter: equal to what torch computes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.equal import blocks_equal, order_equal, rows_equal
from tests.kernels.equal import routing as random_routing

shapes = st.tuples(st.sampled_from([0, 1, 31, 32, 33, 70]), st.sampled_from([1, 3, 8, 130]))
densities = st.sampled_from([0.0, 0.05, 0.5, 1.0])


@settings(deadline=None, max_examples=6)
@given(shapes, densities, st.integers(0, 10**6))
def test_order(shape: tuple[int, int], density: float, seed: int) -> None:
    order_equal(random_routing(*shape, density, seed), "cpu")


@settings(deadline=None, max_examples=6)
@given(st.lists(st.sampled_from([1, 1, 2, 700, 1024]), max_size=9), st.integers(0, 10**6))
def test_block_index(sizes: list[int], seed: int) -> None:
    blocks_equal(sizes, seed, "cpu")


@settings(deadline=None, max_examples=6)
@given(shapes, densities, st.sampled_from([1, 5, 64, 1030]), st.integers(0, 10**6))
def test_copies_and_sums(shape: tuple[int, int], density: float, hidden: int, seed: int) -> None:
    tokens = min(shape[0], 33)
    experts = min(shape[1], 8)
    rows_equal(random_routing(tokens, experts, density, seed), hidden, seed, "cpu")
