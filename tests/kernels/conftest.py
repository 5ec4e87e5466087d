"""Kernel tests run on CPU tensors: the interpreter must be chosen before triton is first imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
