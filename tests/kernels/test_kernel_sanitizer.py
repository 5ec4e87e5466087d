"""The sanitizer finds what it is there for, in kernels that are wrong on purpose and right in the interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from paged_inductor import kernels
from tests.kernel_sanitizer import KernelHazard, KernelSanitizer


@triton.jit
def shift_kernel(x_ptr, y_ptr, size, shift, TILE: tl.constexpr, CHECK: tl.constexpr):
    offs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = offs < size if CHECK else offs >= 0
    tl.store(y_ptr + offs, tl.load(x_ptr + offs + shift, mask=mask), mask=mask)


@triton.jit
def sum_kernel(x_ptr, y_ptr, size, TILE: tl.constexpr):
    offs = tl.arange(0, TILE)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + offs, mask=offs < size), 0))


@triton.jit
def same_place_kernel(y_ptr):
    tl.store(y_ptr, 1.0)


@triton.jit
def product_kernel(y_ptr, left, right):
    tl.store(y_ptr, left * right)


@triton.jit
def promise_kernel(y_ptr, offset):
    tl.store(y_ptr + tl.multiple_of(offset, 4), 1.0)


@triton.jit
def unaligned_kernel(y_ptr, address_ptr):
    tl.store(tl.load(address_ptr).to(tl.pointer_type(tl.float32)), 1.0)


def shift(x: Tensor, y: Tensor, shift: int = 0, check: bool = True) -> None:
    shift_kernel[(2,)](x, y, y.numel(), shift, TILE=4, CHECK=check)


def found(sanitizer: KernelSanitizer) -> str:
    """The one hazard, which is taken off the list."""
    (hazard,) = sanitizer.hazards
    sanitizer.hazards.clear()
    return hazard


def test_a_right_kernel_passes(kernel_sanitizer: KernelSanitizer) -> None:
    before, y = kernel_sanitizer.launches, torch.zeros(6)
    shift(torch.arange(8.0), y, 2)
    assert y.tolist() == [2, 3, 4, 5, 6, 7]
    assert kernel_sanitizer.launches == before + 1


@pytest.mark.parametrize(("by", "check"), [(1, True), (-1, True), (0, False)])
def test_an_access_outside_of_its_tensor(by: int, check: bool, kernel_sanitizer: KernelSanitizer) -> None:
    whole = torch.zeros(24)
    with pytest.raises(InterpreterError, match="behind the start"):
        shift(whole[8:14], torch.zeros(6), by, check)
    assert "shift_kernel: " in found(kernel_sanitizer)


def test_what_a_masked_lane_holds(kernel_sanitizer: KernelSanitizer) -> None:
    total, count = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    sum_kernel[(1,)](torch.ones(3), total, 3, TILE=4)
    sum_kernel[(1,)](torch.ones(3, dtype=torch.int32), count, 3, TILE=4)
    assert total.isnan().all()
    assert count.item() == 2


def test_two_programs_that_store_to_one_place(kernel_sanitizer: KernelSanitizer) -> None:
    with pytest.raises(KernelHazard, match="stored to more than once"):
        same_place_kernel[(2,)](torch.zeros(1))
    assert "1 words of 4 bytes" in found(kernel_sanitizer)


def test_a_read_of_what_the_launch_stores(kernel_sanitizer: KernelSanitizer) -> None:
    x = torch.arange(9.0)
    with pytest.raises(KernelHazard, match="7 words of 4 bytes are read and stored to"):
        shift(x[:8], x[1:])
    found(kernel_sanitizer)


def test_a_32_bit_product_that_overflows(kernel_sanitizer: KernelSanitizer) -> None:
    out = torch.zeros(1, dtype=torch.int64)
    product_kernel[(1,)](out, 46341, 46340)
    assert out.item() == 46341 * 46340
    with pytest.raises(InterpreterError, match="32-bit integer overflows"):
        product_kernel[(1,)](out, 46341, 46341)
    found(kernel_sanitizer)


def test_a_promise_that_does_not_hold(kernel_sanitizer: KernelSanitizer) -> None:
    promise_kernel[(1,)](torch.zeros(9), 8)
    with pytest.raises(InterpreterError, match="said to be a multiple of 4"):
        promise_kernel[(1,)](torch.zeros(9), 6)
    found(kernel_sanitizer)


def test_addresses_that_are_data(kernel_sanitizer: KernelSanitizer) -> None:
    y = torch.zeros(2, 64)
    kernels.copy_blocks([y], torch.tensor([0]), torch.tensor([1]))
    unaligned_kernel[(1,)](y, torch.tensor([y.data_ptr()]))
    with pytest.raises(InterpreterError, match="not aligned"):
        unaligned_kernel[(1,)](y, torch.tensor([y.data_ptr() + 2]))
    found(kernel_sanitizer)
    with pytest.raises(InterpreterError, match="behind the start"):
        unaligned_kernel[(1,)](y, torch.tensor([y.data_ptr() - 4]))
    found(kernel_sanitizer)


def test_copies_whose_destination_is_a_source(kernel_sanitizer: KernelSanitizer) -> None:
    with pytest.raises(KernelHazard, match="read and stored to"):
        kernels.copy_blocks(torch.zeros(3, 1, 8, 16), torch.tensor([0, 1]), torch.tensor([1, 2]))
    found(kernel_sanitizer)
