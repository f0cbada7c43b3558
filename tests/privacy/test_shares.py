import contextlib
import itertools
import os
from collections import Counter

import pytest

from fedgmm.privacy.shares import PRIME, combine, split, weights_at_zero


def test_every_threshold_of_holders_finds_the_key():
    for n in range(1, 7):
        for t in range(1, n + 1):
            key = os.urandom(32)
            shares = split(key, range(1, n + 1), t)
            for some in itertools.combinations(shares, t):
                assert combine({x: shares[x] for x in some}) == key


def test_fewer_shares_fit_every_key():
    """With t - 1 shares each key is possible: some last share completes them to it."""
    shares = split(os.urandom(32), [1, 2, 3], 3)
    known = {x: shares[x] for x in (1, 2)}
    other = os.urandom(32)
    weights = weights_at_zero((1, 2, 3))
    rest = int.from_bytes(other, "big") - sum(
        w * y for w, y in zip(weights, known.values(), strict=False)
    )
    last = rest * pow(weights[2], -1, PRIME) % PRIME
    assert combine({**known, 3: last}) == other


def test_the_field_has_a_prime_number_of_elements():
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        odd, twos = PRIME - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        powers = [pow(base, odd << i, PRIME) for i in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


def test_one_share_looks_random():
    bits = Counter(split(bytes(32), [1, 2], 2)[1] >> 250 for _ in range(2000))
    assert len(bits) > 40


@pytest.mark.parametrize(("points", "threshold"), [([1, 1], 2), ([1, 2], 3), ([0, 1], 2), ([1], 0)])
def test_impossible_shares_are_refused(points, threshold):
    with pytest.raises(ValueError, match=r"shares|points"):
        split(bytes(32), points, threshold)


def test_a_damaged_share_gives_another_key():
    key = os.urandom(32)
    shares = split(key, [1, 2, 3], 2)
    with contextlib.suppress(ValueError):
        assert combine({1: shares[1], 2: shares[2] ^ 1}) != key
