"""How fast a method runs on one GPU: against a plain eager loop, and against the limit of the device.

    python benchmarks/gpu_speed.py [--models cnn,resnet18,...] [--precision auto|float32|tf32|bfloat16]
        [--execution auto,mapped,...] [--method fedbuff|cadence] [--rounds 2000] [--quick] [--json FILE]
    python benchmarks/gpu_speed.py --memory 2000 [--execution mapped,streamed]
    python benchmarks/gpu_speed.py --all FOLDER [--minutes 12] [--pfl-python PATH]

For each model, with the library's autotuner on for the first two:

- *eager*: a plain PyTorch loop, client after client, one optimiser each;
- *limit*: one shared-weights batch as large as all clients' together, same precision (where products are
  rounded, in the better of both layouts), which no federated run can be expected to reach since its clients
  have weights of their own;
- *offbeat*: the method (asynchronous FedBuff, if none is named) through `train` with exponential delays,
  everything included, by each execution. The run is declared to have `--rounds` server steps, by which `auto`
  decides whether compiling pays, and is left once its speed is known, which is that of the fastest of three
  windows; *first* is the time to its first server step in seconds, with what the execution measures, records
  or compiles for it, and *run* is what all of the declared run would take with that start and at that speed.
  The cache of the compiler is empty at first. *Again* is a second run in the same process, with a cache that
  all before have filled, and for `auto` with the figures of its first run; a process of its own would also
  have to load the compiler, which takes seconds.

Ratios are taken within one run, and the data are random: only speed is measured here.

`--memory` runs so many server steps with clients of many sizes that keep memory, so that groups of tasks
vary, and weighs what is allocated after a quarter, a half and all of them.

`--all` runs every part in a process of its own, pfl's workload by pfl_cifar.py and tests/engines/test_gpu.py
among them, writes what each finds to the folder as it goes, and prints a table of what was aimed at beside
what was measured. A part that fails or takes too long is named and the others go on. Called again with the
same folder, it goes on with the parts that are missing. Caches of the compiler and of `auto` are in the
folder too.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache
from torch.nn.functional import cross_entropy

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cadence,
    Epochs,
    Examples,
    Exponential,
    FedOpt,
    Population,
    Problem,
    Steps,
    train,
)
from offbeat.engines.execution import EXECUTIONS, Execution
from offbeat.engines.simulation import Vectorised
from offbeat.nn import models
from offbeat.nn.problem import Precision

LR = 0.01


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One number per example."""
    return cross_entropy(outputs, targets, reduction="none")


class Size(NamedTuple):
    """A workload."""

    shape: tuple[int, ...]  # of one example; of a model that reads tokens, its length
    clients: int  # at work at once; twice as many as a buffer holds
    steps: int  # local
    batch: int
    rounds: int  # of a window that is timed


SIZES = {
    "mlp": Size((1, 28, 28), 64, 10, 50, 200),
    "cnn": Size((1, 28, 28), 64, 10, 50, 40),
    "resnet18": Size((3, 32, 32), 32, 5, 50, 16),
    "resnet18-bn": Size((3, 32, 32), 32, 5, 50, 16),
    "charformer": Size((80,), 64, 10, 20, 40),
    "bert-tiny": Size((64,), 64, 10, 20, 80),
    "bert-base": Size((64,), 8, 2, 10, 4),
}
SYMBOLS = 64  # of models that read tokens
WINDOWS = 3  # that are timed, of which the fastest counts, as of eager and limit


