"""How many clients are fast, middling and slow in the FADAS paper: argmax of Dirichlet(3g, 2g, g)."""

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaincinv, gammaln

CONCENTRATIONS = (3.0, 2.0, 1.0)

Array = npt.NDArray[np.float64]


def tier_chances(gamma: float) -> tuple[float, float, float]:
    """The chance of each tier.

    A Dirichlet vector is a normalised vector of independent Gamma variables, so tier i is the
    largest with probability E[product of the other two distribution functions at G_i]; the
    expectation is an integral over G_i's own quantiles.
    """
    shapes = [gamma * concentration for concentration in CONCENTRATIONS]
    nodes, weights = np.polynomial.legendre.leggauss(64)
    inner = (nodes + 1) / 2
    quantiles = inner**2 * (3 - 2 * inner)  # crowds the nodes where the integrand is not smooth, at the ends
    weights = weights * 3 * inner * (1 - inner)
    chances = []
    for own, shape in enumerate(shapes):
        logs = _log_quantile(shape, quantiles)
        others = [_distribution(other, logs) for j, other in enumerate(shapes) if j != own]
        chances.append(float(weights @ (others[0] * others[1])))
    total = sum(chances)
    small, medium, large = (chance / total for chance in chances)
    return small, medium, large


# Gamma variables of tiny shape underflow, so both work on logarithms and use x^a / Gamma(a + 1) near zero.
_TINY = -600.0


def _log_quantile(shape: float, quantiles: Array) -> Array:
    near_zero = (np.log(quantiles) + gammaln(shape + 1)) / shape
    exact: Array = np.log(np.maximum(gammaincinv(shape, quantiles), np.exp(_TINY)))
    return np.where(near_zero < _TINY, near_zero, exact)


def _distribution(shape: float, logs: Array) -> Array:
    near_zero = np.exp(np.minimum(shape * logs - gammaln(shape + 1), 0.0))
    exact: Array = gammainc(shape, np.exp(np.maximum(logs, _TINY)))
    return np.where(logs < _TINY, near_zero, exact)
