"""The behaviour that must not change by accident, compared with the files in tests/golden.

`python tests/test_golden.py --write` writes the files again after a change that is made on purpose. Floats
are written with all their digits, so on one machine `git diff tests/golden` afterwards compares every bit;
the tests themselves allow for the rounding of other processors.
"""

import argparse
import contextlib
import dataclasses
import enum
import inspect
import io
import json
import math
import re
import sqlite3
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from safetensors import safe_open

import offbeat
from deploy_world import Deployment, Letter
from offbeat import CATALOGUE, Examples, Source, Task, load
from offbeat.aggregate.secure import clipping_digest, write_terms
from offbeat.cli import main
from offbeat.cli.main import parser
from offbeat.deploy import config, keys
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.helper import protocol
from offbeat.deploy.helper.store import HelperStore, request_digest
from offbeat.deploy.monitor.observer import Monitor
from offbeat.deploy.monitor.state import RunInfo
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.journal import AcceptedUpload, Journal
from offbeat.deploy.server.run import ServeOutcome, write_outcome
from offbeat.nn import models
from offbeat.privacy.secure import encoding
from offbeat.privacy.secure.encoding import subtract_share
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import SecureTerms
from offbeat.schedule.staleness import Polynomial
from offbeat.training import checkpoint
from offbeat.training.build import build_run, resolved_settings
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.runner import Progress, run_experiment
from offbeat.training.task import named_task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Flower imports
    from offbeat.deploy.flower.content import Content, to_objects

JOIN = "offbeat.deploy.flower.site.run_site"  # what `offbeat join` does until it is stopped
HELPER_SERVER = "offbeat.deploy.helper.server.build_server"  # what `offbeat helper` does until it is stopped

GOLDEN = Path(__file__).with_name("golden")
EXACT, DOUBLE, SINGLE = (
    0.0,
    1e-9,
    1e-4,
)  # relative tolerances: none, of float64, of float32 over several steps

Golden = dict[str, Any]


# ---- 1. records, traces and models of short runs ----

SHORT = {
    "clients": 12,
    "concurrency": 6,
    "local_steps": 2,
    "batch_size": 8,
    "rounds": 6,
    "eval_every": 2,
    "seed": 5,
}
PRIVATE = {"clip": "0.5", "noise": 0.8, "delta": 1e-3, "max_participations": 4, "noise_seed": 7}
RUNS: dict[str, dict[str, Any]] = {
    "dispatch-asynchronous": {"algorithm": "fedbuff"},
    "dispatch-asynchronous-after": {"algorithm": "fedbuff", "hand_out": "after"},
    "dispatch-phases": {"algorithm": "mime"},
    "dispatch-poisson": {"algorithm": "fedbuff", "dispatch": "poisson"},
    "dispatch-queues": {"algorithm": "fedavg", "dispatch": "queues"},
    "dispatch-rounds": {"algorithm": "fedbuff", "dispatch": "round-refill"},
    "dispatch-open-slots": {"algorithm": "fedbuff", "dispatch": "open-slots", "open_slots": 3, "buffer": 4},
    "dispatch-synchronous": {"algorithm": "fadas", "dispatch": "synchronous"},
    "availability-dropout": {
        "algorithm": "fedbuff",
        "availability": "cycle:10:0.6",
        "dropout": 0.3,
        "max_staleness": 1,
        "delays": "tiers:large",
        "rounds": 8,
    },
    "average-epochs-sequential": {
        "algorithm": "fedadam",
        "ema_decay": 0.9,
        "local_epochs": 1,
        "batch_size": 40,
        "weight_decay": 0.01,
        "partition": "quantity:1:4",
        "engine": "sequential",
    },
    "aggregate-trimmed-mean": {"algorithm": "fedbuff", "aggregate": "trimmed-mean:0.2", "buffer": 5},
    "aggregate-geometric-median": {"algorithm": "fedbuff", "aggregate": "geometric-median", "buffer": 5},
    "compress-8bit": {"algorithm": "cadence", "compress": "8bit"},
    "compress-topk": {"algorithm": "fedbuff", "compress": "topk:0.05"},
    "private": {"algorithm": "fedbuff"} | PRIVATE,
    "private-8bit": {"algorithm": "fedbuff", "compress": "8bit"} | PRIVATE,
    "private-adaptive": {"algorithm": "fadas", "adaptive_clip": 0.5} | PRIVATE,
    "private-banded": PRIVATE
    | {"algorithm": "cadence", "clip": None, "noise_correlation": "banded:2", "min_separation": 2},
    "private-tree": {"algorithm": "fedavgm", "noise_correlation": "tree"} | PRIVATE,
    "secure": {"algorithm": "adamasfl", "secure": True, "buffer": 5},
    "secure-private": {"algorithm": "fedbuff", "secure": True, "buffer": 5, "weights": "constant"} | PRIVATE,
}


