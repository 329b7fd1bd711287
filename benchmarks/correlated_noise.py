"""How noisy sums of updates are under each correlation of the noise, and what it keeps in memory.

    python benchmarks/correlated_noise.py [--json FILE]

The root mean square over all prefixes of the standard deviation of the noise on the sum of a prefix, times
the sensitivity, for runs with the same epsilon: 5 contributions of a client, a fifth of the run apart. The
figures follow from the factors alone, so nothing is drawn. Memory is in vectors of the model's size, kept
between two server steps. docs/privacy.md has the table.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from offbeat.privacy.correlated import BandedNoise, BltNoise, IndependentNoise, NoiseCorrelation, TreeNoise

CONTRIBUTIONS = 5


def prefix_error(shape: NoiseCorrelation, steps: int) -> float:
    """Before it is multiplied by the sensitivity."""
    if isinstance(shape, TreeNoise):  # a node for each 1 in the binary expansion
        return float(np.sqrt(np.mean([prefix.bit_count() for prefix in range(1, steps + 1)])))
    column: npt.NDArray[np.float64] = np.ones(1)
    if isinstance(shape, BandedNoise):
        column = shape.coefficients[:steps]
    elif isinstance(shape, BltNoise):
        column = shape.column(steps)
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    inverse = lfilter([1.0], column, impulse)  # the first column of C^-1
    return float(np.sqrt(np.mean(np.cumsum(np.cumsum(inverse) ** 2))))


def figures(steps: int) -> list[dict[str, float | str]]:
    """One row for each correlation."""
    apart = steps // CONTRIBUTIONS
    shapes: list[tuple[NoiseCorrelation, int]] = [
        (IndependentNoise(), 0),
        (TreeNoise(), 0),
        (BandedNoise(8), 7),
        (BandedNoise(apart), apart - 1),
        (BltNoise(1000 if steps <= 3000 else 10000), BltNoise().buffers),
    ]
    rows: list[dict[str, float | str]] = []
    for shape, memory in shapes:
        error = prefix_error(shape, steps) * shape.sensitivity(steps, CONTRIBUTIONS, apart)
        rows.append({"steps": steps, "noise": shape.name, "rms_prefix_error": error, "vectors": memory})
    return rows


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    rows = [row for steps in (1_000, 10_000) for row in figures(steps)]
    print(f"{'steps':>6}  {'noise':<14}{'RMS prefix error':>17}{'vectors kept':>14}{'over blt':>10}")
    for row in rows:
        own = next(r for r in rows if r["steps"] == row["steps"] and str(r["noise"]).startswith("blt"))
        ratio = float(row["rms_prefix_error"]) / float(own["rms_prefix_error"])
        print(
            f"{row['steps']:>6}  {row['noise']:<14}{row['rms_prefix_error']:>17.2f}"
            f"{row['vectors']:>14}{ratio:>10.2f}"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