class Case:
    """One model at one size."""

    def __init__(
        self, name: str, device: torch.device, precision: Precision, given: argparse.Namespace
    ) -> None:
        self.name, self.device, self.precision = name, device, precision
        size = SIZES[name]
        if given.quick:
            small = (3, 16, 16) if size.shape == (3, 32, 32) else size.shape
            size = size._replace(shape=small, clients=4, steps=2, batch=2, rounds=1)
        self.shape, self.concurrency, self.steps, self.batch, self.rounds = size
        self.buffer = self.concurrency // 2
        self.declared, self.windows = given.rounds, 1 if given.quick else WINDOWS
        self.method = Cadence.tuned(self.steps) if given.method == "cadence" else FedOpt(LR, 1.0)
        generator = torch.Generator().manual_seed(0)
        examples = 200 if given.quick else 5000
        tokens = len(self.shape) == 1
        self.classes = SYMBOLS if name == "charformer" else 10
        data = Examples(
            torch.randint(0, SYMBOLS, (examples, *self.shape), generator=generator)
            if tokens
            else torch.randn(examples, *self.shape, generator=generator),
            torch.randint(0, self.classes, (examples,), generator=generator),
        )
        parts = np.array_split(np.arange(examples), 2 * self.concurrency)
        self.population = Population(data, parts, Steps(self.steps, self.batch)).to(device)

    def module(self) -> nn.Module:
        """With the same weights each time."""
        return models.build(self.name, self.shape, self.classes, seed=0).to(self.device)

    def problem(self) -> Problem:
        """For offbeat."""
        return Problem(self.module(), losses, precision=self.precision)

    def eager(self) -> float:
        """Local steps per second of a plain loop over clients."""
        module, start = self.module(), self.module().state_dict()
        inputs, targets = self.population.data
        places = torch.randint(0, len(targets), (self.steps, self.batch), device=self.device)
        clients = 4

        def work() -> None:
            for _ in range(clients):
                module.load_state_dict(start)
                optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)
                for rows in places:
                    optimiser.zero_grad()
                    self.loss(module, inputs[rows], targets[rows]).backward()
                    optimiser.step()

        return clients * self.steps / self.best(work)

    def limit(self) -> float:
        """Local steps per second if all clients shared one model."""
        layouts = [torch.contiguous_format]
        if self.precision is not Precision.FLOAT32 and len(self.shape) == 3:
            layouts.append(torch.channels_last)
        return max(map(self.shared, layouts))

    def shared(self, layout: torch.memory_format) -> float:
        """The limit in one layout of images."""
        module = self.module().to(memory_format=layout)
        inputs, targets = self.population.data
        if len(self.shape) == 3:
            inputs = inputs.contiguous(memory_format=layout)
        size = self.buffer * self.batch
        places = torch.randint(0, len(targets), (self.steps, size), device=self.device)
        optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)

        def work() -> None:
            for rows in places:
                optimiser.zero_grad()
                self.loss(module, inputs[rows], targets[rows]).backward()
                optimiser.step()

        return self.buffer * self.steps / self.best(work)

    def loss(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """In the precision that is measured."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            outputs = module(inputs)
        return cross_entropy(outputs, targets)

    def best(self, work: Callable[[], None], tries: int = 3) -> float:
        """The least seconds of several tries, after one to warm up."""
        seconds = []
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        rounded = self.precision is not Precision.FLOAT32
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = rounded
        # the library's best, repeatable or not
        with cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32):
            for _ in range(tries + 1):
                began = self.now()
                work()
                seconds.append(self.now() - began)
        matmul.allow_tf32, cudnn.allow_tf32 = before
        return min(seconds[1:])

    def offbeat(self, execution: Execution) -> tuple[float, float, str | None]:
        """Local steps per second of a run, seconds to its first server step, and what `auto` chose."""
        engine = Vectorised(self.problem(), self.population, Exponential(1.0), execution=execution)
        began = self.now()
        shots = train(
            self.method,
            engine,
            dispatch=Asynchronous(self.concurrency),
            buffer=self.buffer,
            rounds=max(self.declared, (1 + self.windows) * self.rounds + 3),
        )
        warm = 3 + self.rounds // 4
        ends = [warm + window * self.rounds for window in range(self.windows + 1)]
        times = []
        for shot in shots:
            if shot.version == 1:
                first = self.now() - began
            if shot.version in ends:
                times.append(self.now())
            if shot.version == ends[-1]:
                break
        run = self.rounds * self.buffer * self.steps / min(b - a for a, b in pairwise(times))
        report = shot.execution()
        shots.close()  # type: ignore[attr-defined]
        return run, first, report["chosen"] if report else None

    def now(self) -> float:
        """Seconds, when all that was queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Report:
    """What was found so far, in a file as well."""

    def __init__(self, path: str | None, facts: dict[str, Any]) -> None:
        self._path, self.facts = path and Path(path), facts

    def write(self) -> None:
        """After each new figure."""
        if self._path:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.facts, indent=1))
            part.replace(self._path)


