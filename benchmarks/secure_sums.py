"""What a secure sum costs each party for each report: 11 million numbers, one core.

Times are processor time, the least of several turns, so that what else the machine does counts
little; caches and memory it shares all the same, so the median is printed too. The reference is a
bare prototype of the same steps on a quiet machine of the same kind: client 83 to 93 ms, leader
7 to 8, helper 22.

    OMP_NUM_THREADS=1 python benchmarks/secure_sums.py [--size 11000000] [--turns 9] [--reports 5]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from offbeat.core import Task
from offbeat.privacy.secure.encoding import (
    check_range,
    encode,
    expand_seed,
    make_report,
    seal,
    subtract_share,
    unseal,
)
from offbeat.privacy.secure.servers import Helper, Leader, SumRequest, add_weighted_share
from offbeat.privacy.secure.terms import SecureTerms

REFERENCE = {"client": 88.0, "leader": 7.5, "helper": 22.0}  # ms


class Asked:
    """A helper that keeps what it is asked and costs nothing, to time the leader and the helper apart."""

    def __init__(self, answer: np.ndarray) -> None:
        self.answer = answer

    def add(self, request: SumRequest) -> np.ndarray:
        """Nothing is added."""
        self.request = request
        return self.answer


def milliseconds(work: Callable[[], object], turns: int, parts: int = 1) -> tuple[float, float]:
    """The least and the median processor time of one part."""
    work()
    times = []
    for _ in range(turns):
        begun = time.process_time()
        work()
        times.append(1000 * (time.process_time() - begun) / parts)
    return min(times), statistics.median(times)


def main() -> None:
    """Measure and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=11_000_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--reports", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    size, turns, count = given.size, given.turns, given.reports
    values = 0.01 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    key = X25519PrivateKey.generate()
    terms = SecureTerms(
        b"benchmark", size, max_reports=count, minimum=count, weight_bits=8, weigh=lambda age: 0.5
    )
    public, seed, task = key.public_key(), bytes(16), Task(0, 0, 0)
    room, other = np.zeros(size, np.uint32), np.ones(size, np.uint32)
    draw = torch.Generator().manual_seed(0)
    sealed = seal(seed, task, terms, public)

    def spin() -> None:
        for _ in expand_seed(seed, size):
            pass

    tasks = [Task(client, 0, 0) for client in range(count)]
    reports = [make_report([values], one, terms, public) for one in tasks]

    asked = Asked(np.zeros(size, np.uint32))

    def lead() -> None:
        leader = Leader(terms, asked)
        for one in reports:
            leader.take(one)
        leader.total(tasks, 0)

    rows = {
        "  range check": milliseconds(lambda: check_range(values, terms, 0), turns),
        "  encode": milliseconds(lambda: encode(values, 16, room), turns),
        "  encode, stochastic": milliseconds(lambda: encode(values, 16, room, draw), turns),
        "  stream alone": milliseconds(spin, turns),
        "  stream and subtract": milliseconds(lambda: subtract_share(room, seed), turns),
        "  seal": milliseconds(lambda: seal(seed, task, terms, public), turns),
        "  unseal": milliseconds(lambda: unseal(sealed, task, terms, key), turns),
        "  weigh and add": milliseconds(lambda: add_weighted_share(room, other, 128), turns),
        "client": milliseconds(lambda: make_report([values], task, terms, public), turns),
        "leader": milliseconds(lead, turns, count),
        # after the leader, which leaves the request
        "helper": milliseconds(lambda: Helper(terms, key).add(asked.request), turns, count),
    }
    print(f"{size:,} numbers, processor time of one thread, the least and the median of {turns} turns, in ms")
    for name, (least, median) in rows.items():
        line = f"{name:<22}{least:9.2f}{median:9.2f}"
        if name in REFERENCE:
            line += f"   reference {REFERENCE[name]:5.1f}, ratio {least / REFERENCE[name]:.2f}"
        print(line)
    print(f"upload: {reports[0].share.nbytes:,} bytes for the leader, {len(sealed)} for the helper")
    ratios = {name: rows[name][0] / reference for name, reference in REFERENCE.items()}
    print(json.dumps({"ms": {name.strip(): row[0] for name, row in rows.items()}, "ratio": ratios}))


if __name__ == "__main__":
    main()
