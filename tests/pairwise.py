"""Grids of test cases too large to run whole."""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise_cases(factors: Sequence[Sequence[Any]], count: int) -> list[tuple[Any, ...]]:
    """At least `count` cases, a value of each factor, in which every two values of two factors meet.

    The same ones in every run: each is, of 20 random cases that hold one missing pair, the one with most of them.
    """
    rng = random.Random(0)
    pairs = combinations(range(len(factors)), 2)
    missing = dict.fromkeys(((i, x), (j, y)) for i, j in pairs for x in factors[i] for y in factors[j])
    cases = []
    while missing or len(cases) < count:
        tries = [[rng.choice(f) for f in factors] for _ in range(20 if missing else 1)]
        for wanted in list(missing)[:1]:
            for values in tries:
                for i, x in wanted:
                    values[i] = x
        best = max(tries, key=lambda values: sum(pair in missing for pair in combinations(enumerate(values), 2)))
        for pair in combinations(enumerate(best), 2):
            missing.pop(pair, None)
        cases.append(tuple(best))
    return cases
