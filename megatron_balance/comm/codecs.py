"""Compression of the rows of an all-to-all (AbsCompressor, ScheMoE section 3.1).

A codec turns rows [R, H] of floats into a payload [R, B] of bytes. B depends only on H and the dtype, and rows are
encoded independently, so a payload has the splits of its rows. Nothing here waits for a CUDA device or is
differentiable.

    codec  B, in bytes        ratio from 32 / 16 bits    error of an element x              NaN, Inf
    none   itemsize H         1 / 1                      0                                  arrive bit for bit
    bf16   2 H                2 / 1                      |x| / 2^8                          arrive
    fp16   2 H                2 / 1                      |x| / 2^11 up to 65504             arrive
    fp8    H + 4              4 / 2                      |x| / 16 or amax / 2^18            arrive
    int8   H + 8              4 / 2                      (hi - lo) / 500                    arrive
    zfp    H + 1              4 / 2                      2^e 5 / 16, e of 4 elements        their row becomes NaN

The classes state the full bounds. The bounds hold for decoded values before rounding to `dtype`, which adds half a unit
in the last place. Lossy codecs first round float64 to float32, but never a finite element to infinity. They may lose
the sign of a zero.
"""

import importlib
from abc import ABC, abstractmethod

import torch
from torch.nn.functional import pad

from megatron_balance.config.flags import named

FLAG = "--moe-comm-codec"

SMALLEST = torch.finfo(torch.float32).tiny
"""Smallest step between codes; its reciprocal and its multiples are normal float32 numbers."""


class Codec(ABC):
    @abstractmethod
    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        """Return B for rows of `hidden` elements."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows [R, H] of any strides as [R, B] uint8, contiguous; R may be 0, H may not."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode a payload [R, B] of rows of `dtype`, as [R, H] of `dtype`."""


class NoCodec(Codec):
    """Sends the bytes of the rows unchanged."""

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return _read_as(rows, torch.uint8)

    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return _read_as(payload, dtype)


class _Narrower(Codec):
    """Rounds elements to a 16-bit float; rows of this type are sent without loss and without a copy."""

    narrow: torch.dtype

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * self.narrow.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return _read_as(_saturated(rows, self.narrow), torch.uint8)

    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return _saturated(_read_as(payload, self.narrow), dtype)


class BFloat16(_Narrower):
    """Rounds elements to bfloat16, with a relative error of at most 2^-8.

    The error of an element x is <= max(|x| / 2^8, 2^-134).
    """

    narrow = torch.bfloat16


class Float16(_Narrower):
    """Rounds elements to float16, with a relative error of at most 2^-11 up to 65504.

    The error of an element x is <= max(|x| / 2^11, 2^-25); finite magnitudes above 65504 become 65504. For rows of
    bfloat16 it saves nothing and may saturate.
    """

    narrow = torch.float16


class Float8(Codec):
    """Rounds elements to float8 e4m3 with a scale per row, with a relative error of at most 2^-4.

    Payload row: H codes, then the scale in float32. The error of an element x is <= max(|x| / 16, amax / 2^18,
    2^-136), also in rows with NaN or Inf. amax, the largest finite magnitude of the row, is sent as 416, the second
    largest code: 448 represents infinity, which e4m3fn lacks.
    """

    HIGHEST = 416
    INFINITE = 448

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden + 4

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        rows = _at_most_float32(rows)
        amax_R1 = _finite(rows).abs_().amax(1, keepdim=True).float()
        # amax must not decode to a larger value, because that may be infinite
        scale_R1 = (amax_R1 / (self.HIGHEST * _ABOVE_ONE)).clamp_min(SMALLEST)
        levels = (rows / scale_R1).clamp_(-self.INFINITE, self.INFINITE)
        return _payload(levels, torch.float8_e4m3fn, scale_R1)

    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        codes, scale_R1 = _codes_and_header(payload, hidden, torch.float8_e4m3fn)
        return (_levels(codes, self.INFINITE) * scale_R1).to(dtype)


class Int8(Codec):
    """Rounds elements to 253 evenly spaced values per row, with an error of about 1/500 of the row's range at most.

    The error is <= (hi - lo) / 500 + amax / 2^23 + 2^-127. lo and hi are the row's smallest and largest finite
    elements, amax the larger of their magnitudes. A constant row is exact down to 2^-126. NaN and Inf have separate
    codes; the bound then holds for the finite elements of the row if lo <= 0 <= hi. Payload row: H codes, then the
    middle of the range and the step in float32.
    """

    HIGHEST = 126
    NAN = -128
    INFINITE = 127

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden + 8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        rows = _at_most_float32(rows)
        finite = _finite(rows)
        # Separate calls: aminmax is not vectorised on the CPU
        low_R1, high_R1 = (end.float() for end in (finite.amin(1, keepdim=True), finite.amax(1, keepdim=True)))
        # Rounded towards zero, so the farther end has the larger magnitude, and codes of +-126 stay finite
        middle_R1 = low_R1 / 2 + high_R1 / 2
        middle_R1 = torch.where(low_R1 == high_R1, low_R1, torch.nextafter(middle_R1, torch.zeros_like(middle_R1)))
        reach_R1 = torch.maximum(high_R1 - middle_R1, middle_R1 - low_R1)
        step_R1 = (reach_R1 / (self.HIGHEST * _ABOVE_ONE)).clamp_min(SMALLEST)
        levels = (rows - middle_R1).div_(step_R1).round_()
        levels.nan_to_num_(nan=self.NAN, posinf=self.INFINITE, neginf=-self.INFINITE)
        return _payload(levels, torch.int8, torch.cat([middle_R1, step_R1], 1))

    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        codes, header_R2 = _codes_and_header(payload, hidden, torch.int8)
        levels = _levels(codes, self.INFINITE).masked_fill_(codes == self.NAN, torch.nan)
        return torch.addcmul(header_R2[:, :1], levels, header_R2[:, 1:]).to(dtype)


