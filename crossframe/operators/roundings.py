"""The constants of the rounding bound of an operator.

[Note: the bound of an operator] Arithmetic is correct to one rounding, elementary functions to a few units in the last place,
and kernels are stable: their result is the rounded exact result of inputs that are off by a few roundings (mixed stability, N.
Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 1.5). The function is therefore evaluated in float64 on
inputs x (1 + k u s), where s = +1 or -1 at random for each element, u is the unit roundoff, and k is

    4         for elementwise arithmetic, whose inputs take part in at most a few roundings
    64        for other functions: vectorised exponentials are off by up to 20 units in the last place, which is 40 u
    4 + n     for sums of n products, each of which takes part in at most n additions

To first order such an evaluation is off by k u J (x s), whose mean square over s is the sum of (k u J_ij x_j)^2. Two draws
estimate it. The bound of the norm of the error is four times their root mean square, plus 4 roundings of the result. A correct
arithmetic kernel, which is off by one rounding, exceeds it only if the estimate is a sixteenth of its mean: with a probability of
0.4 % if the estimate depends on a single number, and with a negligible one if it depends on many.

Kernels that also add n numbers, such as norms and softmax, are off by a further sqrt(n) roundings of their result: the
probabilistic bound of N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, 2019, with lambda = 4,
which is the factor of four. Some of them add in the dtype of their result; other kernels of bfloat16 and float16 compute in
float32. A function of several operators, such as a compiled graph, is perturbed at each operator, and between operators by the
unit roundoff of the dtype.

Accelerators round or truncate the factors of float32 products to a coarser format of unit roundoff v, and add in float32. A
factor is off by v then, or by up to 2 v if it is truncated, and truncations of products of one sign add up to 4 v of the result:
factors are perturbed by a further v, and four times v of the result joins the bound.
"""

import math

import ml_dtypes

from crossframe.dtypes import numpy_dtype, unit_roundoff

ARITHMETIC, OTHERS = 4, 64
"""Roundings of inputs."""
RESULT = 4
"""Roundings of the result."""
DRAWS, SIGNIFICANT = 2, 4.0


def bound_of(reach: float, size: float, dtype: str, numel: int) -> float:
    """The bound of the error of a result relative to its norm.

    Args:
        reach: how far roundings of inputs may drive it, as a norm.
        size, numel: the norm and number of elements of the exact result.
        dtype: of the computed result.

    >>> bound_of(2.0**-20, 2.0, "float32", 4) == 2.0**-21 + 4 * 2.0**-24
    True
    """
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    smallest = float(info.smallest_normal) * float(info.eps)
    return (reach + RESULT * unit_roundoff(dtype) * size + math.sqrt(numel) * smallest) / size


def roundings_of_sum(terms: int, roundoff: float, of_factors: float = 0.0) -> tuple[float, float]:
    """How far off the inputs of a sum of products are, and its result besides, each relative to itself.

    Args:
        terms: of an element of the result.
        roundoff: the unit roundoff in which terms are added.
        of_factors: the unit roundoff of the format to which factors are rounded or truncated; 0 if they are not.

    >>> roundings_of_sum(4, 0.125), roundings_of_sum(4, 0.125, 0.5)
    ((1.0, 0.0), (1.5, 0.5))
    """
    return (ARITHMETIC + terms) * roundoff + of_factors, of_factors
