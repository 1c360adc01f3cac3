"""flow/experts.py: grouped products compared with one slot after another."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow import grouped_gemm
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.grouped_gemm import DeviceSplit, RowSplit, TorchGemm
from megatron_balance.flow.slot_linear import SlotLinear
from megatron_balance.flow.slot_weights import GroupedWeights, LinearGradients

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Maximum error as a fraction of the largest value."""

SIZES = {
    "even": [4, 4, 4],
    "uneven": [1, 7, 3],
    "first empty": [0, 5, 2],
    "middle empty": [5, 0, 0, 2],
    "last empty": [5, 2, 0],
    "one slot": [6],
    "one row": [0, 1, 0],
    "no rows": [0, 0, 0],
}
WIDTHS = {"aligned": (16, 32), "odd": (7, 5), "odd in": (7, 16), "odd out": (16, 5), "single": (1, 1)}

KINDS = ("no bias", "bias", "scaled bias", "bias scaled in float32")

PRODUCTS = [
    pytest.param(sizes, widths, kind, dtype, id=f"{size}-{width}-{kind}-{dtype}")
    for (number, (size, sizes)), (place, (width, widths)) in itertools.product(
        enumerate(SIZES.items()), enumerate(WIDTHS.items())
    )
    for kind, dtype in [(KINDS[(number + place) % len(KINDS)], list(TOLERANCE)[(number + 2 * place) % len(TOLERANCE)])]
]
"""Every two of sizes, widths, kinds of bias and data types."""

DEVICE = torch.cuda.current_device()


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def loop_linear(rows_RI: torch.Tensor, weight_SOI: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Multiply each slot's rows by its weight in float64, one slot after another."""
    chunks = rows_RI.double().split(sizes)
    return torch.cat([chunk @ weight.T for chunk, weight in zip(chunks, weight_SOI.double(), strict=True)])


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, terms: torch.Tensor | None = None
) -> None:
    """`terms`: sums of the absolute values whose sums are `expected`, if these may cancel."""
    assert found.shape == expected.shape
    assert found.isfinite().all()
    scale = (expected if terms is None else terms).abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


def assert_same_function(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Check that outputs are equal, and the inputs' gradients for a random gradient of the output."""
    assert_close(found, expected, found.dtype)
    gradient = torch.randn(found.shape, dtype=torch.float64, device=DEVICE).to(found.dtype)
    ours = torch.autograd.grad(found, inputs, gradient)
    theirs = torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, found.dtype)