def runs() -> dict[str, dict[str, Any]]:
    """One of each method as it comes, and those above."""
    return {name: {"algorithm": name} for name in sorted(CATALOGUE)} | RUNS


def digits() -> Source:
    """Digits in float64, so that short runs agree to many places on all processors."""
    source = load("digits")
    train, test = (Examples(part.inputs.double(), part.targets) for part in (source.train, source.test))
    return source._replace(train=train, test=test)


def short_run(given: dict[str, Any], folder: Path) -> list[Golden]:
    """What a run leaves: hyperparameters, records, trace, and the names and the model of its checkpoint."""
    experiment = Experiment.of(**SHORT | {"buffer": CATALOGUE[given["algorithm"]].buffer or 3} | given)
    module = models.build("mlp", (64,), 10, experiment.seed).double()
    trial = build_run(experiment, named_task(experiment, digits(), module), folder)
    with RunFolder.begin(folder, experiment.settings()) as opened:
        for _ in run_experiment(experiment, trial, opened):
            pass
    found: list[Golden] = [{"resolved": resolved_settings(experiment, trial)}]
    for name in ("records", "trace"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        found += [{name: without_elapsed(json.loads(line))} for line in lines]
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors")
    tensors = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in sorted(saved.tensors.items())
    }
    model = saved.tensors["state.0"]
    assert model.dtype == torch.float64
    picked = model[:: len(model) // 5].tolist()
    digest = {"norm": float(model.norm()), "sum": float(model.sum()), "some": picked}
    return [*found, {"checkpoint": {"facts": sorted(saved.facts), "tensors": tensors}}, {"model": digest}]


def without_elapsed(line: Golden) -> Golden:
    return {name: value for name, value in line.items() if name != "elapsed"}


# ---- 2. the JSON that commands print ----

TASK = """
import torch
from offbeat import Examples, LearningTask

def load(name):
    return Examples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))

def task():
    return LearningTask(module=lambda: torch.nn.Linear(3, 2), data=load)
"""
SERVE = """
[task]
function = "golden_task:task"
[training]
algorithm = "fedbuff"
clients = 4
rounds = 3
[privacy]
clip = 1.0
noise = 2.0
delta = 1e-3
max_participations = 2
[secure]
helper = "https://localhost:9443"
token = "token"
minimum = 2
"""
SMALL = (
    "--clients 12 --concurrency 6 --local-steps 2 --batch-size 8 --rounds 6 --eval-every 2 --model logistic"
)
COMMANDS: dict[str, tuple[str, float]] = {  # in this order: later ones read what earlier ones wrote
    "algorithms": ("algorithms", EXACT),
    "algorithms-cadence": ("algorithms cadence", EXACT),
    "schedule": ("schedule --clients 30 --rounds 50 --momentum 0.9 --dropout 0.1 --max-staleness 3", DOUBLE),
    "schedule-poisson": ("schedule --clients 30 --rounds 50 --dispatch poisson", DOUBLE),
    "privacy-sampled": (
        "privacy --noise 1 --delta 1e-6 --population 1000 --cohort 20 --rounds 50",
        DOUBLE,
    ),
    "privacy-bounded": ("privacy --epsilon 4 --delta 1e-6 --max-participations 3 --accountant rdp", DOUBLE),
    "privacy-banded": (
        "privacy --noise 2 --delta 1e-6 --rounds 50 --max-participations 3 --min-separation 4 "
        "--noise-correlation banded:4",
        DOUBLE,
    ),
    "run": (f"run cadence {SMALL} --buffer 3 --out run", SINGLE),
    "run-private": (
        f"run fedbuff {SMALL} --buffer 3 --out private --clip 1 --noise 1 --delta 1e-3 "
        "--max-participations 3 "
        "--noise-seed 3",
        SINGLE,
    ),
    "advise": ("advise --clients 20 --updates 300 --deadline 4,none --out frontier.svg", DOUBLE),
    "advise-run": ("advise run --concurrency 6 --buffer 2,3", DOUBLE),
    "run-resumed": ("run --resume --out run", SINGLE),
    "run-error": ("run fedavg --clients 0", EXACT),
    "privacy-of-run": ("privacy private", DOUBLE),
    "replay": ("replay run", SINGLE),
    "compare": (f"compare fedavg fedasync {SMALL} --buffer 2 --out compared", SINGLE),
    "report": ("report run private --out page.html --anyway", EXACT),
    "report-fairness": ("report compared/fedavg compared/fedasync --out fair.html --fairness", EXACT),
    "reproduce": ("experiments --out reproduced", EXACT),
    "new": ("new hospital", EXACT),
    "keys": ("keys --hosts localhost --sites a,b", EXACT),
    "serve": ("serve serve.toml --resume --out served", EXACT),
    "join": (
        "join --superlink 127.0.0.1:9092 --insecure --task golden_task:task --name a --folder site",
        EXACT,
    ),
    "helper": ("helper --key key --store store --token token --insecure --port 0", EXACT),
}
VOLATILE = {
    "elapsed",
    "until",
    "url",
    "key",
    "commit",
    "size",
    "checksum",
}  # names of values that differ each time


def printed(words: str) -> Golden:
    """The exit code and the JSON of one command, in the folder where the process is."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        program, (command, *others) = main, words.split()
        if command == "experiments":  # a program of its own
            from experiments.__main__ import main as experiments_main

            program, command = experiments_main, others.pop(0)
        code = program([command, *others, "--json"])
    found = steadied(json.loads(out.getvalue().splitlines()[-1]))
    if code:
        found = {name: type(value).__name__ for name, value in found.items()}  # sentences may be reworded
    return {"code": code, "json": found}


def steadied(value: Any) -> Any:
    """The same without what differs from one time, place or commit to another."""
    if isinstance(value, dict):
        return {name: f"<{name}>" if name in VOLATILE else steadied(each) for name, each in value.items()}
    if isinstance(value, list):
        return [steadied(each) for each in value]
    if isinstance(value, str):
        return value.replace(str(Path.cwd()), "HERE").replace(str(Path.cwd().resolve()), "HERE")
    return value


def command_json() -> Golden:
    """What every command prints with --json."""
    Path("golden_task.py").write_text(TASK)
    Path("serve.toml").write_text(SERVE)
    Path("token").write_text("a-token-of-the-tests")
    plan = ServeConfig.read(Path("serve.toml"))
    with RunFolder.begin(Path("served"), plan.settings()):
        pass
    spent = {"epsilon": 3.5, "delta": 1e-3, "assumption": "none", "neighbours": "none"}
    write_outcome(Path("served"), ServeOutcome(3, spent=spent))
    found: Golden = {}
    with mock.patch(JOIN), mock.patch(HELPER_SERVER), mock.patch("signal.signal"):
        for name, (words, _) in COMMANDS.items():
            found[name] = printed(words)
    for folder in ("run", "served"):
        told = json.loads((Path(folder) / "settings.json").read_text())
        found[f"settings-of-{folder}"] = steadied(told | {"version": "<version>"})
    made = {path.relative_to(Path.cwd()).as_posix() for path in Path.cwd().rglob("*") if path.is_file()}
    found["files"] = sorted(made)
    tables = {path: path.read_text().splitlines() for path in sorted(Path("fair-files").glob("*.csv"))}
    found["report-tables"] = {path.name: [lines[0], len(lines)] for path, lines in tables.items()}
    return found


# ---- 3. public names and options ----


def public_names() -> list[str]:
    """Each public name, and each field and method of it, on a line of its own."""
    lines: set[str] = set()
    for name in offbeat.__all__:
        lines |= set(described(name, getattr(offbeat, name)))
    return sorted(lines)


def described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{name}: module"
        for own, each in vars(value).items():
            if not own.startswith("_") and getattr(each, "__module__", None) == value.__name__:
                yield from described(f"{name}.{own}", each)
    elif isinstance(value, Mapping):
        yield f"{name}: mapping"
    elif isinstance(value, type):
        yield from class_lines(name, value)
    elif inspect.isfunction(value):
        yield f"{name}{tidy(inspect.signature(value))}"
    else:
        yield f"{name} = {tidy(repr(value))}"


def class_lines(name: str, kind: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__)
    fields = field_lines(kind)
    yield f"class {name}: {bases}"
    if fields:
        yield f"class {name}: fields {', '.join(fields)}"
    yield from (f"{name}.{line}" for line in fields.values())
    if issubclass(kind, enum.Enum):
        yield from (f"{name}.{each.name} = {each.value!r}" for each in kind)
    own = [each for each in kind.__mro__ if each.__module__.startswith("offbeat")]
    members = {member for each in own for member in vars(each) if not member.startswith("_")}
    for member in members - fields.keys():
        found = inspect.getattr_static(kind, member)
        if isinstance(found, property):
            assert found.fget
            yield f"{name}.{member}: property{tidy(inspect.signature(found.fget))}"
        elif isinstance(found, classmethod | staticmethod):
            signature = tidy(inspect.signature(getattr(kind, member)))
            yield f"{name}.{member}: {type(found).__name__}{signature}"
        elif inspect.isfunction(found):
            yield f"{name}.{member}{tidy(inspect.signature(found))}"


def field_lines(kind: type) -> dict[str, str]:
    """The fields of a dataclass or a named tuple, in order, with types and defaults."""
    if not dataclasses.is_dataclass(kind) and not hasattr(kind, "_fields"):
        return {}
    parameters = inspect.signature(kind).parameters
    return {name: tidy(parameter) for name, parameter in parameters.items()}


def tidy(value: object) -> str:
    """The text of a signature without what depends on versions of libraries, and on modules that may move."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    text = re.sub(r"\b(?:[a-z_][a-z_0-9]*\.)+(?=[A-Za-z_])", "", text)
    text = re.sub(r"ndarray\[(?:tuple\[\w+, \.\.\.\]|Any), dtype\[(\w+)\]\]", r"NDArray[\1]", text)
    text = re.sub(r"ForwardRef\('(\w+)'[^)]*\)", r"\1", text)  # of torch, which is imported late
    text = re.sub(r"Union\[(\w+), (\w+(?:\[\(\)\])?)\]", r"\1 | \2", text)
    text = re.sub(r"Optional\[(\w+)\]", r"\1 | None", text)
    return re.sub(r"[~+](?=[A-Z])", "", text)  # of type variables


def options() -> list[str]:
    """Each option of each command, and each key of a deployment's settings file."""
    lines = []
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            spelt = " ".join(action.option_strings) or action.dest
            facts = {
                "metavar": action.metavar,
                "nargs": action.nargs,
                "default": None if action.default is argparse.SUPPRESS else action.default,
                "choices": action.choices,
                "required": action.required or None,
            }
            told = [f"{fact}={value!r}" for fact, value in facts.items() if value is not None]
            kind = type(action).__name__.strip("_").removesuffix("Action").lower()
            lines.append(f"offbeat {name} {spelt}: {', '.join([kind, *told])}")
    for table, names in settings_keys().items():
        lines += [f"serve.toml [{table}] {key}" for key in names]
    return sorted(lines)


def settings_keys() -> dict[str, Any]:
    return {
        table: {name: each.kind for name, each in config.table_keys(table).items()} for table in config.TABLES
    }


# ---- 4. the bytes of a deployment ----

TASKS = [Task(0, 3, 1), Task(2, 4, 0), Task(5, 4, 7)]
TERMS = SecureTerms(
    b"golden run", 5, 8, 3, weight_bits=4, weigh=Polynomial(0.5), rule="polynomial:0.5", clipping="ab" * 32
)
KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
SEED = bytes(range(16))
SITE = ec.derive_private_key(12345, ec.SECP384R1())
# A seed sealed to KEY for the first task, and SITE's signature under it; both differ each time they are made.
SEALED = (
    "8cf56a0a9126442445a6e6393a78dff151a7ebd1adf22be18feae9982d606f1887fdbac24ec5ed3713d5c0daae7ee0adb8a9"
    "9f6467bec024dd6f54a8e4fdc5c0202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
)
SIGNATURE = (
    "098a5b6963aab5913872709e090d40bd88da1cd6336a11fde7cf56e4a22d828916fddb1dc522c3f3253b21794f40314f36eb"
    "ed874cb478c5753c80fad30977a9221899253379772680a4ec99a21c725f577bbc7dcb16c320d99631175e582621"
)
FORM = (("float32", (3, 4)), ("int64", ()))
LEAVES = [
    torch.tensor([[1.5, -2.0], [0.25, 3.0]]),
    torch.tensor(-7, dtype=torch.int16),
    torch.tensor([True, False]),
    torch.tensor([0.1, 1e300], dtype=torch.float64),
    torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
    torch.zeros(0, 3),
]


def wire_bytes(folder: Path) -> Golden:
    """What travels and what is kept, for fixed inputs."""
    task = TASKS[0]
    sealed = bytes.fromhex(SEALED)
    assert encoding.unseal(sealed, task, TERMS, KEY) == SEED
    statement = keys.signed_statement(TERMS, task, sealed)
    assert keys.verify_signature(SITE.public_key(), statement, bytes.fromhex(SIGNATURE))
    reports = tuple(SealedSeed(each, sealed) for each in TASKS)
    unsigned = SumRequest(TERMS.run, 6, TERMS.length, reports)
    signed = unsigned._replace(signatures=(bytes.fromhex(SIGNATURE),) * len(TASKS))
    return {
        "tensors": {"form": messages.specs_of(LEAVES), "bytes": messages.pack(LEAVES).hex()},
        "dtypes": sorted(messages.DTYPES),
        "notes": [
            messages.encode_message(
                messages.TaskMessage(
                    "r", task, True, -1, {"seed": 0, "x": [0.5, None]}, 60.0, FORM, {"length": 5}
                )
            ),
            messages.encode_message(messages.UploadMessage("r", task, FORM, "kept", 0.5, None)),
            messages.encode_message(messages.UploadMessage("r", task, (), "none", 0.5, "it\nbroke \x1b é")),
            messages.encode_message(
                messages.HelloReply("hospital-a", "0123456789abcdef" * 2, 10, FORM, None, "00ff")
            ),
            messages.encode_greeting(None),
            messages.encode_greeting("there is\nno place é."),
        ],
        "flower": flower_objects(),
        "terms": write_terms(TERMS),
        "clipping": [clipping_digest(None), clipping_digest({"b": 2, "a": math.inf}, ["b"])],
        "requests": [protocol.write_request(TERMS, each).hex() for each in (unsigned, signed)],
        "request-digest": request_digest(unsigned, TERMS).hex(),
        "binding": TERMS.binding(task).hex(),
        "statement": statement.hex(),
        "fingerprint": keys.fingerprint(SITE.public_key()),
        "shares": shares(),
        "helper-store": store_tables(folder / "store"),
        "checkpoint": checkpoint_metadata(folder / "state.safetensors"),
        "journal": journal_files(folder / "journal"),
        "plan": plan_note(folder / "serve.toml"),
        "monitoring": monitoring(folder),
    }


def flower_objects() -> list[Any]:
    """The objects of a message with a short payload, and of one with a payload of two parts."""
    found = []
    with mock.patch("os.urandom", bytes):
        for size in (2, 2**22 + 1):
            message_id, objects = to_objects(Content("a note", bytes(size), b"\x03"))
            found.append([message_id, *(each[:200].hex() for each in objects.values())])
    return found


def shares() -> Golden:
    """Numbers in fixed point, and what is left of them when a seed's share is taken away."""
    encoded = np.empty(6, np.uint32)
    encoding.encode(torch.tensor([0.0, 1.0, -1.0, 0.3, -2.75, 2.5 / 65536]), 16, encoded)
    hidden = encoded.copy()
    subtract_share(hidden, SEED)
    (piece,) = encoding.expand_seed(SEED, 4)
    return {
        "encoded": encoded.tolist(),
        "hidden": hidden.tolist(),
        "stream": piece[1].tolist(),
        "sealed": encoding.SEALED_BYTES,
        "limit": TERMS.max_units,
        "weights": [TERMS.weight(task, 6) for task in TASKS],
    }


def store_tables(path: Path) -> list[str]:
    HelperStore(path, "00" * 32).close()
    with contextlib.closing(sqlite3.connect(path)) as base:
        (form,) = base.execute("PRAGMA user_version").fetchone()
        return [f"user_version {form}", *sorted(base.iterdump())]


def checkpoint_metadata(path: Path) -> dict[str, str]:
    tensors = {f"leaf.{number}": leaf for number, leaf in enumerate(LEAVES)}
    checkpoint.save(path, Checkpoint({"version": 3, "time": 0.1, "names": ["a", "ü"]}, tensors))
    with safe_open(path, "pt") as file:
        return dict(sorted(file.metadata().items()))


def journal_files(folder: Path) -> dict[str, str]:
    journal = Journal(folder)
    for task in TASKS[:2]:
        journal.accept(AcceptedUpload(task, 12.5, messages.specs_of(LEAVES), messages.pack(LEAVES)))
    journal.copy_aside(TASKS[:1])
    journal.append(1, {"flow": [1, 2]})
    journal.append(2, {"flow": [3]})
    journal.close()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: "<random>" if name == "run" else path.read_bytes().decode("latin-1")
        for name, path in sorted(files.items())
    }


