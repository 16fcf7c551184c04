"""Checks of arguments; every message carries the name and the value."""

import math
import numbers


def positive(**values) -> None:
    for name, value in values.items():
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(
                f"`{name}` must be a positive, finite number; "
                f"received {name}={value!r}."
            )


def non_negative(**values) -> None:
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(
                f"`{name}` must be a finite number, zero or more; "
                f"received {name}={value!r}."
            )


def positive_integer(**values) -> None:
    for name, value in values.items():
        if not _is_integer(value) or value < 1:
            raise ValueError(
                f"`{name}` must be a whole number, one or more; "
                f"received {name}={value!r}."
            )


def non_negative_integer(**values) -> None:
    for name, value in values.items():
        if not _is_integer(value) or not 0 <= value < 1 << 63:
            raise ValueError(
                f"`{name}` must be a whole number, zero or more and below "
                f"2**63; received {name}={value!r}."
            )


def one_of(allowed, **values) -> None:
    for name, value in values.items():
        if value not in allowed:
            known = ", ".join(repr(item) for item in allowed)
            raise ValueError(
                f"`{name}` must be one of {known}; received {name}={value!r}."
            )


def _is_number(value) -> bool:
    try:
        return not isinstance(value, bool) and float(value) == value
    except (TypeError, ValueError):
        return False


def _is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
