"""Many simulations at once, and what several seeds say together. For benchmarks that compare over seeds."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def each(work: Callable[[Item], Found], units: Sequence[Item], jobs: int) -> Iterator[tuple[Item, Found]]:
    """Every unit with what `work` finds of it, in order, by `jobs` processes; how far it is goes to stderr."""
    started = time.monotonic()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(units))), mp_context=fresh) as pool:
        for number, (unit, found) in enumerate(zip(units, pool.map(work, units), strict=True), 1):
            passed = time.monotonic() - started
            left = passed / number * (len(units) - number)
            print(
                f"{number} of {len(units)}, {passed / 60:.1f} min, {left / 60:.1f} min to go", file=sys.stderr
            )
            yield unit, found


def ratio(first: float, second: float) -> float:
    """NaN where the second made nothing at all."""
    return first / second if second > 0 else math.nan


def known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def median(values: Sequence[float]) -> float:
    """Of the values that there are; NaN of none."""
    return statistics.median(known(values)) if known(values) else math.nan


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and from the lowest seed to the highest: `1.07 (1.02 to 1.12)`. Seeds without a value are counted after it."""
    there = known(values)
    if not there:
        return "-"
    text = f"{statistics.median(there):,.{digits}f}"
    if len(there) > 1:
        text += f" ({min(there):,.{digits}f} to {max(there):,.{digits}f})"
    return text + (f", {len(there)} of {len(values)} seeds" if len(there) < len(values) else "")