def plan_note(path: Path) -> Golden:
    """What sites are told to do by a settings file."""
    path.write_text(SERVE)
    return ServeConfig.read(path).note({"local_lr": 0.1})


def monitoring(folder: Path) -> Golden:
    """The events, the page's status and the names of the metrics of a few things that happen."""
    outline = RunInfo("run-1", "fedbuff", 4, buffer=2, rounds=10, concurrency=3, epsilon=8.0, delta=1e-5)
    watch = Monitor(outline, folder, lambda: 1_700_000_000.0)
    watch.tell("joined", node=11, name="north", client=0)
    watch.tell("sent", **TASKS[0]._asdict(), bytes=1000)
    watch.tell("accepted", **TASKS[0]._asdict(), seconds=2.0, work=0.5, bytes=400)
    watch.tell("rejected", node=11, client=0, reason=Reason.INFINITE, sentence="there is a NaN.")
    watch.tell("lost", **TASKS[1]._replace(client=0)._asdict())
    watch.tell("set_aside", **TASKS[1]._replace(client=0)._asdict())
    watch.tell("aside", client=0, seconds=60.0)
    watch.tell("unreachable", sentence="it is gone.")
    watch.tell("reachable")
    record = {"version": 1, "accuracy": 0.5, "loss": 1.0}
    watch.stepped(Progress(1, 10.0, 2, 1.0, record, ages=(1, 1)))
    watch.tell("saved", version=1)
    watch.tell("spent", epsilon=2.5)
    watch.tell("left", node=11, client=0)
    watch.tell("ended", sentence=None)
    watch.close()
    names = {re.split(r"[ {]", line)[0] for line in watch.metrics().decode().splitlines() if line[0] != "#"}
    return {
        "events": [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()],
        "status": watch.status(),
        "metrics": sorted(names),
        "reasons": sorted(reason.value for reason in Reason),
    }


