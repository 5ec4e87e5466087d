"""Whole numbers, rounded up, on the host: Triton's own functions take microseconds, and a launch needs a dozen."""


def cdiv(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    """The power of two at or above value; 1 for values below."""
    return 1 << max(0, value - 1).bit_length()