def measure(case: Case, executions: list[str], report: Report) -> bool:
    """One model, all executions; whether all of them ran."""
    eager, limit = case.eager(), case.limit()
    size = sum(p.numel() for p in case.module().parameters() if p.requires_grad)
    print(
        f"\n{case.name}, {size:,} weights, batch {case.batch}, {case.steps} local steps, "
        f"buffer {case.buffer}, concurrency {case.concurrency}, {case.precision.name.lower()}"
    )
    print(f"{'':44}{'steps/s':>10}{'of eager':>10}{'of limit':>10}{'first':>10}{'run':>10}")
    print(f"{'eager loop':44}{eager:10.0f}{1:10.2f}{eager / limit:10.2f}")
    print(f"{'limit':44}{limit:10.0f}{limit / eager:10.2f}{1:10.2f}", flush=True)
    found: dict[str, Any] = {"model": case.name, "weights": size, "eager": eager, "limit": limit}
    report.facts["cases"].append(found)
    report.write()
    whole = True
    runs = [(name, False) for name in executions]
    runs += [(name, True) for name in executions if name == "auto" or name.endswith("-compiled")]
    with tempfile.TemporaryDirectory(prefix="offbeat-") as kept, fresh_inductor_cache():
        os.environ["OFFBEAT_CACHE"] = kept
        for name, again in runs:
            label = f"{name} again" if again else name
            # what `auto` compiles in its first run must not be there from those before
            hidden = name == "auto" and not again and len(executions) > 1
            try:
                with fresh_inductor_cache() if hidden else contextlib.nullcontext():
                    run, first, chosen = case.offbeat(EXECUTIONS[name])
            except Exception as error:  # the others are worth having
                whole = False
                found[label] = {"error": f"{type(error).__name__}: {error}"[:500]}
                print(f"offbeat, {label} failed: {found[label]['error']}", flush=True)
            else:
                seconds = first + (case.declared - 1) * case.buffer * case.steps / run
                found[label] = {"steps/s": run, "of eager": run / eager, "of limit": run / limit}
                found[label] |= {"first": first, "run": seconds} | ({"chosen": chosen} if chosen else {})
                words = f"offbeat, {label}" + (f" ({chosen})" if chosen else "")
                figures = f"{run:10.0f}{run / eager:10.2f}{run / limit:10.2f}{first:10.1f}{seconds:10.1f}"
                print(f"{words:44}{figures}", flush=True)
            report.write()
    return whole


