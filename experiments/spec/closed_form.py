"""What a rule's own formula says; no framework is needed."""

from crossframe.dtypes import FLOATING
from crossframe.reduction import divide_factors, mean_factors
from experiments.spec.checks import Scope
from experiments.spec.tally import Tallies

FORMULA = "the formula"


def divide_products(tallies: Tallies, scope: Scope) -> None:
    """R26: the factors' product is the number of ranks, exactly; the one before is a power of two no larger than needed."""
    for num_ranks in scope.take(range(1, 4097), num_quick=500):
        for dtype in FLOATING:
            factors = mean_factors(num_ranks, dtype)
            product = factors.before * factors.between * factors.after
            tallies["R26"].compare(product, float(num_ranks), (num_ranks, dtype), FORMULA)
        before = int(divide_factors(num_ranks).before)
        enough = num_ranks % before != 0 or before * before >= num_ranks
        half = before // 2
        needed = half == 0 or (num_ranks % half == 0 and half * half < num_ranks)
        tallies["R26"].compare((enough, needed, before & (before - 1)), (True, True, 0), num_ranks, FORMULA)
