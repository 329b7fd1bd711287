"""What is run: every cell of the grid as a value, and the experiment that it stands for."""

from dataclasses import dataclass, replace

from offbeat import Experiment

BETAS = (-0.5, 0.0, 0.5, 0.9)  # of FedBuff; momentum approximation has 0.9
BETA = 0.9
RULES = ("fedavgm", "fedadam")
METHODS = ("fedbuff", "ma", "ma-light")
LIMIT = 20  # staleness above it is dropped

# For (2, 1e-7) with q = 5e-4 and T = 2000 by PLD, to 1 %; tests/test_accountant.py has it, too.
NOISE, DELTA = 0.609, 1e-7


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    data: str  # the name of its plan
    private: bool
    rule: str
    method: str
    beta: float
    server_lr: float

    @property
    def group(self) -> tuple[str, bool, str]:
        """What is compared with each other."""
        return self.data, self.private, self.rule

    def __str__(self) -> str:
        privacy = "+DP" if self.private else ""
        return f"{self.data}{privacy} {self.rule} {self.method} beta {self.beta:g} server {self.server_lr:g}"


@dataclass(frozen=True)
class Plan:
    """What some groups share."""

    name: str
    data: str
    clients: int
    partition: str
    local_steps: int
    batch_size: int
    local_lr: float
    server_lrs: tuple[tuple[str, tuple[float, ...]], ...]  # by rule, for every method alike
    clip: float  # near the median norm of updates
    nominal: int  # cohort, of 2,000 times as many clients, which is that q
    eps: float = 1e-3
    buffer: int = 20
    concurrency: int = 160
    rounds: int = 400
    average: float = 0.95
    every: int = 5
    tested: int = 4000  # examples at least, evenly spaced over the test set

    def cells(self, rule: str, private: bool) -> list[Cell]:
        """A group: the baseline at each beta, and both approximations, all at the same rates."""
        rates = dict(self.server_lrs)[rule]
        tried = [("fedbuff", beta) for beta in BETAS] + [(method, BETA) for method in METHODS[1:]]
        return [Cell(self.name, private, rule, *one, rate) for one in tried for rate in rates]

    def experiment(self, cell: Cell) -> Experiment:
        """The run that a cell stands for, on the CPU and without a folder of data."""
        parameters: dict[str, float | bool] = {"local_lr": self.local_lr, "server_lr": cell.server_lr}
        if cell.rule == "fedadam":
            parameters["eps"] = self.eps
        if cell.method != "fedbuff":
            parameters |= {"beta": cell.beta, "span": LIMIT + 1}
        elif cell.rule == "fedadam":
            parameters["beta1"] = cell.beta
        else:
            parameters |= {"beta": cell.beta, "averaged": True}
        made = Experiment.of(
            algorithm=cell.rule if cell.method == "fedbuff" else f"{cell.method}-{cell.rule}",
            parameters=tuple(parameters.items()),
            data=self.data,
            clients=self.clients,
            partition=self.partition,
            dispatch="asynchronous",
            buffer=self.buffer,
            concurrency=self.concurrency,
            delays="half-normal:1",
            weights="constant",
            limit=LIMIT,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            rounds=self.rounds,
            average=self.average,
            every=self.every,
        )
        if not cell.private:
            return made
        return replace(
            made,
            clip=f"delta={self.clip:g}",
            noise=NOISE,
            delta=DELTA,
            most=self.rounds,  # no bound: the claim is the nominal cohort's, not this run's
            nominal_cohort=self.nominal,
            noise_seed=0,
        )


FASHION = Plan(
    name="fashion-mnist",
    data="fashion-mnist",
    clients=600,
    partition="dirichlet:0.5",
    local_steps=5,
    batch_size=20,
    local_lr=0.1,
    server_lrs=(("fedavgm", (1.0, 2.0)), ("fedadam", (0.001, 0.003))),
    clip=0.5,
    nominal=1000,
)
SHAKESPEARE = Plan(
    name="shakespeare",
    data="shakespeare",
    clients=1000,
    partition="natural",
    local_steps=5,
    batch_size=10,
    local_lr=0.3,
    server_lrs=(("fedavgm", (1.0, 2.0)), ("fedadam", (0.001, 0.003))),
    clip=1.0,
    nominal=700,
    rounds=300,
)
LONGER = replace(  # since next to nothing was learnt by those
    SHAKESPEARE,
    name="shakespeare-longer",
    local_steps=10,
    server_lrs=(("fedavgm", (0.5, 1.0)), ("fedadam", (0.001, 0.003))),
)
DIGITS = Plan(
    name="digits",
    data="digits",
    clients=300,
    partition="dirichlet:0.5",
    local_steps=5,
    batch_size=10,
    local_lr=0.1,
    server_lrs=(("fedavgm", (1.0, 2.0)), ("fedadam", (0.003, 0.01))),
    clip=0.4,
    nominal=150,
    rounds=200,
    tested=360,
)
PLANS = {plan.name: plan for plan in (FASHION, SHAKESPEARE, LONGER, DIGITS)}

# In the order in which they are run; whether they are noised.
FULL = ((FASHION, False), (SHAKESPEARE, False), (FASHION, True), (LONGER, False), (LONGER, True))
QUICK = ((DIGITS, False), (DIGITS, True))


def grid(parts: tuple[tuple[Plan, bool], ...]) -> list[Cell]:
    """All cells, group after group, so that a run that is cut short leaves whole groups."""
    return [cell for plan, private in parts for rule in RULES for cell in plan.cells(rule, private)]