def allocated(device: torch.device) -> int:
    """Bytes in use: of the GPU's memory, or else of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def weigh(execution: str, device: torch.device, steps: int) -> list[int]:
    """Bytes after a quarter, a half and all of the server steps."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(600, 1, 28, 28, generator=generator)
    data = Examples(inputs, torch.randint(0, 10, (600,), generator=generator))
    cuts = np.cumsum(np.random.default_rng(3).integers(5, 45, 23))
    parts = [part for part in np.split(np.arange(600), cuts) if len(part)]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.3), nn.Linear(16, 10)).to(device)
    population = Population(data, parts, Epochs(1, 10)).to(device)
    engine = Vectorised(
        Problem(module, losses), population, Exponential(1.0), execution=EXECUTIONS[execution]
    )
    places = (steps // 4, steps // 2, steps)
    method = AdaMasFL(0.02, 0.05, 0.5)
    shots = train(method, engine, dispatch=Asynchronous(10), buffer=4, rounds=steps)
    return [allocated(device) for shot in shots if shot.version in places]


MODELS = ("cnn", "resnet18", "resnet18-bn", "charformer", "bert-tiny", "mlp")
ROUNDED = ("resnet18", "resnet18-bn")  # that are measured in bfloat16 as well
BY_HAND = ("mapped", "streamed", "mapped-compiled", "streamed-compiled")
SMALL = ("mapped", "streamed", "mapped-compiled", "auto")  # whose compiled streams were slower
STREAMED = ("streamed", "streamed-compiled", "auto")  # large layers are slow, and slow to compile, if mapped
CPU_EXECUTIONS = ("auto", "mapped")
STEADY = 2**20  # bytes by which memory may differ


class Part(NamedTuple):
    """A program that finds something out."""

    name: str
    program: list[str]
    limit: float  # seconds


def all_parts(given: argparse.Namespace) -> Iterator[Part]:
    """What matters most comes first."""
    quick = ["--quick"] if given.quick else []
    here = Path(__file__)
    own = [sys.executable, "-u", str(here), "--device", given.device, *quick]
    pfl = [sys.executable, "-u", str(here.with_name("pfl_cifar.py")), "--device", given.device, *quick]
    pfl += ["--offbeat-engine", "vectorised", "--precision", "tf32", "--steps", "20", "--turn", "10"]
    peers = ["--peers", "eager"]
    if given.pfl_python:
        peers += ["pfl", "--pfl-python", given.pfl_python, "--pfl-processes", *given.pfl_processes]
    compiled = "mapped" if given.device == "cpu" else "mapped-compiled"

    def model(name: str, precision: str = "auto") -> Part:
        large = name.startswith(("resnet", "bert-base")) and given.device != "cpu"
        executions = STREAMED if large else SMALL
        words = ["--models", name, "--execution", ",".join(executions), "--precision", precision]
        file = name if precision == "auto" else f"{name}-{precision}"
        return Part(file, [*own, *words], 150)

    yield model("cnn")
    yield model("resnet18")
    yield Part("pfl", [*pfl, "--peers", "eager"], 100)
    yield Part("pfl-compiled", [*pfl, "--peers", "eager", "--execution", compiled], 120)
    yield Part("pfl-again", [*pfl, *peers], 240 if given.pfl_python else 100)
    yield Part("memory", [*own, "--memory", "40" if given.quick else "2000"], 90)
    for name in MODELS[2:]:
        yield model(name)
    for name in ROUNDED[: 1 if given.quick else None]:
        yield model(name, "bfloat16")
    tests = here.parent.parent / "tests" / "engines" / "test_gpu.py"
    yield Part("tests", [sys.executable, "-m", "pytest", "-q", "-n", "0", str(tests)], 300)
    if not given.quick:
        yield model("bert-base")


def run_part(part: Part, folder: Path, seconds: float) -> str:
    """Run it; `done`, or what went wrong. Its figures are in the folder in either case."""
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    speaks = Path(__file__).name != Path(part.program[2]).name  # else it writes the file by itself
    words = part.program if speaks else [*part.program, "--json", str(file)]
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / "compiler", "OFFBEAT_CACHE": folder / "offbeat"}
    environment = os.environ | {name: str(path.resolve()) for name, path in caches.items()}
    with log.open("w") as output:
        child = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = child.wait(max(1.0, min(part.limit, seconds)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    said = [line for line in log.read_text().splitlines() if line.strip()]
    if speaks and said and said[-1].startswith("{"):
        file.write_text(said[-1])
    if code is None:
        return f"stopped after {min(part.limit, seconds):.0f} s"
    return "done" if code == 0 else f"failed: {said[-1][:200] if said else f'exit code {code}'}"


class Row(NamedTuple):
    """An aim beside what was measured."""

    what: str
    aim: str
    found: str
    met: bool | None  # None: not measured


def read_json(path: Path) -> dict[str, Any]:
    """What a part wrote; nothing if it wrote none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def speeds(folder: Path, file: str) -> dict[str, dict[str, Any]]:
    """The executions of a model that were measured, and its limit, from the file of a part."""
    cases = read_json(folder / f"{file}.json").get("cases") or [{}]
    return {name: each for name, each in cases[0].items() if isinstance(each, dict) and "run" in each}


def model_rows(folder: Path, file: str, of_limit: float | None) -> Iterator[Row]:
    """The aims of one model."""
    found = speeds(folder, file)
    auto = found.get("auto")
    for again in (False, True):
        suffix = " again" if again else ""
        hand = {name: found.get(name + suffix, each) for name, each in found.items() if name in BY_HAND}
        best = min(hand, key=lambda name: hand[name]["run"], default=None)
        own = found.get("auto" + suffix)
        what = f"{file}: `auto` of the best by hand" + (", second run" if again else "")
        if own is None or best is None:
            yield Row(what, "0.95", "not measured", None)
            continue
        ratio = hand[best]["run"] / own["run"]
        words = f"{ratio:.2f} ({own.get('chosen') or 'no choice'} {own['run']:.1f}; "
        yield Row(what, "0.95", f"{words}{best} {hand[best]['run']:.1f} s a run)", ratio >= 0.95)
    if auto is None:
        return
    chosen = auto.get("chosen") or "no choice"
    if of_limit is not None:
        reached, most = auto["of limit"], max(each["of limit"] for each in found.values())
        words = f"{reached:.2f} (best of all {most:.2f})"
        yield Row(f"{file}: `auto` of the limit", f"{of_limit:g}", words, reached >= of_limit)
    compiles = chosen.endswith("-compiled")
    aim = "none: the compiler pays" if compiles else "at most 5 s"
    yield Row(
        f"{file}: first server step of `auto`", aim, f"{auto['first']:.1f} s", compiles or auto["first"] <= 5
    )


def pfl_rows(folder: Path) -> Iterator[Row]:
    """The aims of pfl's workload: `auto` in a first run, compiled by hand, and `auto` in a later run."""
    for file in ("pfl", "pfl-compiled", "pfl-again"):
        facts = read_json(folder / f"{file}.json")
        peers = facts.get("peers", {})
        if not peers:
            yield Row(f"{file}: a server step", "at most 12 ms", "not measured", None)
            continue
        least = min(each["offbeat_ms"] for each in peers.values())
        chosen = (facts.get("execution") or {}).get("chosen", facts.get("asked", ""))
        words = f"{least:.1f} ms ({chosen})"
        yield Row(f"{file}: a server step", "at most 12 ms", words, least <= 12)
        same = abs(facts["accuracy"] - peers["eager"]["accuracy"]) <= 0.02
        words = f"{facts['accuracy']:.3f}, eager {peers['eager']['accuracy']:.3f}"
        yield Row(f"{file}: accuracy", "the same", words, same)
    ratios = {
        int(name.split()[1]): each["ratio"]
        for name, each in read_json(folder / "pfl-again.json").get("peers", {}).items()
        if name.startswith("pfl")
    }
    one = ratios.get(1)
    yield Row("times pfl, 1 process", "40", f"{one:.1f}" if one else "not measured", one and one >= 40)
    least = min(ratios.values(), default=None)
    yield Row("times pfl at its best", "9", f"{least:.1f}" if least else "not measured", least and least >= 9)


def other_rows(folder: Path) -> Iterator[Row]:
    """Memory and trajectories."""
    held = read_json(folder / "memory.json").get("memory", {})
    for name in ("mapped", "streamed"):
        what, aim = f"memory of {name}, groups that vary", "the same"
        if name not in held:
            yield Row(what, aim, "not measured", None)
            continue
        growth = max(held[name][1:]) - held[name][0]
        words = f"{held[name][0] / 2**20:.1f} MiB, {growth / 2**20:+.1f}"
        yield Row(what, aim, words, growth <= STEADY)
    log = folder / "tests.log"
    said = log.read_text().splitlines()[-1:] if log.exists() else []
    passed = bool(said) and " passed" in said[0]
    met = passed and "failed" not in said[0] and "error" not in said[0] if passed else None
    yield Row("tests/engines/test_gpu.py", "all pass", said[0].strip("= ") if said else "not run", met)


def all_rows(folder: Path) -> list[Row]:
    """The table of what was aimed at."""
    limits = {"cnn": 0.75, "resnet18": 0.95, "resnet18-bn": 0.95}
    rows = [row for name in MODELS for row in model_rows(folder, name, limits.get(name))]
    rows += [row for name in ROUNDED for row in model_rows(folder, f"{name}-bfloat16", 0.7)]
    return [*rows, *pfl_rows(folder), *other_rows(folder)]


def run_all(given: argparse.Namespace) -> None:
    """Everything, and the table; the last line is JSON."""
    folder, ends = Path(given.all), time.monotonic() + 60 * given.minutes
    folder.mkdir(parents=True, exist_ok=True)
    state = Report(str(folder / "parts.json"), read_json(folder / "parts.json"))
    for part in all_parts(given):
        if state.facts.get(part.name) == "done":
            continue
        left, begun = ends - time.monotonic(), time.monotonic()
        state.facts[part.name] = run_part(part, folder, left) if left > 10 else "no time was left"
        state.write()
        print(f"{part.name:<24}{time.monotonic() - begun:6.0f} s  {state.facts[part.name]}", flush=True)
    rows = all_rows(folder)
    marks = {True: "yes", False: "NO", None: "-"}
    lines = ["| | aim | measured | met |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.aim} | {row.found} | {marks[row.met]} |" for row in rows]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines, ""]))
    print(json.dumps({"parts": state.facts, "rows": [row._asdict() for row in rows]}))


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="mlp,cnn,resnet18,resnet18-bn,charformer,bert-tiny")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--execution", default=",".join((*BY_HAND, "auto")))
    parser.add_argument("--method", choices=("fedbuff", "cadence"), default="fedbuff")
    parser.add_argument("--rounds", type=int, default=2000, help="server steps that a run is said to have")
    parser.add_argument("--memory", type=int, help="server steps over which memory is weighed")
    parser.add_argument("--all", help="a folder for the results of everything")
    parser.add_argument("--minutes", type=float, default=12.0, help="that everything may take")
    parser.add_argument("--pfl-python", help="a Python that has pfl, for everything")
    parser.add_argument("--pfl-processes", nargs="+", default=["1", "8"])
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--json", default=None, help="a file for the figures")
    given = parser.parse_args()
    if given.all:
        run_all(given)
        return
    device = torch.device(given.device)
    executions = given.execution.split(",")
    if device.type == "cpu":
        executions = [name for name in executions if name in CPU_EXECUTIONS]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"device": name, "torch": torch.__version__, "precision": given.precision}
    if given.memory:
        report = Report(given.json, facts | {"memory": {}})
        for each in executions:
            if each in ("mapped", "streamed"):
                report.facts["memory"][each] = weigh(each, device, given.memory)
                report.write()
        print(json.dumps(report.facts))
        return
    report = Report(given.json, facts | {"cases": []})
    whole = [
        measure(Case(model, device, Precision[given.precision.upper()], given), executions, report)
        for model in given.models.split(",")
    ]
    print(json.dumps(report.facts))
    sys.exit(not all(whole))


if __name__ == "__main__":
    main()
