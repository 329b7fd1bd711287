"""The mutants of `mutate.py`: some that are drawn, some that are chosen, and why some survive."""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "src" / "offbeat"

_SERVER = tuple(f"deploy/server/{name}.py" for name in ("exchange", "journal", "registry", "validation"))

# What is mutated: by seed and package, how many mutants are drawn, and the files that have them.
DRAWS: dict[int, dict[str, tuple[int, tuple[str, ...]]]] = {
    22: {
        "core": (10, ("core.py", "trees.py", "draws.py")),
        "algorithms": (50, ("algorithms/*.py",)),
        "aggregate": (25, ("aggregate/*.py",)),
        "schedule": (35, ("schedule/*.py",)),
        "privacy": (30, ("privacy/*.py", "privacy/secure/*.py")),
        "data": (12, ("data/partition.py", "data/client_store.py", "data/population.py")),
        "training": (20, ("training/checkpoint.py", "training/loop.py", "training/replay.py")),
    },
    23: {
        "privacy": (15, ("privacy/secure/*.py",)),
        "training": (20, ("training/checkpoint.py", "training/folder.py", "training/replay.py")),
        "deploy": (45, (*_SERVER, "deploy/protocol/*.py")),
    },
}
PACKAGES = ("core", "algorithms", "aggregate", "schedule", "privacy", "nn", "data", "engines", "training")
PACKAGES += ("tuning", "deploy")  # the order of the report


class Mutant(NamedTuple):
    """One change of one line."""

    target: str
    path: str  # below the package
    row: int
    before: str  # of the line
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}: {self.before.strip()} -> {self.after.strip()}"

    def text(self) -> str:
        """The mutated file."""
        lines = (PACKAGE / self.path).read_text().splitlines(keepends=True)
        return "".join([*lines[: self.row - 1], f"{self.after}\n", *lines[self.row :]])


# Mistakes that passed the tests of a review: target, path, text before, text after.
MISSED: tuple[tuple[str, str, str, str], ...] = (
    (
        "data",
        "data/partition.py",
        "zip(shares, counts, strict=True)]",
        "zip(shares[:1].repeat(len(counts), 0), counts)]",
    ),
    (
        "training",
        "training/loop.py",
        "[a + b for a, b in zip(self._start_sum, part, strict=True)] if",
        "part if",
    ),
    ("algorithms", "algorithms/scaffold.py", "total / batches.steps", "total / len(batches.items)"),
    ("privacy", "privacy/ledger.py", "before = (Releases(self.noise, 1),) if start else ()", "before = ()"),
    ("privacy", "privacy/ledger.py", "count + self._start >= self._max", "count + self._start > self._max"),
    ("schedule", "schedule/rng.py", "self.choices += count", "pass"),
    ("engines", "engines/simulation.py", "self._ranks.forget(tasks)", "return self._ranks.forget(tasks)"),
    (
        "algorithms",
        "algorithms/fadas.py",
        "worst <= self.threshold else min(lr, lr / worst)",
        "worst < self.threshold else min(lr, lr / worst)",
    ),
    (
        "algorithms",
        "algorithms/fadas.py",
        "worst <= self.threshold else min(lr, 1 / worst)",
        "worst < self.threshold else min(lr, 1 / worst)",
    ),
)