def deployed_messages(place: Path) -> Golden:
    """All that travels in a small deployment in memory, in order, and the folder that it leaves."""
    deployment = Deployment(place, rounds=3)
    sent: list[Golden] = []

    def listen(letter: Letter, reply: Reply) -> list[Reply]:
        for note, payload in ((letter.note, letter.payload), (reply.header, reply.payload)):
            told = json.loads(note) if note else {}
            form = tuple((name, tuple(shape)) for name, shape in told.get("form", ()))
            leaves = messages.unpack(payload, form) if payload else []
            norms = [float(leaf.double().norm()) for leaf in leaves]
            hidden = {name: "<random>" for name in ("run", "site") if name in told}
            if "memory" in told:
                hidden["seconds"] = "<elapsed>"
            sent.append({"kind": letter.kind, "note": told | hidden, "norms": norms})
        return [reply]

    deployment.network.meddle = listen
    with deployment.joined():
        deployment.serve()
    folder = deployment.folder
    roster = json.loads((folder / "roster.json").read_text())
    facts = checkpoint.load(folder / "checkpoint" / "state.safetensors").facts
    files = sorted(
        path.relative_to(place).as_posix()
        for each in (folder, place / "site-0")
        for path in each.rglob("*")
        if path.is_file()
    )
    run_name = (folder / "journal" / "run").read_text().split()[0]
    return {
        "messages": sent,
        "trace": deployment.trace(),
        "roster": {
            name: sorted(value) if isinstance(value, dict) else name for name, value in roster.items()
        },
        "checkpoint": {
            name: sorted(each) if isinstance(each, dict) else None for name, each in facts.items()
        },
        "files": [name.replace(run_name, "RUN") for name in files],
    }


