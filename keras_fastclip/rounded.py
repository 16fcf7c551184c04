"""Normal values rounded to integers, exactly: `noise="secure"`.

A sampler that computes with floating-point numbers reaches some numbers and
not others, and which ones it reaches depends on what the noise is added to.
Sums can be told apart by it, whatever epsilon says (Mironov, 2012; Holohan &
Braghin, 2021). Here nothing is left of that: sum and noise are integers, in
units of a grid, and they are added as integers.

**What is computed.** Let x be the sum of the clipped gradients, P its number
of coordinates, C their bound, and g the spacing of a grid, a power of two
(`spacing`). Released is k = round(x/g) + round(s·Z), with Z standard normal,
and whatever is computed from k afterwards: its product with g as a
floating-point number, the mean, the weights.

**Why it is private.** round(x/g) is an integer, so k = round(round(x/g) + s·Z):
a function of the Gaussian mechanism on integers, computed in real numbers. No
function of it reveals more. Hence all that holds of the Gaussian mechanism
holds as it stands, in any number of coordinates, sampled or not, by whichever
accountant: no term is added to epsilon or delta. (With the discrete Gaussian of
Canonne, Kamath & Steinke, 2020, that is so for Rényi divergences, but not
quite for privacy loss distributions.)

**Sensitivity.** Rounding moves each coordinate by at most g/2. So if x differs
by C(1 + 10⁻⁶) between neighbours, which is what norms rounded up promise, then
round(x/g)·g differs by at most Δ = C(1 + 10⁻⁶) + g√P, and s·g is σΔ, rounded
up. That is at most 3 millionths more noise than σC, and the accounted σ is
right. (Where σ√P is beyond 2²⁰ the grid is coarser, for the sake of speed, and
the noise grows by as much.)

**Why it is exact.** By Box and Muller's method, s·Z is s·r·cos t or s·r·sin t,
with r² = -2 ln u; u and t stand for real numbers, of which 64 bits and more
are known. In float64 both are computed with a bound on the error: of the
rounding of every operation, of NumPy's functions at 4 units in the last place,
as NumPy tests them, and of the bits that are not known. Where the bound leaves
one integer, it is the right one. Where it does not, for one value in 50,000 or
so, further bits are drawn, and the same is computed in decimal arithmetic of as
many digits as it takes. So every value is rounded as if all its bits were
known, and there is no end of the tail.

**What it rests on.** That AES with a key of the operating system cannot be told
from random bits; there is a new key for each 32,768 values, which is never
stored. That the float32 sums x differ by C(1 + 10⁻⁶) as the exact sums do:
what rounding does while a sum is *computed* is not covered (Casacuberta et al.,
2022). Nor is time: values that take decimal arithmetic take longer.
"""

import decimal
import functools
import math
import secrets
from decimal import Decimal

import numpy as np

from keras_fastclip import keystream

# Of what C grows by: for norms that were rounded, and for the grid.
NORM_SLACK = 1e-6
GRID_SLACK = 2.0**-20
# Beyond this, values would often have to be computed in decimal arithmetic.
LARGEST_SCALE = 2.0**40
# Pairs at a time; fits into caches.
BLOCK = 1 << 14
# Of 64 bits for each pair.
WORDS = 3
# Largest error of a value by float64, over s·(1 + r). In units of 2⁻⁵³: for r
# 8, for sine and cosine 9, for products 2, and 3 for the bits of v that are not
# known, which move r by 2⁻⁶³/r: 22 in all, and this is 32. Where the known ones
# are less than `LEAST`, r may be too small for that.
ERROR = 2.0**-48
LEAST = 1 << 40
# Integers that have room for the noise below 2⁶³.
LARGEST = 2.0**62


def spacing(multiplier: float, sensitivity: float, coordinates: int) -> float:
    """g, a power of two, such that g√P is at most 2⁻²⁰ C.

    Args:
        multiplier: σ.
        sensitivity: C.
        coordinates: P.
    """
    fine = GRID_SLACK * sensitivity / math.sqrt(max(1, coordinates))
    least = multiplier * sensitivity / LARGEST_SCALE
    _, power = math.frexp(max(fine, least))
    return math.ldexp(0.5, power)


def scale(
    multiplier: float, sensitivity: float, coordinates: int, grid: float
) -> float:
    """s = σΔ/g, rounded up."""
    reach = sensitivity * (1 + NORM_SLACK) + grid * math.sqrt(coordinates)
    return multiplier * reach / grid * (1 + 2.0**-50)


def add(
    sums: np.ndarray,
    multiplier: float,
    sensitivity: float,
    coordinates: int,
    divisor: float = 1.0,
) -> np.ndarray:
    """(sum + noise) / divisor; sum and noise are multiples of the spacing.

    Args:
        sums: (n,), of float32 or float64.
        multiplier: σ.
        sensitivity: C, of all sums of the step together.
        coordinates: P, the number of them all.
        divisor: what sum and noise are divided by.
    """
    grid = spacing(multiplier, sensitivity, coordinates)
    size = scale(multiplier, sensitivity, coordinates, grid)
    noised = np.empty_like(sums)
    for start in range(0, len(sums), 2 * BLOCK):
        part = sums[start : start + 2 * BLOCK].astype(np.float64)
        total = on_grid(part, grid) + rounded_normal(size, len(part))
        # From here on all is computed from integers that are private.
        noised[start : start + 2 * BLOCK] = total * (grid / divisor)
    return noised