# Mistakes in what was added since: personal layers, local optimisers and schedules of rates, stopping,
# deadlines, compression, robust aggregation, timed releases and allocation, standardise, tune and advise.
CHOSEN: tuple[tuple[str, str, str, str], ...] = (
    *MISSED,
    ("nn", "nn/problem.py", "if batch is self._batch and not self._moved:", "if batch is self._batch:"),
    (
        "nn",
        "nn/problem.py",
        "grad = self._decayed(grads[name], weight)",
        "grad = grads[name]",
    ),
    ("nn", "nn/problem.py", "{name: self._statistics[name] for name in self._personal}", "self._moved"),
    (
        "core",
        "core.py",
        "gradient * (self.max_norm / gradient.norm()).clamp_max(1.0)",
        "gradient * (self.max_norm / gradient.norm())",
    ),
    (
        "algorithms",
        "algorithms/rates.py",
        "descend(x, gradient + self.beta * m, lr), m",
        "descend(x, gradient + self.beta * state, lr), m",
    ),
    ("algorithms", "algorithms/rates.py", "x - lr * self.decay * x", "x - self.decay * x"),
    (
        "algorithms",
        "algorithms/rates.py",
        "_factor(self.server_schedule, cohort.version)",
        "_factor(self.server_schedule, cohort.version + 1)",
    ),
    (
        "algorithms",
        "algorithms/rates.py",
        "over_rounds(self.schedule, rounds - int(self.warmup.steps))",
        "over_rounds(self.schedule, rounds)",
    ),
    (
        "training",
        "training/stopping.py",
        "sign * value > sign * best.value",
        "sign * value >= sign * best.value",
    ),
    ("training", "training/stopping.py", "time >= self.max_time", "time > self.max_time"),
    ("training", "training/stopping.py", "best.since >= self.patience", "best.since > self.patience"),
    ("schedule", "schedule/deadline.py", "if rank <= len(self._done):", "if rank < len(self._done):"),
    ("schedule", "schedule/deadline.py", "return 2 * max(", "return max("),
    (
        "schedule",
        "schedule/deadline.py",
        "del self._done[bisect_left(self._done, oldest)]",
        "del self._done[0]",
    ),
    ("aggregate", "aggregate/compression.py", "(places.diff() <= 0)", "(places.diff() < 0)"),
    (
        "aggregate",
        "aggregate/compression.py",
        "left.append(whole - decode(code",
        "left.append(leaf - decode(code",
    ),
    ("aggregate", "aggregate/compression.py", "key + place * _LEAF_KEY", "key"),
    ("aggregate", "aggregate/compression.py", "return 1 + math.sqrt(_BLOCK) / _LEVELS", "return 1.0"),
    ("aggregate", "aggregate/robust.py", "torch.where(norms > bound, bound / norms, 1.0)", "bound / norms"),
    ("aggregate", "aggregate/robust.py", "else _weighted(uploads, cohort.weights)", "else uploads"),
    ("aggregate", "aggregate/robust.py", "distance.clamp_min(self.smoothing)", "(distance + self.smoothing)"),
    ("schedule", "schedule/timed.py", "own >= release and arrival.time <= self._due(own)", "own >= release"),
    ("schedule", "schedule/timed.py", "min(oldest, place % dispatch.lead)", "place % dispatch.lead"),
    ("privacy", "privacy/accountant.py", "interval).self_compose(each.times)", "interval)"),
    (
        "privacy",
        "privacy/accountant.py",
        "epsilon = min(epsilon, gaussian_epsilon(plain, delta))",
        "epsilon = gaussian_epsilon(plain, delta)",
    ),
    (
        "privacy",
        "privacy/accountant.py",
        "total.get_epsilon_for_delta(delta - rounding)",
        "total.get_epsilon_for_delta(delta)",
    ),
    (
        "privacy",
        "privacy/accountant.py",
        "parts = [*sampled, *([Releases(1 / shift, 1)] if shift else [])]",
        "parts = [*sampled]",
    ),
    (
        "training",
        "training/standardise.py",
        "[squares, *_product(2 * shift, rest),",
        "[squares, 2 * shift * rest,",
    ),
    (
        "training",
        "training/standardise.py",
        "shift = shift.astype(np.float32).astype(np.float64)",
        "shift = shift + 0",
    ),
    ("training", "training/standardise.py", "deviation > _CONSTANT * abs(float(centre))", "deviation > 0"),
    (
        "tuning",
        "tuning.py",
        "return sum(max(full, each.client_updates) for each in self.trials)",
        "return full * len(self.trials)",
    ),
    (
        "tuning",
        "tuning.py",
        'if each.state == "complete" and each.value is not None]',
        "if each.value is not None]",
    ),
    ("tuning", "tuning.py", "best = each.value if better else best", "best = each.value"),
    ("schedule", "schedule/advice.py", "idle=1 - (work.seconds - worked)", "idle=1 - work.seconds"),
    (
        "schedule",
        "schedule/advice.py",
        "used = summary.consumed - before.consumed",
        "used = summary.consumed",
    ),
    (
        "schedule",
        "schedule/advice.py",
        "each.steps_per_second >= (1 - _AS_FAST) * fastest",
        "each.steps_per_second >= fastest",
    ),
    (
        "schedule",
        "schedule/advice.py",
        "all(a >= b * (1 - _EQUAL) for a, b in pairs)",
        "all(a >= b for a, b in pairs)",
    ),
    # What an attacker would like: noise that is missing, repeated or known, and counts that are forgotten.
    (
        "aggregate",
        "aggregate/private.py",
        'b"" if self._plan.seed is not None else fingerprint(self._key, trees.leaves(total))',
        'b""',
    ),
    ("aggregate", "aggregate/secure.py", "encode() + fingerprint(noise.key, sums)", "encode()"),
    ("privacy", "privacy/secure/servers.py", 'number.to_bytes(4, "little") + label', "label"),
    ("privacy", "privacy/secure/servers.py", "counted.add(task)", "pass"),
    ("privacy", "privacy/mechanism.py", "rounding * math.sqrt(size)", "rounding"),
    ("privacy", "privacy/ledger.py", 'self._last[clients] = saved.tensors["last"].numpy()', "pass"),
    ("privacy", "privacy/ledger.py", "Releases(self.noise / sensitivity, 1)", "Releases(self.noise, 1)"),
    ("privacy", "privacy/ledger.py", "self.max_participations - start)", "self.max_participations)"),
    ("privacy", "privacy/clipping.py", "margin = 1 - 4 * torch.finfo(leaf.dtype).eps", "margin = 1"),
    ("training", "training/loop.py", "return nominal_cohort(", "return cohort or nominal_cohort("),
)