# ---- reading, writing and comparing ----


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where two values differ; floats may by the tolerance, all else may not."""
    if type(expected) is not type(found):
        yield f"{where}: {found!r} in place of {expected!r}"
    elif isinstance(expected, dict):
        for name in expected.keys() - found.keys():
            yield f"{where}/{name}: is gone"
        for name in found.keys() - expected.keys():
            yield f"{where}/{name}: is new"
        for name in expected.keys() & found.keys():
            yield from differences(expected[name], found[name], tolerance, f"{where}/{name}")
    elif isinstance(expected, list):
        if len(expected) != len(found):
            yield f"{where}: {len(found)} entries in place of {len(expected)}"
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, tolerance, f"{where}/{number}")
    elif isinstance(expected, float) and tolerance:
        if not math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance * 1e-3):
            yield f"{where}: {found!r} in place of {expected!r}"
    elif expected != found:
        yield f"{where}: {found!r} in place of {expected!r}"


def check(expected: Any, found: Any, tolerance: float) -> None:
    told = sorted(differences(expected, plain(found), tolerance))
    assert not told, "\n".join(["differs from tests/golden:", *told[:30]])


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value))


def read(name: str) -> Any:
    text = (GOLDEN / name).read_text()
    if name.endswith(".txt"):
        return text.splitlines()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def write(name: str, value: Any) -> None:
    path = GOLDEN / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".txt"):
        text = "\n".join(value)
    elif name.endswith(".jsonl"):
        text = "\n".join(json.dumps(line) for line in value)
    else:
        text = json.dumps(value, indent=1)
    path.write_text(text + "\n")


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder of its own, which the process is in."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        yield Path(name)


KEPT = sorted(path.stem for path in (GOLDEN / "trajectories").glob("*.jsonl"))


@pytest.mark.parametrize("name", KEPT)
def test_a_short_run_leaves_the_same_records_trace_and_model(name: str, tmp_path: Path) -> None:
    expected, found = read(f"trajectories/{name}.jsonl"), plain(short_run(runs()[name], tmp_path / "run"))
    for exact in ("trace", "checkpoint"):
        check([line for line in expected if exact in line], [line for line in found if exact in line], EXACT)
    check(expected, found, DOUBLE)


def test_every_run_is_kept() -> None:
    assert set(RUNS) <= set(KEPT) <= set(runs())  # a method that is added since need not be


def test_commands_print_the_same_json() -> None:
    with empty_folder():
        found = command_json()
    assert {path.stem for path in (GOLDEN / "json").glob("*.json")} == set(found)
    for name, value in found.items():
        expected = read(f"json/{name}.json")
        if name == "algorithms":  # a method may be added
            value["json"] = {method: value["json"].get(method) for method in expected["json"]}
        tolerance = COMMANDS[name][1] if name in COMMANDS else DOUBLE
        check({name: expected}, {name: value}, tolerance)


@pytest.mark.parametrize(("name", "lines"), [("names.txt", public_names), ("options.txt", options)])
def test_the_public_surface_is_the_same(name: str, lines: Callable[[], list[str]]) -> None:
    expected, found = set(read(name)), set(lines())
    told = [f"- {line}" for line in sorted(expected - found)] + [
        f"+ {line}" for line in sorted(found - expected)
    ]
    assert not told, "\n".join(["differs from tests/golden:", *told])


def test_what_travels_and_is_kept_has_the_same_bytes(tmp_path: Path) -> None:
    check(read("wire.json"), wire_bytes(tmp_path), EXACT)


def test_a_deployment_sends_the_same_messages(tmp_path: Path) -> None:
    check(read("deployment.json"), deployed_messages(tmp_path), DOUBLE)


def write_all() -> None:
    """Write every file, and only then remove those of runs and commands that are gone."""
    torch.set_num_threads(1)
    contents: dict[str, Any] = {}
    for name, given in runs().items():
        with empty_folder() as folder:
            contents[f"trajectories/{name}.jsonl"] = short_run(given, folder / "run")
    with empty_folder():
        contents |= {f"json/{name}.json": value for name, value in command_json().items()}
    contents |= {"names.txt": public_names(), "options.txt": options()}
    with empty_folder() as folder:
        contents["wire.json"] = wire_bytes(folder)
    with empty_folder() as folder:
        contents["deployment.json"] = deployed_messages(folder)
    for name, value in contents.items():
        write(name, value)
    for old in {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.json*")} - contents.keys():
        (GOLDEN / old).unlink()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # for the package `experiments`
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_golden.py --write")
    write_all()
