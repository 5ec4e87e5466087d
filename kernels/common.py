"""Device helpers shared by the kernels: loads through the block table, products, exponentials."""

import math

import triton
import triton.language as tl

from .launch import INTERPRETED

# The interpreter keeps bfloat16 as raw bits and would multiply those; a float32 product is the same, exactly.
DOT_IN_FLOAT32 = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_checked(ptrs, key_mask, dim_mask, CHECK_KEYS: tl.constexpr, CHECK_DIMS: tl.constexpr):
    """Load a tile, zeros where a mask that is checked is false."""
    if CHECK_KEYS and CHECK_DIMS:
        tile = tl.load(ptrs, mask=key_mask & dim_mask, other=0.0)
    elif CHECK_KEYS:
        tile = tl.load(ptrs, mask=key_mask, other=0.0)
    elif CHECK_DIMS:
        tile = tl.load(ptrs, mask=dim_mask, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_block_ids(
    block_table_ptr,
    table_block_stride,
    tokens,
    token_mask,
    BLOCK_SIZE: tl.constexpr,
    CHECK_KEYS: tl.constexpr,
):
    """Physical block of each row position, int64 from birth."""
    ptrs = block_table_ptr + (tokens // BLOCK_SIZE) * table_block_stride
    return load_checked(ptrs, token_mask, None, CHECK_KEYS, False).to(tl.int64)


@triton.jit
def operand(x, DTYPE: tl.constexpr):
    """A stored tile as an operand of `dot` of a wider or the same dtype; exact for every dtype that is stored."""
    return x.to(tl.float32) if DOT_IN_FLOAT32 else x.to(DTYPE)


@triton.jit
def unpaired(words, ODD: tl.constexpr, DTYPE: tl.constexpr):
    """The even or the odd ones of 8-bit values that were read as 16-bit words of two."""
    if ODD:
        values = words >> 8
    else:
        values = (words << 8) >> 8
    return values.to(tl.int8).to(DTYPE, bitcast=True)


@triton.jit
def quantized(x, DTYPE: tl.constexpr, QUANTIZED_MAX: tl.constexpr, LEAST_AMAX: tl.constexpr):
    """Values of DTYPE [T, D] and their scales [T]: each row's largest magnitude becomes QUANTIZED_MAX."""
    x = x.to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(x), 1), LEAST_AMAX) / QUANTIZED_MAX  # [T]
    x = x * (1.0 / scales)[:, None]
    is_int8: tl.constexpr = DTYPE.is_int8()
    if is_int8:
        x = tl.floor(x + 0.5)
    x = tl.clamp(x, -QUANTIZED_MAX, QUANTIZED_MAX)
    if DOT_IN_FLOAT32 and not is_int8:
        x = e4m3_code(x).to(DTYPE, bitcast=True)
    else:
        x = x.to(DTYPE)
    return x, scales


@triton.jit
def e4m3_code(x):
    """The bits of the nearest float8_e4m3fn: the interpreter's own cast loses carries, subnormals and signs."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
    magic = 24576.0  # 1.5 * 2**14, next to which floats are 2**-9 apart
    subnormal = (((magnitude + magic) - magic) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code + 128, code).to(tl.uint8)


@triton.jit
def dot(a, b):
    """Matrix product with float32 accumulation, exact products for every input dtype."""
    if DOT_IN_FLOAT32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def exponential(x, HAS_BIAS: tl.constexpr):
    """Base 2, or base e with a bias: log2(e) times a bias of finfo.min would overflow to -inf."""
    return tl.exp(x) if HAS_BIAS else tl.exp2(x)


@triton.jit
def to_exponent_base(x, HAS_BIAS: tl.constexpr):
    """A score in the base that `exponential` raises."""
    return x if HAS_BIAS else x * LOG2E


@triton.jit
def tanh(x):
    """Hyperbolic tangent: a series near zero, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.01, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def finite_max(row_max):
    """A maximum that can be subtracted: zero where nothing was visible."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)