class Computed:
    """The function of a linear layer, with gradients for its weights."""

    def __init__(self, linear: GroupedWeights, sizes: list[int]) -> None:
        self.linear = linear
        self.sizes = sizes
        self.gradients = LinearGradients(linear, len(sizes), TorchGemm())
        self.layer = SlotLinear(linear(), self.gradients)

    def __call__(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(rows, RowSplit(self.sizes, rows.device), scale)

    def check(self, output: torch.Tensor, reference: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Compare the output, and the gradients of inputs and parameters for a random gradient of the output."""
        gradient = torch.randn(output.shape, dtype=torch.float64, device=DEVICE).to(output.dtype)
        ours = [output, *torch.autograd.grad(output, inputs, gradient), *self.gradients.finish()]
        variables = [*inputs, *self.linear.parameters()]
        expected = results(reference, variables, gradient)
        # All results are sums of products. Those of absolute values tell how much the rounding of terms matters
        for variable in variables:
            variable.data.abs_()
        terms = results(reference, variables, gradient.abs())
        for one, other, bound in zip(ours, expected, terms, strict=True):
            assert one is output or one.dtype == other.dtype
            assert_close(one, other, output.dtype, bound)


def results(reference: Callable[[], torch.Tensor], variables: list[torch.Tensor], gradient: torch.Tensor):
    """Return what `reference` computes in float64, and the gradients of the variables."""
    output = reference()
    return [output, *torch.autograd.grad(output, variables, gradient.double())]


def loop_layer(linear: GroupedWeights, rows: torch.Tensor, sizes: list[int], scale: torch.Tensor | None = None):
    """Compute the layer in float64, one slot after another."""
    output = loop_linear(rows, linear.weight, sizes)
    if linear.bias is None:
        return output
    bias = torch.cat([one.expand(size, -1) for one, size in zip(linear.bias.double(), sizes, strict=True)])
    return output + (bias if scale is None else bias * scale.double().unsqueeze(1))


@pytest.mark.parametrize(("sizes", "widths", "kind", "dtype"), PRODUCTS)
def test_products(sizes: list[int], widths: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Combine weights, which scale the bias, are float32 while the experts compute in bfloat16."""
    torch.manual_seed(0)
    linear = new_linear(len(sizes), *widths, dtype, bias=not kind.startswith("no"))
    rows = random(sum(sizes), widths[0], dtype=dtype)
    scale = random(sum(sizes), dtype=torch.float32 if "float32" in kind else dtype) if "scaled" in kind else None
    computed = Computed(linear, sizes)
    found = computed(rows, scale)
    assert found.dtype == dtype
    computed.check(found, lambda: loop_layer(linear, rows, sizes, scale), [rows] if scale is None else [rows, scale])


@pytest.mark.parametrize("guests", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[3, 0, 4, 2], [0, 0, 1, 5], [2, 2, 0, 0]], ids=str)
def test_a_grouped_product_leaves_the_rows_of_guests(monkeypatch, guests: int, sizes: list[int]) -> None:
    """As on a device that has a fast grouped product; a CPU computes the same with products of its own."""
    weight = torch.randn(4, 16, 8).bfloat16()
    parts = [weight[: 4 - guests], *([weight[4 - guests :]] if guests else [])]
    split = RowSplit(sizes, torch.device("cpu"))
    calls = []

    def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(offs.tolist())
        output = torch.full((len(rows), matrices.shape[-1]), torch.nan, dtype=rows.dtype)
        output[: offs[-1]] = real(rows[: offs[-1]], matrices, offs=offs)
        return output

    real = F.grouped_mm
    rows = torch.randn(sum(sizes), 8).bfloat16()
    gradient = torch.randn(sum(sizes), 16).bfloat16()
    expected = [TorchGemm().outputs(rows, parts, split), TorchGemm().input_gradients(gradient, parts, split)]
    monkeypatch.setattr(grouped_gemm, "grouped_mm_is_fast", lambda matrix: True)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    found = [TorchGemm().outputs(rows, parts, split), TorchGemm().input_gradients(gradient, parts, split)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    home = sizes[: 4 - guests]
    assert calls == ([torch.tensor(home).cumsum(0).tolist()] * 2 if sum(home) else [])


@pytest.fixture
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch fill memory that it allocates with NaN."""
    # Not needed for that, but torch asks for it
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000, dtype=torch.bfloat16, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tail", [None, 0, 200])
@pytest.mark.parametrize("guests", [0, 2])
@pytest.mark.parametrize("widths", [(16, 8), (256, 128), pytest.param((1024, 512), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "sizes", [[0, 300, 0, 212, 0], [0, 1, 0, 0, 0], [67, 0, 0, 0, 1000], [4, 7, 3, 2], [0, 0, 0]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_free_memory_holds_has_no_influence(
    unwritten_is_nan, dtype: torch.dtype, sizes: list[int], widths: tuple[int, int], guests: int, tail: int | None
) -> None:
    """Nobody has written the rows after the last end (`tail`; None: the host knows the sizes)."""
    torch.manual_seed(0)
    used = sum(sizes)
    home = len(sizes) - guests
    linear = new_linear(home, *widths, dtype, bias=False)
    linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)
    linear.allocate_guests(3)
    linear.guests[0].weight.normal_()
    weight = torch.cat([linear.weight, linear.guests[0].weight[:guests]]).detach().double().requires_grad_()
    rows, gradient = (random(used, width, dtype=dtype) for width in widths)
    expected = results(lambda: loop_linear(rows, weight, sizes), [rows, weight], gradient)

    def unwritten(written: torch.Tensor) -> torch.Tensor:
        longer = written.new_empty(used + (tail or 0), written.shape[1])
        longer[:used] = written.detach()
        return longer

    ends = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    gradients = LinearGradients(linear, len(sizes), TorchGemm())
    layer = SlotLinear(linear(guests), gradients)
    inputs = unwritten(rows).requires_grad_()
    output_gradient = unwritten(gradient)
    output = layer(inputs, RowSplit(sizes, DEVICE) if tail is None else DeviceSplit(ends))
    output.backward(output_gradient)
    (home_gradient,) = gradients.finish()
    guest_gradient = linear.guests[0].weight.main_grad
    weight_gradient = torch.cat([home_gradient, guest_gradient[:guests].to(dtype)])
    found = [output[:used], inputs.grad[:used], weight_gradient]
    assert {one.dtype for one in found} == {dtype}
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, dtype)
    empty = [slot for slot, size in enumerate(sizes) if not size]
    assert not weight_gradient[empty].any() and not guest_gradient[guests:].any()


def test_what_is_fast_is_what_torch_computes_in_one_kernel(monkeypatch) -> None:
    class Matrices(SimpleNamespace):
        """Stands for a tensor on a device."""

        is_cuda = True
        device = None
        shape = (2, 16, 8)

        def element_size(self) -> int:
            return self.dtype.itemsize

    fast = grouped_gemm.grouped_mm_is_fast
    half = Matrices(dtype=torch.bfloat16)
    single = Matrices(dtype=torch.float32)
    for capability, expected in (((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert fast(half) == expected and not fast(single)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not fast(Matrices(dtype=torch.bfloat16, shape=(2, 16, 4)))
    assert not fast(Matrices(dtype=torch.bfloat16, is_cuda=False))


def new_linear(slots: int, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = True):
    """Return GroupedWeights with random parameters."""
    linear = GroupedWeights(slots, inputs, outputs, SimpleNamespace(params_dtype=dtype, add_bias_linear=bias))
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


def test_only_the_bias_needs_a_gradient() -> None:
    linear = new_linear(2, 16, 16, torch.float32)
    rows = random(5, 16, dtype=torch.float32)
    linear.weight.requires_grad_(False)
    computed = Computed(linear, [2, 3])
    computed(rows).sum().backward()
    weight, bias = computed.gradients.finish()
    assert weight is None
    torch.testing.assert_close(bias, torch.tensor([[2.0], [3.0]], device=DEVICE).expand(2, 16))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_main_gradients(dtype: torch.dtype, bias: bool) -> None:
    """In float32, over several chunks, for guests too; autograd gets placeholders that share the weights' memory."""
    linear = new_linear(2, 16, 8, dtype, bias=bias)
    for parameter in linear.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    linear.allocate_guests(2)
    gradients = LinearGradients(linear, 3, TorchGemm())
    layer = SlotLinear(linear(1), gradients)
    chunks = ([3, 0, 2], [1, 4, 5])
    expected = [torch.ones(4, *one.shape[1:], dtype=torch.float64, device=DEVICE) for one in linear.parameters()]
    expected[0][2:] = 0
    if bias:
        expected[1][2:] = 0
    for sizes in chunks:
        rows = random(sum(sizes), 16, dtype=dtype)
        output = layer(rows, RowSplit(sizes, rows.device))
        gradient = torch.randn(output.shape, device=DEVICE).to(dtype)
        output.backward(gradient)
        parts = zip(rows.detach().double().split(sizes), gradient.double().split(sizes), strict=True)
        for slot, (part, outer) in enumerate(parts):
            expected[0][slot] += outer.T @ part
            if bias:
                expected[1][slot] += outer.sum(0)
    placeholders = gradients.finish()
    for number, parameter in enumerate(linear.parameters()):
        assert parameter.grad_added_to_main_grad
        assert placeholders[number].data_ptr() == parameter.data_ptr() and not placeholders[number].requires_grad
        found = torch.cat([parameter.main_grad, linear.guests[0].tensors()[number].main_grad])
        torch.testing.assert_close(found.double(), expected[number], rtol=1e-6, atol=1e-5)


def test_a_backward_pass_computes_with_guest_slots_of_its_own() -> None:
    """So does a forward pass that it repeats; guest slots of other forward passes may hold other experts by then."""
    results = []
    for apart in (False, True):
        torch.manual_seed(0)
        linear = new_linear(2, 16, 8, torch.float64)
        for parameter in linear.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        used = linear.allocate_guests(2, apart=apart)
        size = 2 * (8 * 16 + 8) * 8
        assert used == (3 if apart else 2) * size
        for own, other in zip(linear.guests[0].tensors(), linear.forward_guests[0].tensors(), strict=True):
            assert (own is other) != apart
            own.normal_()
            other.copy_(own)
        rows = random(5, 16, dtype=torch.float64)
        gradients = LinearGradients(linear, 4, TorchGemm())
        split = RowSplit([2, 1, 1, 1], rows.device)
        scale = random(5, dtype=torch.float64)
        output = SlotLinear(linear(2), gradients)(rows, split, scale)
        if apart:
            for other in linear.forward_guests[0].tensors():
                other.data = torch.full_like(other, torch.nan)
        repeated = SlotLinear(linear(2, True), gradients)(rows, split, scale)
        output.sum().backward()
        gradients.finish()
        guests = [one.main_grad for one in linear.guests[0].tensors()]
        results.append([output, repeated, rows.grad, scale.grad, *guests])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_overwritten_weights_are_noticed() -> None:
    linear = new_linear(2, 16, 16, torch.float32)
    rows = random(5, 16, dtype=torch.float32)
    output = Computed(linear, [2, 3])(rows)
    linear.weight.detach()[1].fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_expanded_gradients_and_strided_rows_are_accepted() -> None:
    linear = new_linear(2, 6, 8, torch.float32, bias=False)
    rows = torch.randn(6, 6, device=DEVICE).T.requires_grad_()
    computed = Computed(linear, [2, 4])
    computed(rows).sum().backward()
    expected = torch.stack([chunk.sum(0).expand(8, 6) for chunk in rows.detach().split([2, 4])])
    torch.testing.assert_close(computed.gradients.finish()[0], expected)


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def gate(inner: torch.Tensor, activation, clamp: float | None, offset: float) -> torch.Tensor:
    """Compute a gated unit, one element after another: [R, 2F] -> [R, F]."""
    width = inner.shape[1] // 2
    gated = inner[:, :width]
    linear = inner[:, width:]
    if clamp is not None:
        gated = torch.where(gated > clamp, clamp, gated)
        linear = torch.where(linear > clamp, clamp, torch.where(linear < -clamp, -clamp, linear))
    return activation(gated) * (linear + offset)


@pytest.mark.parametrize(
    ("activation", "clamp", "offset"),
    [(F.silu, None, 0.0), (F.silu, 0.7, 0.0), (quick_gelu, None, 1.0), (quick_gelu, 0.5, 1.0)],
    ids=["plain", "clamped", "offset", "both"],
)
def test_gated_units(activation, clamp: float | None, offset: float) -> None:
    torch.manual_seed(0)
    sizes = [5, 0, 9]
    hidden = 6
    inner = 4
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=len(sizes),
        moe_ffn_hidden_size=inner,
        add_bias_linear=True,
        gated_linear_unit=True,
        activation_func=activation,
        activation_func_clamp_value=clamp,
        glu_linear_offset=offset,
        bias_activation_fusion=False,
        params_dtype=torch.float64,
        perform_initialization=False,
    )
    groups = SimpleNamespace(**dict.fromkeys(("ep", "tp", "expt_tp", "expt_dp", "dp_cp"), Alone()))
    experts = GroupedExperts(range(len(sizes)), config, groups)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows = random(sum(sizes), hidden, dtype=torch.float64)
    probs = random(sum(sizes), dtype=torch.float64)
    found = experts(rows, torch.tensor(sizes), probs)
    first = loop_layer(experts.linear_fc1, rows, sizes)
    weighted = gate(first, activation, clamp, offset) * probs.unsqueeze(1)
    expected = loop_layer(experts.linear_fc2, weighted, sizes, probs)
    assert clamp is None or ((first.abs() > clamp).any() and (first.abs() < clamp).any())
    assert_same_function(found, expected, [rows, probs, *experts.parameters()])
