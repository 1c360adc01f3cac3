"""Codecs: decoded rows are within the stated error bound for any floats, and rows are independent."""

import importlib.util
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.comm.codecs import CODECS, Codec, NoCodec, load_codec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = float(np.finfo(np.float32).max)
NON_FINITE = (torch.nan, torch.inf, -torch.inf)
ON_DEVICES = [name for name in CODECS if name != "zfp"]

needs_zfpy = pytest.mark.skipif(importlib.util.find_spec("zfpy") is None, reason="needs the package zfpy")
ZFP = pytest.param("zfp", marks=needs_zfpy)
every_codec = pytest.mark.parametrize("name", [*ON_DEVICES, ZFP])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def zfp_bound(sent: np.ndarray) -> np.ndarray:
    num_rows, hidden = sent.shape
    blocks = np.pad(np.abs(sent), ((0, 0), (0, -hidden % 4))).reshape(num_rows, -1, 4)
    exponent = np.frexp(blocks.max(2))[1].astype(float)
    bound = 2**exponent * (5 / 16 + 2.0**-24) + 2.0**-97
    return bound.repeat(4, axis=1)[:, :hidden]


BOUNDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.zeros_like,
    "bf16": lambda sent: np.maximum(np.abs(sent) / 2**8, 2.0**-134),
    "fp16": lambda sent: np.maximum.reduce(
        [np.abs(sent) / 2**11, np.full_like(sent, 2.0**-25), np.where(np.abs(sent) > 65504, np.abs(sent) - 65504, 0)]
    ),
    "fp8": lambda sent: np.maximum.reduce(
        [np.abs(sent) / 16, np.abs(sent).max(1, keepdims=True) / 2**18 + 0 * sent, np.full_like(sent, 2.0**-136)]
    ),
    "int8": lambda sent: (
        (sent.max(1, keepdims=True) - sent.min(1, keepdims=True)) / 500
        + np.abs(sent).max(1, keepdims=True) / 2**23
        + 2.0**-127
        + 0 * sent
    ),
    "zfp": zfp_bound,
}
"""Bounds of the error of each element of finite rows, by the formulas in the codecs' docstrings."""


def assert_within(bound: np.ndarray, sent: torch.Tensor, arrived: torch.Tensor, lossless: bool = False) -> None:
    """Check that finite rows arrived within `bound`, plus the rounding to their type."""
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert bool(arrived.isfinite().all())
    got = arrived.double().numpy()
    info = torch.finfo(sent.dtype)
    half_unit = 0 if lossless else np.abs(got) * info.eps / 2 + info.tiny * info.eps / 2
    assert (np.abs(got - as_coded(sent, lossless)) <= bound + half_unit).all()


def as_coded(sent: torch.Tensor, lossless: bool) -> np.ndarray:
    return (sent if lossless else sent.float()).double().numpy()


def round_trip(codec: Codec, sent: torch.Tensor) -> torch.Tensor:
    payload = codec.encode(sent)
    assert payload.dtype == torch.uint8
    assert payload.is_contiguous()
    assert payload.shape == (len(sent), codec.bytes_per_row(sent.shape[1], sent.dtype))
    return codec.decode(payload, sent.shape[1], sent.dtype)


def row_of(hidden: int) -> st.SearchStrategy[np.ndarray]:
    """Draw finite float32 numbers: arbitrary, neighbors of one, normally distributed, or of mixed magnitude."""
    number = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
        [0.0, -0.0, 1e-45, 2.0**-126, 65504.0, 65520.0, 3.39e38, LARGEST, -LARGEST]
    )
    seed = st.integers(0, 2**32 - 1)
    exponent = st.integers(-45, 38)

    def neighbors(center: float, spread: int, seed: int) -> np.ndarray:
        steps = np.random.default_rng(seed).integers(-spread, spread, hidden, endpoint=True, dtype=np.int32)
        magnitude = np.abs(np.float32(center)).view(np.int32).item() + steps.astype(np.int64)
        bits = np.clip(magnitude, 0, np.float32(LARGEST).view(np.int32).item()).astype(np.int32)
        return np.copysign(bits.view(np.float32), np.float32(center))

    def bell(center: float, exponent: int, seed: int) -> np.ndarray:
        return center + 10.0**exponent * np.random.default_rng(seed).standard_normal(hidden)

    def decades(seed: int) -> np.ndarray:
        generator = np.random.default_rng(seed)
        return generator.choice([-1, 1], hidden) * 10 ** generator.uniform(-46, 38.5, hidden)

    kinds = (
        st.lists(number, min_size=hidden, max_size=hidden).map(np.array),
        st.builds(neighbors, number, st.sampled_from([0, 1, 3, 252, 504, 70000]), seed),
        st.builds(bell, number | st.just(0.0), exponent, seed),
        st.builds(decades, seed),
    )
    return st.one_of(kinds).map(lambda values: np.clip(values, -LARGEST, LARGEST))


