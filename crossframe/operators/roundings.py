"""How far rounding may drive the result of one operator: the constants of its bound.

[Note: the bound of an operator] Arithmetic is right to one rounding, elementary functions to some units in the last place, and
kernels are stable: what they compute is the exact result of inputs that are off by a few roundings, rounded (mixed stability,
N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 1.5). So the function is evaluated in float64 on
inputs x (1 + k u s), with s = +1 or -1 at random for each element, u the unit roundoff, and k

    4         for arithmetic of elements, whose inputs take part in at most a few roundings
    64        for other functions: vectorised exponentials are off by up to 20 units in the last place, which is 40 u
    4 + n     for sums of n products: each takes part in at most n additions

To first order such an evaluation is off by k u J (x s), whose mean square over s is the sum of (k u J_ij x_j)^2. Two draws
estimate it; four times their root mean square is the bound on the norm of the error, together with 4 roundings of the result. For
a right kernel of arithmetic to be outside, which is off by one rounding, the estimate would have to be a sixteenth of its
mean, with a chance of 0.4 % where it depends on one number alone, and of next to nothing where it depends on many.

Kernels that add up n numbers besides other things, such as norms and softmax, are off by sqrt(n) roundings of their result, too:
the probabilistic bound of N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, 2019, with lambda = 4,
which the factor four is. Some of them add up in the dtype of their result; otherwise kernels of bfloat16 and float16 compute in
float32. A function of several operators, such as a compiled graph, is perturbed at each of them, and between them by the roundoff
of the dtype.
"""

ARITHMETIC, OTHERS = 4, 64
"""Roundings of inputs."""
RESULT = 4
"""Roundings of the result."""
DRAWS, SIGNIFICANT = 2, 4.0
TF32 = 2.0**-11
"""The unit roundoff of inputs of products of matrices where an accelerator cuts them to ten bits."""
