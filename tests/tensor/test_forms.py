"""Forms are compared by identity, so equal ones must be one object."""

from __future__ import annotations

from paged_inductor.tensor.handle import plain


def test_one_object_per_form_however_it_is_asked_for() -> None:
    assert plain(3) is plain(3, "BHSD") is plain(site=3) is plain(3, axes="BHSD")
    assert plain(3) is not plain(3, "BSHD")
