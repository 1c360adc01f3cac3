"""configs/clusters: every file describes a cluster, and its profile has the values computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.model import SLOWED, slowed_by
from megatron_balance.profile.cluster import Cluster, Ranks, load_profile, profile_of, read
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, builtin

FILES = {path.stem: path for path in (Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml")}
PCIE3 = 16 * 8e9 * 128 / 130 / 8
"""Bytes per second: 16 lanes of 8 GT/s with 128b/130b encoding."""

SMALL = """
name: small
gpus_per_node: {value: 2, source: here}
gpus:
  - {name: any, nodes: {value: 2, source: here}, half_tflops: {value: 100, source: here}}
node: {name: bus, gb_per_second: {value: 10, source: here}}
network: {name: wire, gb_per_second: {value: 5, source: here}}
"""


def cluster(tmp_path: Path, text: str = SMALL) -> Cluster:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return read(path)


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_makes_profiles(name: str) -> None:
    found = read(FILES[name])
    gpus = int(found.gpus_per_node.value)
    for ranks in [Ranks(gpus, gpus, gpus), *([Ranks(2 * gpus, gpus, gpus)] if found.network else [])]:
        for dtype_bytes in (2, 4):
            profile = profile_of(found, ranks, 1024, 4096, dtype_bytes)
            lines = [profile.links[kind][group] for kind in COLLECTIVES for group in GROUPS]
            assert all(line.alpha > 0 and 0 < line.beta < 1e-8 for line in lines)
            assert 0 < profile.forward.seconds_per_token < (1e-3 if name == "cpu" else 1e-5)


GPUS = {
    "pro_prophet_hpwnv": 32,
    "pro_prophet_hpnv": 16,
    "pro_prophet_lpwnv": 8,
    "flexmoe": 64,
    "demi": 16,
    "demi_two": 8,
    "parm_a": 8,
    "parm_b": 32,
    "schemoe": 32,
    "h100": None,
    "h200": None,
    "h800": None,
    "gb200": None,
    "b200": None,
    "gb300": None,
    "cpu": 4,
}
"""Numbers of GPUs that the papers used for training, and of the processes of the quick start."""


@pytest.mark.parametrize("name", GPUS)
def test_clusters_have_as_many_gpus_as_papers_say(name: str) -> None:
    found = read(FILES.get(name) or FILES[f"{name}_measured"])
    assert (found.num_nodes and found.num_nodes * found.gpus_per_node.value) == GPUS[name]


def test_every_file_is_of_a_paper_or_a_known_node() -> None:
    assert {name.removesuffix("_measured") for name in FILES} == set(GPUS)


def test_kernels_reach_what_the_file_says() -> None:
    found = read(FILES["h100_measured"])
    reached = found.gpus[0].reached
    assert reached is not None and reached.fp8_products is not None
    plain, quantized = (profile_of(found, Ranks(16, 8, 8), 4096, 2304, size, experts=4) for size in (2, 1))
    assert plain.kernels is not None and quantized.kernels is not None
    assert 1 / plain.kernels.product.forward == pytest.approx(989.5e12 * reached.half_products.value)
    assert 1 / quantized.kernels.product.forward == pytest.approx(1979e12 * reached.fp8_products.value)
    assert quantized.kernels.casts and not plain.kernels.casts
    width = reached.half_width.value
    slowest = 4 * 4096 * 2304 * plain.kernels.product.forward * (1 + width / 2304)
    assert plain.forward.seconds_per_token > slowest
    # Two products of four experts start, and twice as many in a backward pass, which adds up gradients
    assert plain.forward.overhead == pytest.approx(8e-6 * reached.start_us.value)
    assert plain.backward.overhead > 2 * plain.forward.overhead
    assert plain.flex is not None
    assert 1 / plain.flex["inter"].beta == pytest.approx(44e9) and plain.flex["inter"].alpha == pytest.approx(50e-6)
    one_node = profile_of(found, Ranks(8, 8, 8), 4096, 2304).flex
    assert one_node is not None and found.node.flex_one_node_gb_per_second is not None
    assert 1 / one_node["intra"].beta == pytest.approx(1e9 * found.node.flex_one_node_gb_per_second.value)
    assert one_node["intra"].beta < plain.flex["intra"].beta
    assert plain.kernels.beside == (0.45, 0.7)
    assert slowed_by(plain) == pytest.approx(0.15 / 0.85)
    # Without another number, computation lacks the multiprocessors of exchanges
    bare = profile_of(read(FILES["h800_measured"]), Ranks(16, 8, 8), 4096, 2304).kernels
    assert bare is not None and bare.beside == pytest.approx((0.45, 0.15 / 0.85))
    unknown = profile_of(read(FILES["h100"]), Ranks(8, 8, 8), 4096, 2304)
    assert unknown.kernels is None and slowed_by(unknown) == SLOWED


def test_bytes_per_second_are_those_of_the_links() -> None:
    profile = profile_of(read(FILES["schemoe"]), Ranks(32, 4, 4), 1024, 1024)
    assert 1 / profile.link("p2p", "intra").beta == pytest.approx(PCIE3, rel=1e-4)
    assert 1 / profile.link("p2p", "inter").beta == pytest.approx(100e9 / 8)
    assert profile.link("all_reduce", "inter").beta == pytest.approx(2 * 8 / 100e9)
    node = profile_of(read(FILES["h100"]), Ranks(8, 8, 8), 4096, 14336)
    assert 1 / node.link("all_to_all").beta == pytest.approx(450e9)
    # Two matrices; one multiplication and one addition per element
    assert node.forward.seconds_per_token == pytest.approx(4 * 4096 * 14336 / 989.5e12)
    assert node.backward.seconds_per_token == 2 * node.forward.seconds_per_token


def test_an_all_to_all_takes_what_it_does_by_hand() -> None:
    """Each of 32 ranks sends 64 MB: 28 of 31 parts at a quarter of 12.5 GB/s; 3 parts over PCIe take less time."""
    profile = profile_of(read(FILES["schemoe"]), Ranks(32, 4, 4), 1024, 1024)
    num_bytes = 64e6
    expected = num_bytes * max(28 / 31 / (12.5e9 / 4), 3 / 31 / PCIE3)
    assert profile.link("all_to_all").beta * num_bytes == pytest.approx(expected, rel=1e-4)
    even_DD = np.full((32, 32), num_bytes / 31)
    alpha = profile.link("all_to_all").alpha
    assert ExchangeModel.of(profile).seconds(even_DD) == pytest.approx(alpha + expected, rel=1e-4)
    # Where GPUs of one node exchange as much, the fabric takes all of the time
    node = np.arange(32) // 4
    within_DD = np.where(node[:, None] == node, num_bytes / 3, 0)
    assert ExchangeModel.of(profile).seconds(within_DD) == pytest.approx(alpha + num_bytes / PCIE3, rel=1e-4)


def test_adapters_are_shared_by_as_many_as_there_are() -> None:
    found = read(FILES["flexmoe"])
    whole = profile_of(found, Ranks(16, 8, 8), 1024, 1024)
    assert 1 / whole.link("p2p", "inter").beta == pytest.approx(25e9)
    assert 1 / whole.link("all_to_all").beta == pytest.approx(1 / (8 / 15 / 25e9))
    # Four expert-parallel groups of two ranks, each group on two nodes, share one adapter of 6.25 GB/s
    spread = profile_of(read(FILES["demi"]), Ranks(2, 1, 4), 1024, 1024)
    assert 1 / spread.link("p2p", "inter").beta == pytest.approx(6.25e9 / 4)
    assert 1 / spread.link("all_to_all").beta == pytest.approx(6.25e9 / 4)
    # One group of four ranks on each node: one message has the adapter to itself, four at the same time share it
    node = profile_of(read(FILES["demi"]), Ranks(8, 4, 4), 1024, 1024)
    assert 1 / node.link("p2p", "inter").beta == pytest.approx(6.25e9)
    assert 1 / node.link("p2p").beta == pytest.approx(6.25e9 / 4)


def test_pairs_have_their_own_link() -> None:
    found = read(FILES["pro_prophet_hpnv"])
    rates = [1 / profile_of(found, Ranks(2, 2, 4, shards), 8, 8).link("p2p").beta for shards in (1, 2)]
    assert rates == pytest.approx([56.25e9, PCIE3], rel=1e-4)


def test_each_kind_of_gpu_has_its_rate_and_what_is_not_said_is_builtin() -> None:
    profile = profile_of(read(FILES["demi"]), Ranks(16, 4, 4), 500, 1000, 4)
    base = builtin(16, 4, 500, 1000, 4)
    # Two nodes of V100, then two of A100
    tflops_D = np.repeat([14.0, 19.5], 8)
    per_token_D = profile.forward.seconds_per_token / profile.rate_D
    assert per_token_D == pytest.approx(4 * 500 * 1000 / (1e12 * tflops_D))
    assert profile.rate_D.mean() == pytest.approx(1)
    assert profile.backward.seconds_per_token == 2 * profile.forward.seconds_per_token
    assert profile.link("p2p", "inter").alpha == base.link("p2p", "inter").alpha
    assert profile_of(read(FILES["parm_b"]), Ranks(8, 4, 4), 8, 8).link("p2p", "intra").alpha == pytest.approx(109e-6)
    # A job takes the first nodes, which have one kind of GPU here
    assert profile_of(read(FILES["demi"]), Ranks(8, 4, 4), 500, 1000, 4).rates == ()


UNLIMITED = SMALL.replace("nodes: {value: 2, source: here}, ", "").replace(
    "node: {name", "  - {name: slow, half_tflops: {value: 50, source: here}}\nnode: {name"
)


def test_without_numbers_of_nodes_all_have_the_slowest_gpu(tmp_path: Path) -> None:
    profile = profile_of(cluster(tmp_path, UNLIMITED), Ranks(6, 2, 2), 8, 8)
    assert profile.rates == () and profile.forward.seconds_per_token == pytest.approx(4 * 64 / 50e12)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: small", "name: [a]", "name: a list is not a string; write one"),
        ("name: small", "", "name: is missing"),
        ("name: bus, ", "name: bus, speed: 3, ", "node.speed: is unknown; choose from name, gb_per_second"),
        ("value: 10,", "value: fast,", "node.gb_per_second.value: 'fast' is not a number from 1e-06 to 100000"),
        ("value: 10,", "value: 1.0e+30,", "node.gb_per_second.value: 1e.30 is not a number from 1e-06 to 100000"),
        ("value: 10,", "value: 10, value: 20,", "line 6: value: appears twice"),
        ("{value: 10, source: here}", "10", "node.gb_per_second: 10 is not an object with value, source"),
        ("{value: 10, source: here}", "{value: 10}", "node.gb_per_second.source: is missing"),
        (
            "gpus_per_node: {value: 2,",
            "gpus_per_node: {value: 2.5,",
            "gpus_per_node.value: 2.5 is not an integer from 1 to 10000",
        ),
        ("nodes: {value: 2,", "nodes: {value: 2.0,", r"gpus\[0\].nodes.value: 2.0 is not an integer from 1 to 1000000"),
        ("gpus:\n  - ", "gpus: ", "gpus: an object is not a list"),
        (SMALL[SMALL.index("gpus:") : SMALL.index("\nnode:")], "gpus: []", "gpus: has no entries"),
        ("name: small", "name: !!python/object:os.system x", "small.yaml: line 2: tags .*os.system"),
        (SMALL, "3", "the file: 3 is not an object with name"),
    ],
)
def test_a_bad_file_names_itself_and_the_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    with pytest.raises(ValueError, match=f"small.yaml: .*{said}" if "small" not in said else said):
        cluster(tmp_path, SMALL.replace(old, new))


@pytest.mark.parametrize(
    ("ranks", "dtype_bytes", "said"),
    [
        (Ranks(4, 4, 4), 2, "gpus_per_node: 2, but this job has 4 ranks on a node"),
        (Ranks(6, 2, 2), 2, r"gpus\[\].nodes: 2 nodes, but expert-parallel ranks are on 3"),
        (Ranks(4, 2, 2), 4, r"gpus\[0\].fp32_tflops: is missing, but experts compute with 32 bits"),
    ],
)
def test_a_job_that_does_not_fit_is_told(tmp_path: Path, ranks: Ranks, dtype_bytes: int, said: str) -> None:
    cluster(tmp_path)
    with pytest.raises(ValueError, match=rf"--balance-profile .*small.yaml: {said}"):
        load_profile(tmp_path / "small.yaml", ranks, 8, 8, dtype_bytes)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--balance-profile .*none.yaml: cannot be read"):
        load_profile(tmp_path / "none.yaml", Ranks(2, 2, 2), 8, 8)
    with pytest.raises(ValueError, match="network: is missing"):
        profile_of(read(FILES["parm_a"]), Ranks(16, 8, 8), 8, 8)