def on_grid(values: np.ndarray, grid: float) -> np.ndarray:
    """Numbers as integers, in units of the grid."""
    if not np.all(np.isfinite(values)):
        raise ValueError("A sum of clipped gradients is not finite.")
    # Division by a power of two is exact.
    units = np.clip(values / grid, -LARGEST, LARGEST)
    return np.rint(units).astype(np.int64)


def rounded_normal(scale: float, count: int) -> np.ndarray:
    """Independent integers, each the nearest to a normal value.

    Args:
        scale: s, the standard deviation of the normal values, up to 2⁴².
        count: how many.
    """
    pairs = (count + 1) // 2
    if not pairs:
        return np.empty(0, np.int64)
    words = keystream.random_bytes(8 * WORDS * pairs).view(np.uint64)
    return _from_words(scale, *words.reshape(WORDS, pairs))[:count]


def _from_words(scale, low, high, angle):
    """Two integers for each three words of 64 bits.

    u = 2⁻ʰ(1 - v), where v is below ½ and its first 63 bits are those of `low`,
    and h is the number of zeros before the first one in `high`. So ln u has
    the precision of its type everywhere. The last two bits of `high` are the
    signs; `angle` is a part of a quarter of a turn.
    """
    low, top = low >> np.uint64(1), high >> np.uint64(11)
    halvings = 53 - np.frexp(top.astype(np.float64))[1]
    logarithm = halvings * math.log(2)
    logarithm -= np.log1p(-(low.astype(np.float64) * 2.0**-64))
    radius = np.sqrt(2 * logarithm)
    turn = angle.astype(np.float64) * (math.pi / 2 * 2.0**-64)
    values = np.stack([np.cos(turn), np.sin(turn)])
    values *= scale * radius
    nearest = np.rint(values)
    known = np.abs(values - nearest) < 0.5 - scale * ERROR * (1 + radius)
    known = np.all(known, 0) & (low >= LEAST) & (top > 0)
    nearest = nearest.astype(np.int64)
    for at in np.flatnonzero(~known):
        bits = int(low[at]), int(top[at]), int(angle[at])
        nearest[:, at] = _in_decimals(scale, *bits)
    for row, bit in enumerate(np.uint64([1, 2])):
        np.negative(nearest[row], out=nearest[row], where=(high & bit) > 0)
    return nearest.reshape(-1)


def _in_decimals(scale, low, top, angle):
    """The two integers of one pair, before signs, with further random bits."""
    halvings, bits = 0, 64
    while not top:
        halvings, top = halvings + 53, secrets.randbits(53)
    halvings += 53 - top.bit_length()
    while True:
        low = low << 64 | secrets.randbits(64)
        angle = angle << 64 | secrets.randbits(64)
        bits += 64
        found = _between(scale, halvings, low, angle, bits)
        if found is not None:
            return found


def _between(scale, halvings, low, angle, bits):
    """The integers, if all numbers that begin with these bits have the same."""
    digits = bits // 3 + 40
    with decimal.localcontext(decimal.Context(prec=digits)):
        unit, size = Decimal(2) ** -bits, Decimal(scale)
        radii, cosines, sines = [], [], []
        for more in (0, 1):
            u = (1 - (low + more) * unit) / 2**halvings
            radii.append(size * (-2 * u.ln()).sqrt())
            turn = _pi(digits) / 2 * (angle + more) * unit
            cosines.append(_series(turn, first=0))
            sines.append(_series(turn, first=1))
        # The radius and the sine rise with their bits, the cosine falls.
        margin = size.scaleb(20 - digits)
        found = []
        for least, most in (cosines[::-1], sines):
            least = round(radii[0] * least - margin)
            if least != round(radii[1] * most + margin):
                return None
            found.append(least)
    return found


def _series(turn, first):
    """Σ (-x²)ᵏ x^first/(2k + first)!: cosine or sine, from 0 to π/2."""
    term = total = turn**first if first else Decimal(1)
    power, before = first, None
    while total != before:
        before = total
        term *= -turn * turn / ((power + 1) * (power + 2))
        total, power = total + term, power + 2
    return total


@functools.cache
def _pi(digits):
    """By Machin's formula, 16 arctan(1/5) - 4 arctan(1/239)."""
    one = 10 ** (digits + 10)

    def arctan_of_inverse(number):
        total, term, power = 0, one // number, 1
        while term:
            total += term // power if power % 4 == 1 else -(term // power)
            term, power = term // number**2, power + 2
        return total

    pi = 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
    return Decimal(f"{pi}e-{digits + 10}")