@st.composite
def rows_of(draw: st.DrawFn, dtype: torch.dtype, min_rows: int = 0) -> torch.Tensor:
    """Draw finite rows [R, H] of `dtype`; float64 numbers are between float32 numbers."""
    num_rows = draw(st.integers(min_rows, 4))
    hidden = draw(st.integers(1, 13))
    rows = np.array([draw(row_of(hidden)) for _ in range(num_rows)], dtype=np.float64).reshape(num_rows, hidden)
    largest = torch.finfo(dtype).max
    return torch.from_numpy(rows * (1 - 2.0**-30)).clamp(-largest, largest).to(dtype)


@every_codec
@every_dtype
def test_errors_are_within_the_bound(name: str, dtype: torch.dtype) -> None:
    codec = load_codec(name)
    lossless = name == "none"

    @settings(max_examples=20)
    @given(rows_of(dtype))
    def check(sent: torch.Tensor) -> None:
        bound = BOUNDS[name](as_coded(sent, lossless)) if sent.numel() else np.zeros(sent.shape)
        assert_within(bound, sent, round_trip(codec, sent), lossless)

    check()


@every_codec
@every_dtype
def test_nan_and_infinity_arrive_and_spoil_nothing(name: str, dtype: torch.dtype) -> None:
    codec = load_codec(name)

    @settings(max_examples=10)
    @given(rows_of(dtype, min_rows=2), st.data())
    def check(sent: torch.Tensor, data: st.DataObject) -> None:
        places = st.tuples(*(st.integers(0, size - 1) for size in sent.shape))
        spoiled = sent.clone()
        for place, value in data.draw(st.dictionaries(places, st.sampled_from(NON_FINITE), min_size=1)).items():
            spoiled[place] = value
        arrived = round_trip(codec, spoiled)
        finite = spoiled.isfinite()
        whole = finite.all(1)
        torch.testing.assert_close(arrived[whole], round_trip(codec, sent)[whole], rtol=0, atol=0)
        if name == "zfp":
            assert arrived[~whole].isnan().all()
            return
        torch.testing.assert_close(arrived[~finite], spoiled[~finite], rtol=0, atol=0, equal_nan=True)
        coded = as_coded(torch.where(finite, spoiled, 0), name == "none")
        bound = np.where(finite.numpy(), BOUNDS[name](coded), torch.finfo(dtype).max)
        both = (torch.where(finite, rows, 0) for rows in (spoiled, arrived))
        assert_within(bound, *both, lossless=name == "none")

    check()


@every_codec
@every_dtype
def test_a_row_has_its_bytes_wherever_it_lies(name: str, dtype: torch.dtype) -> None:
    codec = load_codec(name)
    generator = torch.Generator().manual_seed(0)
    for hidden in (1, 3, 4, 7, 32):
        sent = torch.randn(hidden, 9, generator=generator).to(dtype)
        rows = sent.T
        payload = codec.encode(rows)
        order = torch.randperm(9, generator=generator)
        assert torch.equal(codec.encode(rows[order]), payload[order])
        parts = [codec.encode(rows[:4]), codec.encode(rows[4:4]), codec.encode(rows[4:])]
        assert torch.equal(torch.cat(parts), payload)
        assert torch.equal(codec.encode(rows.contiguous()), payload)
        arrived = codec.decode(payload, hidden, dtype)
        assert torch.equal(codec.decode(payload[order], hidden, dtype), arrived[order])
        assert torch.equal(codec.decode(payload[2::3], hidden, dtype), arrived[2::3])
        assert torch.equal(codec.decode(payload.T.contiguous().T, hidden, dtype), arrived)
        for row in range(9):
            # A single row is contiguous at any offset
            wider = torch.nn.functional.pad(payload[row : row + 1], (1, 2))
            assert torch.equal(codec.decode(wider[:, 1:-2], hidden, dtype), arrived[row : row + 1])
        assert codec.decode(payload[:0], hidden, dtype).shape == (0, hidden)


