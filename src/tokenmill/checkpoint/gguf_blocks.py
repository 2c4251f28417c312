"""How GGUF blocks decode. Owns: each block type's bit layout, as integers with a scale and an offset per group.

    value = scale * q + offset            q: small integers; one scale (and offset) per `group` numbers of a row

Types that are such a grid keep it (`Grid`), so that a matmul can work on the integers; `decode` gives float32, bit by
bit what the format's own library gives. Types with codebooks (IQ1, IQ2, IQ3, TQ) are decoded by that library.
Must not know: files, names, layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_file import BlockType, TensorInfo
from tokenmill.core.errors import ModelError

NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FOUR_BIT_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Grid:
    """A decoded tensor: q [rows, columns] int8; scale and offset [rows, columns / group] float32 (offset None: all
    zero)."""

    q: Tensor
    scale: Tensor
    offset: Tensor | None
    group: int

    def dense(self) -> Tensor:
        """[rows, columns] float32."""
        rows, columns = self.q.shape
        values = self.q.view(rows, -1, self.group).float() * self.scale[..., None]
        if self.offset is not None:
            values += self.offset[..., None]
        return values.view(rows, columns)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a quantised tensor as they lie in the file: raw [rows, bytes of a row] uint8, not decoded.

    forget: frees the memory of the bytes read so far. Whoever needs them again reads them from the file."""

    type: BlockType
    raw: Tensor
    forget: Callable[[], None] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.raw.shape[0], self.raw.shape[1] // self.type.size * self.type.elements

    def take(self, index: Tensor) -> Blocks:
        """These rows, in this order."""
        return Blocks(self.type, self.raw[index], self.forget)

    def columns(self, start: int, stop: int) -> Blocks:
        """Columns start:stop, which must be whole blocks."""
        size, elements = self.type.size, self.type.elements
        if start % elements or stop % elements:
            raise ModelError(f"Columns {start}:{stop} are not whole {self.type.name} blocks of {elements}.")
        return Blocks(self.type, self.raw[:, start // elements * size : stop // elements * size], self.forget)

    def grid(self) -> Grid | None:
        """Integers, scales and offsets. None: numbers of this type are not an integer times a scale."""
        reader = _READERS.get(self.type.name)
        if reader is None:
            return None
        q, scale, offset = reader(self.raw.reshape(-1, self.type.size))
        rows, columns = self.shape
        group = q.numel() // scale.numel()
        shape = (rows, columns // group)
        offset = None if offset is None else offset.reshape(shape)
        return Grid(q.reshape(rows, columns), scale.reshape(shape), offset, group)

    def dense(self) -> Tensor:
        """[rows, columns] float32."""
        if (grid := self.grid()) is not None:
            return grid.dense()
        from gguf import GGMLQuantizationType, quants

        raw = self.raw.reshape(-1, self.type.size).cpu().numpy()
        values = quants.dequantize(raw, GGMLQuantizationType[self.type.name])
        return torch.from_numpy(values).float().view(self.shape).to(self.raw.device)


def plain(info: TensorInfo, data: memoryview) -> Tensor | None:
    """The values of an unquantised tensor, not copied. None: the tensor is quantised."""
    if info.type.name not in PLAIN:
        return None
    dtype, raw = PLAIN[info.type.name], torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # A file may choose an odd alignment, but kernels need an even one.
    return raw.view(dtype).view(info.shape)


def blocks(info: TensorInfo, data: memoryview, forget: Callable[[], None] | None = None) -> Blocks:
    """A quantised tensor's rows, not copied. All leading dimensions are joined into one."""
    row = info.shape[-1] // info.type.elements * info.type.size
    return Blocks(info.type, torch.frombuffer(data, dtype=torch.uint8).view(-1, row), forget)


def decode(info: TensorInfo, data: memoryview) -> Tensor:
    """A tensor's values: in their own type if that is float32, float16 or bfloat16, else in float32."""
    values = plain(info, data)
    return blocks(info, data).dense().view(info.shape) if values is None else values


Parts = tuple[Tensor, Tensor, Tensor | None]


def _half(raw: Tensor) -> Tensor:
    """The two bytes per block at this place as float16 -> [blocks, 1] float32."""
    return raw.contiguous().view(torch.float16).float()


def _spread(raw: Tensor, width: int, bits: int) -> Tensor:
    """Unpack fields of `bits` bits: [blocks, n * width] bytes -> [blocks, n * 8 / bits, width], lowest field first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    spread = raw.reshape(raw.shape[0], -1, 1, width) >> shifts
    return spread.bitwise_and_((1 << bits) - 1).reshape(raw.shape[0], -1, width)


def _signed(q: Tensor, less: int = 0) -> Tensor:
    """Small unsigned integers minus `less`, as int8 [blocks, n]. The bytes are changed in place; they wrap to the right
    sign."""
    return (q.sub_(less) if less else q).view(torch.int8).reshape(q.shape[0], -1)


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8, device=codes.device)[codes.int()].reshape(codes.shape[0], -1)


def _q1_0(raw: Tensor) -> Parts:
    """One bit per number: 1 means the scale, 0 means minus the scale. Groups are made 32 long, as in other integer
    types."""
    bits = _spread(raw[:, 2:], 1, 1).view(torch.int8).reshape(raw.shape[0], 128)
    return bits * 2 - 1, _half(raw[:, :2]).expand(-1, 4), None


def _q4_0(raw: Tensor) -> Parts:
    return _signed(_spread(raw[:, 2:], 16, 4), 8), _half(raw[:, :2]), None


def _q4_1(raw: Tensor) -> Parts:
    return _signed(_spread(raw[:, 4:], 16, 4)), _half(raw[:, :2]), _half(raw[:, 2:4])


def _fifth_bits(raw: Tensor) -> Tensor:
    """Four bytes of high bits -> [blocks, 32]: number i gets bit i, worth 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[:, :, None] >> shifts) & 1).reshape(raw.shape[0], 32) << 4


def _q5_0(raw: Tensor) -> Parts:
    low = _spread(raw[:, 6:], 16, 4).reshape(raw.shape[0], 32)
    return _signed(low | _fifth_bits(raw[:, 2:6]), 16), _half(raw[:, :2]), None


def _q5_1(raw: Tensor) -> Parts:
    low = _spread(raw[:, 8:], 16, 4).reshape(raw.shape[0], 32)
    return _signed(low | _fifth_bits(raw[:, 4:8])), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Parts:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw[:, :2]), None


