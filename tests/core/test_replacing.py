"""Attributes that are replaced for a while."""

import pytest

from crossframe.replacing import replacing


def test_what_was_inherited_is_inherited_again():
    class Base:
        value = 1

    class Derived(Base):
        pass

    with pytest.raises(KeyError), replacing(Derived, "value", 2):
        assert Derived.value == 2 and Base.value == 1
        raise KeyError
    assert Derived.value == 1 and "value" not in vars(Derived)