@every_codec
def test_rows_may_require_gradients(name: str) -> None:
    codec = load_codec(name)
    rows = torch.randn(3, 8)
    assert torch.equal(codec.encode((2 * rows).requires_grad_()), codec.encode(2 * rows))
    assert torch.equal(codec.encode(2 * rows.clone().requires_grad_()), codec.encode(2 * rows))


@pytest.mark.parametrize(
    ("name", "dtype"), [("none", torch.float16), ("bf16", torch.bfloat16), ("fp16", torch.float16)], ids=str
)
def test_a_type_travels_as_itself_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    every_number = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    assert torch.equal(round_trip(load_codec(name), every_number).view(torch.int16), every_number.view(torch.int16))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", ZFP])
def test_what_exceeds_float32_stays_finite(name: str) -> None:
    sent = torch.tensor([[1e308, -1e308, 1.0, 0.0]], dtype=torch.float64)
    arrived = round_trip(load_codec(name), sent)
    most = 65504.0 if name == "fp16" else LARGEST
    assert arrived[0, :2].sign().tolist() == [1, -1]
    assert arrived[0, :2].abs().tolist() == pytest.approx([most, most], rel=0.01)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", ZFP])
@pytest.mark.parametrize("sign", [1, -1])
def test_neighbors_of_the_largest_number(name: str, sign: int) -> None:
    """Half a step above the largest number is infinity."""
    steps = torch.arange(3000, dtype=torch.int32)[:, None] * torch.tensor([0, 1], dtype=torch.int32)
    near = (torch.tensor(LARGEST).view(torch.int32) - steps).view(torch.float32)
    sent = torch.cat([near, near * torch.tensor([1.0, -1.0]), near[:, 1:].expand(-1, 2)]) * sign
    assert_within(BOUNDS[name](sent.double().numpy()), sent, round_trip(load_codec(name), sent))


def test_constant_rows_are_exact_in_int8() -> None:
    values = torch.tensor([0.0, 1.0, -1 / 3, 2.0**-126, LARGEST, -LARGEST, 65504.0])
    sent = values[:, None].expand(-1, 5)
    assert torch.equal(round_trip(load_codec("int8"), sent), sent)


