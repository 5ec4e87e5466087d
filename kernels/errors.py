"""Errors raised by the kernels' host wrappers before anything is launched."""


class KernelInputError(ValueError):
    """An argument has a value, shape, stride or device that no kernel accepts."""


class KernelTypeError(TypeError):
    """An argument has a Python type or tensor dtype that no kernel accepts."""
