"""Seconds of kernels by kind: products, attention's core, and kernels limited by memory.

A product of rows with weights [inputs, outputs] of each of several experts takes

    experts * start + operations * product * (1 + half_width / width),    width = min(inputs, outputs)

Its backward pass also adds the weights' gradients to a buffer in 32 bits. Attention of a query to some keys takes

    operations * attention * (1 + half_keys / keys)

Other kernels take `launch` each, and the time to read and write activations of `ACTIVATION` bytes.
"""

from typing import NamedTuple

ACTIVATION = 2
"""Bytes of an activation."""

ACCUMULATED = 8
"""Bytes to read and write for a weight's gradient in 32 bits."""


CAST = 6
"""Bytes to read and write for a number that is cast: each layout reads 16 bits and writes 8."""


class Passes(NamedTuple):
    """Seconds of a forward and a backward pass."""

    forward: float
    backward: float

    def plus(self, *others: "Passes") -> "Passes":
        forward, backward = (sum(one) for one in zip(self, *others, strict=True))
        return Passes(forward, backward)

    def times(self, count: float) -> "Passes":
        return Passes(count * self.forward, count * self.backward)


class Beside(NamedTuple):
    """Fractions by which an exchange and computation take longer while both are in progress on a device."""

    exchange: float = 0.0
    """An exchange has only a part of the memory's rate and of the caches."""
    computation: float = 0.0
    """Computation also has fewer multiprocessors."""

    def added(self, exchange: float, computation: float) -> tuple[float, float]:
        """Return the seconds by which each takes longer than alone, if they begin together."""
        together = min((1 + self.exchange) * exchange, (1 + self.computation) * computation)
        longer, slower = (together * more / (1 + more) for more in self)
        return longer, slower


UNHINDERED = Beside()
"""Exchanges and computation do not slow each other down."""


class Kernels(NamedTuple):
    """Speed of a device's kernels."""

    product: Passes
    """Seconds per floating-point operation of a large product's forward pass, in the precision of the run."""
    half_width: float
    """Width of weights at which a product has half of this speed."""
    start: float
    """Seconds of a product of one expert beyond those of its operations."""
    attention: Passes
    """The same for attention to many keys."""
    memory: float
    """Bytes per second of kernels that memory limits; 0: they take no time."""
    launch: float
    """Seconds of a kernel beyond those of its bytes."""
    host: float = 0.0
    """Host seconds to launch a kernel."""
    occupied: float = 0.0
    """Fraction of the multiprocessors that an exchange takes, over the others."""
    casts: float = 0.0
    """Launches that cast inputs of a layer's products to 8 bits in both layouts, in a forward and a backward pass; 0:
    products are those of 16-bit numbers."""
    uneven: float = 0.0
    """Fraction by which grouped products are slower where the variance of the experts' numbers of rows is the square of
    the mean; in proportion to the variance."""
    half_keys: float = 0.0
    """Number of keys at which attention has half of its speed."""
    beside: Beside = UNHINDERED
    """How much longer exchanges and computation take beside each other."""

    def read(self, num_bytes: float, kernels: int = 0) -> float:
        """Return the seconds of kernels that read and write these bytes."""
        return kernels * self.launch + (num_bytes / self.memory if self.memory else 0.0)


def product(kernels: Kernels, rows: float, inputs: float, outputs: float) -> Passes:
    """Return the seconds of a product of rows with weights, without its start, casts and the sum of gradients."""
    width = min(inputs, outputs)
    operations = 2 * rows * inputs * outputs * (1 + kernels.half_width / width)
    return kernels.product.times(operations)


def cast(kernels: Kernels, rows: float, inputs: float, outputs: float) -> Passes:
    """Return the seconds to cast a product's inputs, and the gradients of its outputs, to 8 bits in two layouts."""
    share = CAST * rows if kernels.casts else 0.0
    return Passes(kernels.read(share * inputs), kernels.read(share * outputs))


def weights_passes(kernels: Kernels, experts: int, weights: float, products: int) -> Passes:
    """Return the seconds that do not depend on rows: the start of all products, and the sums of gradients.

    Args:
        experts: number of sets of weights.
        weights: weights of a set.
        products: products of a set in a forward pass.
    """
    starts = experts * products * kernels.start
    return Passes(starts, 2 * starts + kernels.read(ACCUMULATED * experts * weights))


def uneven_passes(kernels: Kernels, hidden: int, inner: float) -> Passes:
    """Return the seconds that a row costs more where the variance of experts' rows is the square of the mean."""
    return product(kernels, 1, hidden, inner).times(2 * kernels.uneven)


def expert_passes(kernels: Kernels, hidden: int, inner: float) -> Passes:
    """Return the seconds of a row in an expert, with its activation, and of sorting rows by expert, there and back.

    Args:
        inner: half of an expert's weights per hidden channel.
    """
    sorting = 4 * hidden
    activations = Passes(sorting + 2 * inner, sorting + 4 * inner)
    moved = Passes(*(kernels.read(ACTIVATION * numbers) for numbers in activations))
    return product(kernels, 1, hidden, inner).times(2).plus(cast(kernels, 1, hidden + inner, hidden + inner), moved)