def bf16_reference(sent: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even; numbers below 2^-126 have fewer bits."""
    unit = 2.0 ** np.maximum(np.frexp(sent)[1] - 8, -133)
    largest = (2 - 2.0**-7) * 2.0**127
    return np.clip(np.rint(sent / unit) * unit, -largest, largest)


def fp16_reference(sent: np.ndarray) -> np.ndarray:
    return np.clip(sent, -65504, 65504).astype(np.float16).astype(np.float64)


def fp8_reference(sent: np.ndarray) -> np.ndarray:
    """Round to the nearest e4m3 number up to 416, scaled so that the largest element is 416."""
    exponent, mantissa = np.divmod(np.arange(0x7E), 8)
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    numbers = np.concatenate([-numbers, numbers])
    scale = np.abs(sent).max(1, keepdims=True) / 416
    return scale * numbers[np.abs((sent / scale)[:, :, None] - numbers).argmin(2)]


def int8_reference(sent: np.ndarray) -> np.ndarray:
    """Round to the nearest of 253 evenly spaced numbers from the minimum to the maximum."""
    numbers = np.linspace(sent.min(1), sent.max(1), 253, axis=1)
    return np.take_along_axis(numbers, np.abs(sent[:, :, None] - numbers[:, None, :]).argmin(2), axis=1)


def samples(num_rows: int = 64, hidden: int = 96) -> torch.Tensor:
    """Return normally distributed rows of many widths and centers, including one-sided rows."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_rows, hidden, generator=generator) + torch.randn(num_rows, 1, generator=generator)
    rows[::3] = rows[::3].relu() + 0.1
    return rows * 10 ** torch.linspace(-8, 8, num_rows)[:, None]


@pytest.mark.parametrize(("name", "reference"), [("bf16", bf16_reference), ("fp16", fp16_reference)])
def test_narrower_floats_equal_the_reference(name: str, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    sent = torch.cat([samples(), samples() * 1e30, samples() * 1e-32])
    sent[0, :4] = torch.tensor([LARGEST, -LARGEST, 1e-45, 2.0**-126])
    arrived = round_trip(load_codec(name), sent).double().numpy()
    np.testing.assert_array_equal(arrived, reference(sent.double().numpy()))


@pytest.mark.parametrize(("name", "reference"), [("fp8", fp8_reference), ("int8", int8_reference)])
def test_codes_are_the_nearest_of_the_reference(name: str, reference: Callable[[np.ndarray], np.ndarray]) -> None:
    rows = samples()
    sent = rows.double().numpy()
    error = np.abs(round_trip(load_codec(name), rows).double().numpy() - sent)
    # Compare errors instead of numbers: float32 may break a tie the other way
    tolerance = 3e-6 * np.abs(sent).max(1, keepdims=True)
    assert (np.abs(error - np.abs(reference(sent) - sent)) <= tolerance).all()


@pytest.mark.parametrize("hidden", [1, 4, 5, 12, 64])
def test_zfp_equals_the_library_row_by_row(hidden: int) -> None:
    zfpy = pytest.importorskip("zfpy")
    rows = samples(7, hidden)
    padded = torch.nn.functional.pad(rows, (0, -hidden % 4)).numpy()
    expected = [zfpy.decompress_numpy(zfpy.compress_numpy(row, rate=8))[:hidden] for row in padded]
    np.testing.assert_array_equal(round_trip(load_codec("zfp"), rows).numpy(), np.stack(expected))


def test_zfp_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfpy", None)
    with pytest.raises(ValueError, match=r"--moe-comm-codec zfp: .*pip install -e '\.\[zfp\]'; or choose"):
        load_codec("zfp")


@pytest.mark.parametrize("name", ON_DEVICES)
@every_dtype
def test_nothing_depends_on_the_values(name: str, dtype: torch.dtype) -> None:
    """Meta tensors have no values, so copying one to the host would fail."""
    codec = load_codec(name)
    payload = codec.encode(torch.empty(5, 24, dtype=dtype, device="meta"))
    assert payload.shape == (5, codec.bytes_per_row(24, dtype))
    rows = codec.decode(payload, 24, dtype)
    assert (rows.shape, rows.dtype, rows.device.type) == ((5, 24), dtype, "meta")


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICES)
@every_dtype
def test_cuda_is_within_the_bound(name: str, dtype: torch.dtype, no_synchronization: None) -> None:
    codec = load_codec(name)
    largest = torch.finfo(dtype).max
    rows = samples().double()
    sent = torch.cat([rows, rows * 1e30, rows * 1e-37]).clamp(-largest, largest).to(dtype)
    spoiled = sent.clone()
    spoiled[:, 5:8] = torch.tensor(NON_FINITE)
    payloads = [codec.encode(each.pin_memory().to("cuda", non_blocking=True)) for each in (sent, spoiled)]
    arrived = [codec.decode(payload, sent.shape[1], dtype) for payload in payloads]
    torch.cuda.set_sync_debug_mode("default")
    assert_within(BOUNDS[name](as_coded(sent, name == "none")), sent, arrived[0].cpu(), name == "none")
    torch.testing.assert_close(arrived[1][:, 5:8].cpu(), spoiled[:, 5:8], rtol=0, atol=0, equal_nan=True)
    assert bool(arrived[1][:, :5].isfinite().all())


class Own(NoCodec):
    """A user's codec."""


class Wanting(NoCodec):
    def __init__(self, something: int) -> None:
        self.something = something


def test_a_codec_is_found_by_module() -> None:
    assert type(load_codec(f"{__name__}:Own")).__name__ == "Own"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gzip", "choose from none, bf16, fp16, fp8, int8, zfp, or give package.module:Class"),
        ("no.such.module:Codec", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        (":Codec", "cannot be imported"),
        ("builtins:dict", "is not a subclass of megatron_balance.comm.codecs.Codec"),
        (f"{__name__}:round_trip", "is not a subclass"),
        ("megatron_balance.comm.codecs:Codec", "cannot be constructed without arguments"),
        (f"{__name__}:Wanting", "cannot be constructed without arguments"),
    ],
)
def test_a_wrong_name_names_the_flag(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--moe-comm-codec {name}: .*{message}"):
        load_codec(name)
