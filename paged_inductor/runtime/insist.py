"""What must be done, also if Ctrl-C comes in between."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["insist"]


def insist(action: Callable[[], object]) -> None:
    """Call `action` until it ends without an exception; then raise the last one that it was interrupted by.

    Obligation: it can be repeated, whether it was done or not.
    """
    interruption: BaseException | None = None
    while True:
        try:
            action()
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