# Survivors that no test can or need notice, by a part of the mutated line.
REASONS: dict[str, str] = {
    "int(self._counts[client]), self._steps - 1": "only differences between these numbers count",
    "self.sensitivity(steps, 1, 2)": "a single contribution has no other to be apart from",
    "width = max(2, _SORTED": "how many coordinates are sorted at a time changes no value",
    "copy_(flags, non_blocking=False)": "a copy within the CPU's memory blocks either way",
    "_probe_local(algorithm, state, x, 1)": "by then uploads were found not to depend on the staleness",
    "Cohort(0, 10, (0, 1), (1.0, 1.0))": "clients are tried again from the state of any step",
    "algorithm.step(state, nothing, Cohort(0, 10, (1, 0)": "the staleness of a mean of zero moves no model",
    "algorithm.memory(torch.zeros(2))": "whether clients keep memory does not depend on the model's size",
    'zip(data["clients"], data["counts"], strict=False)': "both lists are written together",
    "_UPDATES_PER_CLIENT = 5000, 21": "how long to measure is a choice; figures move by less than chance",
    "_SETTLING, _MEASURED = 3, 3": "how long to settle is a choice; figures move by less than chance",
    "if steps is not None or isinstance(self._session": "a task of None steps did all of them",
    'text.rfind(b"\\n", 1': "no file of lines begins with an empty one",
    "started, time, True, *steps)": "nobody asks again whether an update that waits was lost",
}


def reason(after: str) -> str | None:
    """Why no test notices a mutated line, if that is known."""
    return next((why for part, why in REASONS.items() if part in after), None)


_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Pow: "*",
    ast.Mod: "//",
}
_SYMBOL: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-",
    ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Pow: "**", ast.Mod: "%",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip


def _skipped(node: ast.AST) -> bool:
    """Whether a node is text alone: messages, imports, the catalogue."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Assign) and any(
        isinstance(each, ast.Name) and each.id in ("METHODS", "__all__") for each in node.targets
    )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if _skipped(node):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _edits(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, str, str]]:
    """Nodes between which, or in which, one text takes the place of another."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield left, right, _SYMBOL[type(op)], _COMPARE[type(op)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            if not isinstance(left, ast.Constant) or not isinstance(left.value, str):
                yield left, right, _SYMBOL[type(op)], _BINARY[type(op)]
        case ast.BoolOp(op=op, values=[first, second, *_]):
            yield first, second, _SYMBOL[type(op)], "or" if isinstance(op, ast.And) else "and"
        case ast.UnaryOp(op=ast.Not()):
            yield node, None, "not ", ""
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield node, None, "-", ""
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield node, None, name, "max" if name == "min" else "min"
        case ast.Constant(value=bool() as value):
            yield node, None, str(value), str(not value)
        case ast.Constant(value=int() as value) if 0 <= value <= 64:
            yield node, None, str(value), str(value + 1)


def mutants_of(target: str, path: Path) -> Iterator[Mutant]:
    """Every mutant of a file that is one change on one line."""
    text = path.read_text()
    lines = text.splitlines()
    for node in _walk(ast.parse(text)):
        for first, second, before, after in _edits(node):
            row = first.end_lineno if second is not None else first.lineno  # type: ignore[attr-defined]
            line = lines[row - 1]
            if not line.isascii():
                continue
            begin = first.end_col_offset if second is not None else first.col_offset  # type: ignore[attr-defined]
            same_line = second is not None and second.lineno == row  # type: ignore[attr-defined]
            end = second.col_offset if same_line else len(line)  # type: ignore[union-attr]
            place = line.find(before, begin, end)
            if place < 0 or (second is None and place != begin):
                continue
            changed = line[:place] + after + line[place + len(before) :]
            yield Mutant(target, str(path.relative_to(PACKAGE)), row, line, changed)


def drawn() -> list[Mutant]:
    """The mutants of every draw: of each package those whose texts have the lowest hashes with the seed."""
    found: dict[str, Mutant] = {}
    for seed, packages in DRAWS.items():
        own: dict[str, Mutant] = {}
        for target, (count, patterns) in packages.items():
            paths = sorted(path for pattern in patterns for path in PACKAGE.glob(pattern))
            every = {mutant.name: mutant for path in paths for mutant in mutants_of(target, path)}
            names = sorted(every, key=lambda name: _order(seed, every[name]))
            own |= {name: every[name] for name in names[:count]}
        # What has run is a sample of all packages.
        found |= {name: own[name] for name in sorted(own, key=lambda name: _order(seed, own[name]))}
    return list(found.values())


def _order(seed: int, mutant: Mutant) -> str:
    text = f"{seed} {mutant.before.strip()} -> {mutant.after.strip()}"
    return hashlib.sha256(text.encode()).hexdigest()


def chosen(mistakes: Sequence[tuple[str, str, str, str]] = CHOSEN) -> list[Mutant]:
    """The mutants of these mistakes that match one line: of their file, or of another if it has moved."""
    found = []
    for target, path, before, after in mistakes:
        places = _lines_with(path, before) if (PACKAGE / path).exists() else []
        others = [str(each.relative_to(PACKAGE)) for each in sorted(PACKAGE.rglob("*.py"))]
        places = places or [place for each in others for place in _lines_with(each, before)]
        if len(places) != 1:
            print(f"{len(places)} lines have '{before}' of {path}: choose the mutant anew.")
            continue
        path, row, line = places[0]
        found.append(Mutant(target, path, row, line, line.replace(before, after)))
    return found


def _lines_with(path: str, text: str) -> list[tuple[str, int, str]]:
    lines = (PACKAGE / path).read_text().splitlines()
    return [(path, row, line) for row, line in enumerate(lines, 1) if text in line]
