"""Whether two dimensions are one number on every run: a dimension of 1 against another one is broadcast."""

from collections.abc import Sequence

from moetrt.segments.indices import TRIALS, Sizes

Size = int | str | None


def surely_equal(one: Size, other: Size) -> bool:
    """Whether both have one name, or are formulas ("B*S", "S*B") of the same names that give the same."""
    if one is None or other is None or isinstance(one, int) or isinstance(other, int):
        return one is not None and one == other
    if one == other:
        return True
    for trial in TRIALS:
        sizes = Sizes(trial)
        number = sizes.of(one)
        if number is None or number != sizes.of(other):
            return False
    return True


def is_named(size: Size) -> bool:
    """Whether a dimension has a name; those that onnx's inference makes up for what it does not know are none."""
    return isinstance(size, str) and "unk__" not in size


def first_unequal(one: Sequence[Size], other: Sequence[Size]) -> tuple[Size, Size] | None:
    """The first two dimensions that need not be equal, of as many each."""
    return next(((a, b) for a, b in zip(one, other, strict=True) if not surely_equal(a, b)), None)
