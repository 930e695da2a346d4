"""How a refused value is said, and the checks that many keys share."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Sequence
from typing import Any

from k3train.config.explain import as_override
from k3train.errors import UserError

LARGEST = 2**31 - 1


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key of a recipe."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def refuse(config: Any, key: str, why: str, allowed: str, cure: str) -> UserError:
    """The sentence `key=value why; allowed: ...; try ...`."""
    return UserError(f"{key}={as_override(value_at(config, key))} {why}; allowed: {allowed}; try {cure}")


def check_choice(config: Any, key: str, options: Sequence[str]) -> None:
    """Refuse a text that is none of the options."""
    from k3train.config.keys import closest

    value = value_at(config, key)
    if value not in options:
        near = closest(value, options) or options[0]
        raise refuse(config, key, "does not exist", ", ".join(options), f"{key}={near}")


def check_range(
    config: Any,
    key: str,
    cure: float | str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside an interval: `above` and `below` are open ends, `least` and `most` closed.

    Infinity is refused, and whole numbers that C code does not hold in 32 bits.
    """
    value = value_at(config, key)
    if most is None and below is None and value > LARGEST and (isinstance(value, int) or math.isinf(value)):
        most = LARGEST
    tests = [
        (least, "at least", lambda bound: value >= bound),
        (above, "more than", lambda bound: value > bound),
        (most, "at most", lambda bound: value <= bound),
        (below, "less than", lambda bound: value < bound),
    ]
    given = [(bound, word, test) for bound, word, test in tests if bound is not None]
    if not all(test(bound) for bound, _, test in given):  # a NaN fails every test
        allowed = " and ".join(f"{word} {bound:.10g}" for bound, word, _ in given)
        raise refuse(config, key, "is out of range", allowed, f"{key}={cure}")


def check_url(key: str, url: str) -> urllib.parse.SplitResult:
    """The parts of a server's address, with or without `http://`."""
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket that nothing closes
        is_address = False
    if not is_address:
        raise UserError(
            f"{key}={url} is no address of a server; allowed: http://HOST:PORT, https://HOST:PORT; try"
            f" {key}=http://127.0.0.1:8000"
        )
    return parts


def divisors(number: int, most: int = 12) -> list[int]:
    """The divisors of a positive number, in order; only the first `most` for a message."""
    return [d for d in range(1, number + 1) if number % d == 0][:most]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as `1, 2, 4`."""
    return ", ".join(str(number) for number in numbers)


def nearest_divisor(number: int, wanted: int) -> int:
    """The largest divisor of `number` that is not above `wanted` (at least 1)."""
    return max(d for d in range(1, min(number, max(wanted, 1)) + 1) if number % d == 0)


def nearest_multiple(unit: int, wanted: int) -> int:
    """The multiple of `unit` nearest to `wanted`, at least one unit."""
    return max(unit, unit * round(wanted / unit))


def check_divides(config: Any, divisor_key: str, *divided_keys: str) -> None:
    """Refuse a parallel size that does not divide every one of the given dimensions."""
    from math import gcd

    size = value_at(config, divisor_key)
    for key in divided_keys:
        dimension = value_at(config, key)
        if dimension % size:
            common = gcd(*(value_at(config, other) for other in divided_keys))
            raise refuse(
                config,
                divisor_key,
                f"does not divide {key}={dimension}",
                listed(divisors(common)),
                f"{divisor_key}={nearest_divisor(common, size)}",
            )
