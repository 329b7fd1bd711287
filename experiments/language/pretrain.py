"""Pretrain a small BERT on GLUE's training sentences and Shakespeare, to fine-tune with language-glue-small.

`python -m experiments.language.pretrain --data-dir DIR --out FOLDER` trains for some minutes on what BERT was
trained on, masked words and whether two sentences belong together, and writes the model and its tokenizer as
`save_pretrained` does. The second task trains the pooler, which stays frozen below adapters.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.language.text import IGNORED, Batch, Rows, read_text
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import draws
from offbeat.cli.main import Parser, parse_options, run_program
from offbeat.cli.options import folder_name, number, whole_number
from offbeat.errors import DivergedError, InputError
from offbeat.files import atomic_dir
from offbeat.nn.language import optional_package, quiet_transformers, train_tokenizer
from offbeat.training.build import parse_device

LOG = "pretraining.jsonl"  # one line for each evaluation
WARMUP = 0.06  # of the time
EVALUATIONS = 10
_HELD_OUT_EPOCH = -1  # so that the held-out text always has the same masks


@dataclass(frozen=True)
class Pretraining:
    """The size of the model, and how it is trained."""

    minutes: float = 20.0
    steps: int | None = None  # instead of minutes, for a result that does not depend on the machine
    layers: int = 2
    width: int = 128
    heads: int = 2
    length: int = 128  # tokens of the longest row
    vocabulary: int = 8000
    lr: float = 1e-3
    batch_tokens: int = 2048
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise InputError(f"--minutes must be above 0 and finite, not {self.minutes:g}.")
        if not 0 < self.lr < math.inf:
            raise InputError(f"--lr must be above 0 and finite, not {self.lr:g}.")
        least = {"layers": 1, "width": 1, "heads": 1, "length": 8, "vocabulary": 1, "batch_tokens": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                option = name.replace("_", "-")
                raise InputError(f"--{option} must be at least {bound}, not {getattr(self, name)}.")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"--steps must be at least 1, not {self.steps}.")
        if self.width % self.heads:
            raise InputError(f"--width {self.width} is not a multiple of --heads {self.heads}: change one.")
        if self.batch_tokens < self.length:
            raise InputError("--batch-tokens is below --length, so a batch may not hold one row: raise it.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""

    def program(words: Sequence[str]) -> int:
        parser = Parser(prog="python -m experiments.language.pretrain", description=__doc__)
        add_options(parser)
        given = vars(parse_options(parser, words))
        data, out = Path(given.pop("data_dir")), Path(given.pop("out"))
        pretrain(Pretraining(**given), data, out)
        return 0

    return run_program(program, arguments)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument(
        "--data-dir", required=True, type=folder_name, metavar="DIR", help="with DIR/glue and DIR/shakespeare"
    )
    command.add_argument(
        "--out", required=True, type=folder_name, metavar="DIR", help="a new folder for model and tokenizer"
    )
    for name, kind, words in (
        ("minutes", number, "how long to train"),
        ("steps", whole_number, "train so many steps instead"),
        ("layers", whole_number, "layers"),
        ("width", whole_number, "hidden size; the layers between are four times as wide"),
        ("heads", whole_number, "attention heads"),
        ("length", whole_number, "tokens of the longest row"),
        ("vocabulary", whole_number, "words and characters of the tokenizer"),
        ("lr", number, "the highest learning rate"),
        ("batch-tokens", whole_number, "tokens of a batch, padding included"),
        ("seed", whole_number, "seed"),
    ):
        default = getattr(Pretraining, name.replace("-", "_"))
        shown = words if default is None else f"{words} [{default:g}]"
        command.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=shown)
    command.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda [cpu]")


def pretrain(chosen: Pretraining, data: Path, out: Path) -> None:
    """Train, print the loss on held-out text, and write the folder at the end."""
    device = parse_device(chosen.device)
    with _new_folder(out) as folder:
        text = read_text(data, chosen.seed)
        tokenizer = train_tokenizer(text.sentences(), chosen.vocabulary)
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        tokenizer.model_max_length = chosen.length
        model = build_model(chosen, tokenizer).to(device)
        held_out = Rows(text.held_out, tokenizer, chosen.length)
        rows = Rows(text.train, tokenizer, chosen.length)
        checks = held_out.batches(chosen.batch_tokens, chosen.seed, _HELD_OUT_EPOCH)
        size = sum(each.numel() for each in model.parameters())
        print(f"{len(text.train)} sentences and pairs, {len(text.held_out)} held out; {size} weights")
        with (folder / LOG).open("w") as log:
            log.write(json.dumps(asdict(chosen) | {"rows": len(text.train), "weights": size}) + "\n")
            for line in train(model, rows, checks, chosen):
                print(
                    f"step {line['step']}, {line['seconds']:.0f} s: masked-word loss "
                    f"{line['loss']:.3f} on held-out text, pairs told apart {line['pair_accuracy']:.3f}",
                    flush=True,
                )
                log.write(json.dumps(line) + "\n")
        with quiet_transformers():
            model.to("cpu").save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    print(f"written: {out}")


def _new_folder(out: Path) -> Any:
    """A folder that appears when it is complete."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out.parent} cannot be made ({error.strerror or error}): name a folder with --out."
        ) from None
    return atomic_dir(out, 0o755)