class Zfp(Codec):
    """Compresses CPU tensors by zfp, to 8 bits per element; 4 elements share an exponent.

    The error is <= 2^e (5 / 16 + 2^-24) + 2^-97 in a block of 4 elements < 2^e; e is the smallest such integer. This is
    the worst case. Of a block's 32 bits, 9 hold the exponent and up to 3 mark which elements have begun, so 5 of 32 bit
    planes arrive. The missing planes are at most 2/3 of the last one sent (negabinary), and the inverse transform
    amplifies this error by up to 15/4. Payload row: ceil(H / 4) blocks, then 1 byte, which is 1 if the row decodes to
    NaN.

    Raises:
        ValueError: zfpy is not installed.
    """

    RATE = 8

    def __init__(self) -> None:
        try:
            self.zfpy = importlib.import_module("zfpy")
        except ImportError as error:
            remedy = "in the checkout, pip install -e '.[zfp]'; or choose fp8 or int8"
            raise ValueError(f"{FLAG} zfp: the package zfpy cannot be imported ({error}): {remedy}") from error

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden + -hidden % 4 + 1

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, hidden = rows.shape
        payload = rows.new_empty((num_rows, self.bytes_per_row(hidden, rows.dtype)), dtype=torch.uint8)
        if num_rows == 0:
            return payload
        rows = _at_most_float32(rows.detach()).float()
        payload[:, -1] = ~rows.isfinite().all(1)
        # zfp supports neither NaN nor Inf, and its integers underflow for smaller exponents
        values = torch.where(rows.isfinite() & (rows.abs() >= 2.0**-97), rows, 0)
        blocks = pad(values, (0, -hidden % 4)).flatten().numpy()
        stream = bytearray(self.zfpy.compress_numpy(blocks, rate=self.RATE, write_header=False))
        # zfp pads its last word of 8 bytes
        payload[:, :-1] = torch.frombuffer(stream, dtype=torch.uint8, count=len(blocks)).view(num_rows, -1)
        return payload

    def decode(self, payload: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        num_rows = len(payload)
        if num_rows == 0:
            return payload.new_empty((0, hidden), dtype=dtype)
        stream = payload[:, :-1].flatten()
        size = len(stream)
        # zfp reads words of 8 bytes
        words = pad(stream, (0, -size % 8)).numpy().tobytes()
        values = self.zfpy._decompress(words, self.zfpy.type_float, (size,), rate=self.RATE)
        values = torch.from_numpy(values).view(num_rows, -1)[:, :hidden]
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return values.clamp(-largest, largest).masked_fill_(payload[:, -1:] != 0, torch.nan).to(dtype)


CODECS: dict[str, type[Codec]] = {
    "none": NoCodec,
    "bf16": BFloat16,
    "fp16": Float16,
    "fp8": Float8,
    "int8": Int8,
    "zfp": Zfp,
}


def load_codec(name: str) -> Codec:
    """Return the codec named in CODECS, or an instance of `package.module:Class`; ValueError if there is no such codec,
    the class is no Codec or needs arguments, or zfpy is missing."""
    factory = named(FLAG, name, CODECS)
    if not (isinstance(factory, type) and issubclass(factory, Codec)):
        raise ValueError(f"{FLAG} {name}: is not a subclass of {Codec.__module__}.{Codec.__qualname__}")
    try:
        return factory()
    except TypeError as error:
        raise ValueError(f"{FLAG} {name}: cannot be constructed without arguments: {error}") from error


_ABOVE_ONE = 1 + 2.0**-20
"""Factor that exceeds the rounding error of a few float32 operations, but is too small to change a code."""


def _saturated(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round rows to `dtype`; clamp finite elements to its range."""
    largest = torch.finfo(dtype).max
    if torch.finfo(rows.dtype).max <= largest:
        return rows.to(dtype)
    # bfloat16 cannot represent the largest float16
    rows = rows.to(torch.promote_types(rows.dtype, dtype))
    return torch.where(rows.isinf(), rows, rows.clamp(-largest, largest)).to(dtype)


def _at_most_float32(rows: torch.Tensor) -> torch.Tensor:
    return _saturated(rows, torch.float32) if rows.dtype == torch.float64 else rows


def _finite(rows: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(rows, nan=0, posinf=0, neginf=0)


def _payload(levels: torch.Tensor, code: torch.dtype, header: torch.Tensor) -> torch.Tensor:
    """Return rows of one-byte codes, each followed by its float32 header."""
    num_rows, hidden = levels.shape
    payload = levels.new_empty((num_rows, hidden + 4 * header.shape[1]), dtype=torch.uint8)
    payload[:, :hidden].view(code).copy_(levels)
    payload[:, hidden:] = _read_as(header, torch.uint8)
    return payload


def _codes_and_header(payload: torch.Tensor, hidden: int, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return payload[:, :hidden].view(code), _read_as(payload[:, hidden:], torch.float32)


def _levels(codes: torch.Tensor, infinite: int) -> torch.Tensor:
    """Return the values of codes, two of which represent infinities; bfloat16 can represent all of them."""
    levels = codes.to(torch.bfloat16)
    levels.masked_fill_(levels == infinite, torch.inf)
    return levels.masked_fill_(levels == -infinite, -torch.inf)


def _read_as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret the bytes of each row as `dtype`; copy only non-contiguous or misaligned rows."""
    flat = rows.flatten()
    if flat.storage_offset() * flat.itemsize % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(len(rows), rows.shape[1] * rows.itemsize // dtype.itemsize)