def _iq4_nl(raw: Tensor) -> Parts:
    return _looked_up(_spread(raw[:, 2:], 16, 4), NON_LINEAR), _half(raw[:, :2]), None


def _mxfp4(raw: Tensor) -> Parts:
    """Scales are powers of two, halved because the table is doubled. Exponents 0 and 1 give denormals."""
    power = raw[:, :1].to(torch.int32)
    bits = torch.where(power < 2, 0x00200000 << power.clamp(max=1), (power - 1).clamp(min=0) << 23)
    return _looked_up(_spread(raw[:, 1:], 16, 4), FOUR_BIT_FLOATS), bits.view(torch.float32), None


def _nvfp4(raw: Tensor) -> Parts:
    """Four groups of 16. Scales are float8 without a sign, halved because the table is doubled; the library takes what
    would be NaN for 0."""
    bytes_ = raw[:, :4].to(torch.int32)
    power, part = (bytes_ >> 3) & 15, (bytes_ & 7).float()
    scale = torch.where(power == 0, part * 2.0**-10, torch.ldexp(part / 8 + 1, power - 8))
    codes = _spread(raw[:, 4:], 8, 4)
    return _looked_up(codes, FOUR_BIT_FLOATS), torch.where(bytes_ == 127, 0.0, scale), None


def _q2_k(raw: Tensor) -> Parts:
    scales, qs = raw[:, :16], raw[:, 16:80]
    d, dmin = _half(raw[:, 80:82]), _half(raw[:, 82:84])
    offset = -(dmin * (scales >> 4).float())
    return _signed(_spread(qs, 32, 2)), d * (scales & 15).float(), offset


def _q3_k(raw: Tensor) -> Parts:
    blocks = raw.shape[0]
    high, low, packed, d = raw[:, :32], raw[:, 32:96], raw[:, 96:108], _half(raw[:, 108:110])
    scales = _spread(packed[:, :8], 8, 4).reshape(blocks, 16) | (_spread(packed[:, 8:], 4, 2).reshape(blocks, 16) << 4)
    less = (_spread(high, 32, 1).reshape(blocks, 256) ^ 1) << 2
    q = _spread(low, 32, 2).reshape(blocks, 256).to(torch.int16) - less.to(torch.int16)
    return q.to(torch.int8), d * (scales.to(torch.int16) - 32).float(), None


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes -> eight scales and eight minima of six bits each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales.float(), minima.float()


def _q4_k(raw: Tensor) -> Parts:
    d, dmin = _half(raw[:, :2]), _half(raw[:, 2:4])
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    return _signed(_spread(raw[:, 16:], 32, 4)), d * scales, -(dmin * minima)


def _q5_k(raw: Tensor) -> Parts:
    blocks = raw.shape[0]
    d, dmin = _half(raw[:, :2]), _half(raw[:, 2:4])
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    high = _spread(raw[:, 16:48], 32, 1).reshape(blocks, 256)
    low = _spread(raw[:, 48:], 32, 4).reshape(blocks, 256)
    return _signed(low | (high << 4)), d * scales, -(dmin * minima)


def _q6_k(raw: Tensor) -> Parts:
    blocks = raw.shape[0]
    low = _spread(raw[:, :128], 64, 4).reshape(blocks, 256)
    high = _spread(raw[:, 128:192], 32, 2).reshape(blocks, 256)
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()
    return _signed(low | (high << 4), 32), _half(raw[:, 208:210]) * scales, None


def _iq4_xs(raw: Tensor) -> Parts:
    d = _half(raw[:, :2])
    high = raw[:, 2:4].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    high = (high >> torch.arange(0, 16, 2, dtype=torch.int32, device=raw.device)) & 3
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], -1).reshape(raw.shape[0], 8)
    scales = ((low.to(torch.int32) | (high << 4)) - 32).float()
    return _looked_up(_spread(raw[:, 8:], 16, 4), NON_LINEAR), d * scales, None


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q1_0": _q1_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