def build_model(chosen: Pretraining, tokenizer: Any) -> Any:
    """BERT without dropout, with weights from the seed."""
    transformers = optional_package("transformers")
    settings = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=chosen.width,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        intermediate_size=4 * chosen.width,
        max_position_embeddings=chosen.length,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draws.torch_seed(chosen.seed, "model"))
        return transformers.BertForPreTraining(settings)


def train(model: Any, rows: Rows, checks: list[Batch], chosen: Pretraining) -> Iterator[dict[str, Any]]:
    """Train until the time or the steps are over; yield what held-out text gives, ten times."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=chosen.lr, betas=(0.9, 0.98), weight_decay=0.01)
    device, begun, shown = parse_device(chosen.device), time.monotonic(), 0.0
    yield {"step": 0, "seconds": 0.0} | evaluate(model, checks, device)
    for step, batch in enumerate(_stream(rows, chosen)):
        done = _done(chosen, step, time.monotonic() - begun)
        if done >= 1 or done >= shown + 1 / EVALUATIONS:
            shown = done
            spent = round(time.monotonic() - begun, 1)
            yield {"step": step, "seconds": spent} | evaluate(model, checks, device)
        if done >= 1:
            return
        for group in optimiser.param_groups:
            group["lr"] = chosen.lr * min(done / WARMUP + 1e-3, (1 - done) / (1 - WARMUP))
        words, pairs = _losses(model, batch, device)
        loss = sum(each.sum() / max(1, len(each)) for each in (words, pairs))  # a batch may have none
        if not torch.isfinite(loss):
            raise DivergedError(f"the loss became NaN or infinite at step {step}: give a lower --lr.")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def _stream(rows: Rows, chosen: Pretraining) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from rows.batches(chosen.batch_tokens, chosen.seed, epoch)
        epoch += 1


def _done(chosen: Pretraining, step: int, seconds: float) -> float:
    """The part of the training that is over."""
    return seconds / (60 * chosen.minutes) if chosen.steps is None else step / chosen.steps


def _losses(model: Any, batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each masked word and of each pair; words that are not masked need no scores."""
    ids, types, words, follows = (each.to(device) for each in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        seen = (ids != model.config.pad_token_id).long()
        hidden, pooled = model.bert(ids, attention_mask=seen, token_type_ids=types)[:2]
        chosen, paired = words != IGNORED, follows != IGNORED
        scores = model.cls.predictions(hidden[chosen])
        belongs = model.cls.seq_relationship(pooled[paired])
    return (
        cross_entropy(scores.float(), words[chosen], reduction="none"),
        cross_entropy(belongs.float(), follows[paired], reduction="none"),
    )


@torch.no_grad()
def evaluate(model: Any, checks: list[Batch], device: torch.device) -> dict[str, float]:
    """The mean loss of masked words, and the share of pairs that are told apart."""
    model.eval()
    found = [_losses(model, batch, device) for batch in checks]
    model.train()
    words, pairs = (torch.cat([each[kind] for each in found]) for kind in (0, 1))
    right = pairs < math.log(2)  # of two answers, so this one had the larger score
    return {"loss": round(float(words.mean()), 4), "pair_accuracy": round(float(right.float().mean()), 4)}


if __name__ == "__main__":
    sys.exit(main())
