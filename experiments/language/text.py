"""The text that a small BERT is pretrained on: GLUE's training sentences and the plays of Shakespeare.

Pairs of GLUE (RTE and MRPC, without their labels) and neighbouring passages of one role are two sentences
that belong together; the phrases of SST-2 stand alone. Every sentence that is also in a dev set is left out,
and so is every sentence of the held-out pairs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat import draws
from offbeat.data import glue, shakespeare
from offbeat.data.download import find_file, parse_file
from offbeat.errors import InputError
from offbeat.nn.language import quiet_transformers

HELD_OUT, LEAST_HELD_OUT = 0.02, 20  # of all pairs; of little text up to half
LINES = 4  # of a play in one passage
MASKED, RANDOM, KEPT = 0.15, 0.1, 0.1  # as in BERT: of all tokens; of the masked ones
IGNORED = -100  # no target, as in torch and transformers

Pair = tuple[str, str | None]


class PretrainingText(NamedTuple):
    """Sentences with the one that follows, where there is one."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]

    def sentences(self) -> Iterator[str]:
        """All sentences to train on."""
        return (each for pair in self.train for each in pair if each is not None)


class Batch(NamedTuple):
    """Token ids with some masked, sentence numbers, what was masked, and whether pairs belong together."""

    ids: Tensor  # (rows, length)
    types: Tensor  # (rows, length): 1 in second sentences
    words: Tensor  # (rows, length): the ids that were masked, elsewhere IGNORED
    follows: Tensor  # (rows,): 0 if the second sentence follows, 1 if it is another one, IGNORED without one


def read_text(folder: Path, seed: int) -> PretrainingText:
    """Read GLUE and Shakespeare from a folder with a folder for each."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name one with the folders glue and shakespeare.")
    tasks = [glue.read(name, folder / "glue") for name in glue.NAMES]
    tested = {plain(each) for task in tasks for each in _sentences(task.test)}
    pairs: list[Pair] = [*_passages(_roles(folder / "shakespeare"))]
    singles: list[Pair] = []
    for task in tasks:
        if task.train.second is None:
            singles += [(each, None) for each in task.train.first]
        else:
            pairs += zip(task.train.first, task.train.second, strict=True)
    pairs = _without(pairs, tested)
    held = np.zeros(len(pairs), np.bool_)
    order = draws.generator(seed, "held-out text").permutation(len(pairs))
    count = max(round(HELD_OUT * len(pairs)), min(LEAST_HELD_OUT, len(pairs) // 2))
    held[order[:count]] = True
    held_out = [pair for pair, out in zip(pairs, held, strict=True) if out]
    rest = [pair for pair, out in zip(pairs, held, strict=True) if not out]
    unseen = tested | {plain(each) for pair in held_out for each in pair if each is not None}
    train = (*_without(rest, unseen), *_without(singles, unseen))
    if not train:
        raise InputError(f"{folder} has no sentence to train on that is not also in a dev set: add text.")
    return PretrainingText(train, tuple(held_out))


def plain(sentence: str) -> str:
    """A sentence for comparisons: in lower case, with letters and digits alone."""
    return "".join(each for each in sentence.lower() if each.isalnum())


def _sentences(part: glue.GlueTexts) -> tuple[str, ...]:
    return (*part.first, *(part.second or ()))


def _without(pairs: Iterable[Pair], unwanted: set[str]) -> list[Pair]:
    return [pair for pair in pairs if not any(each and plain(each) in unwanted for each in pair)]


def _roles(folder: Path) -> dict[str, str]:
    path = find_file(folder, ["by_role.json", "pg100.txt", "shakespeare.txt"])
    read = shakespeare.roles_of_json if path.name.startswith("by_role") else shakespeare.roles_of_text
    return parse_file(path, lambda data: read(data.decode("utf-8-sig")))


def _passages(roles: dict[str, str]) -> Iterator[Pair]:
    """Passages of a role and the next ones, without overlap."""
    for words in roles.values():
        lines = words.split("\n")
        passages = [" ".join(lines[at : at + LINES]).strip() for at in range(0, len(lines), LINES)]
        for number, (one, two) in enumerate(pairwise(each for each in passages if each)):
            if number % 2 == 0:
                yield one, two


class Rows:
    """Pairs as token ids; each epoch gives half of them another second sentence, as BERT's pretraining did.

    The tokenizer needs the tokens [CLS], [SEP], [PAD] and [MASK].
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        with quiet_transformers():
            self._first = _encoded(tokenizer, [one for one, _ in pairs])
            second = _encoded(tokenizer, [two for _, two in pairs if two is not None])
        left = iter(second)
        self._second = [None if two is None else next(left) for _, two in pairs]
        self._others = second

    def batches(self, tokens: int, seed: int, epoch: int) -> list[Batch]:
        """One pass over all rows in batches of about so many tokens, of rows that are about as long."""
        source = draws.generator(seed, "pretraining rows", epoch)
        swapped = source.random(len(self._first)) < 0.5
        drawn = source.integers(max(1, len(self._others)), size=len(self._first))
        rows = [self._row(*each) for each in zip(self._first, self._second, swapped, drawn, strict=True)]
        lengths = np.array([len(row) for row, _, _ in rows])
        order = np.lexsort((source.random(len(rows)), lengths))
        groups: list[list[int]] = [[]]
        for place in order[::-1]:  # the longest first, which then gives its batch its length
            if groups[-1] and (len(groups[-1]) + 1) * lengths[groups[-1][0]] > tokens:
                groups.append([])
            groups[-1].append(int(place))
        masks = torch.Generator().manual_seed(draws.torch_seed(seed, "masked words", epoch))
        shuffled = source.permutation(len(groups))
        return [self._batch([rows[place] for place in groups[group]], masks) for group in shuffled]

    def _row(
        self, first: list[int], second: list[int] | None, swapped: bool, drawn: int
    ) -> tuple[list[int], int, int]:
        """Token ids, where the second sentence begins, and whether it follows."""
        start, end = self._tokenizer.cls_token_id, self._tokenizer.sep_token_id
        if second is None:
            row = [start, *first[: self._length - 2], end]
            return row, len(row), IGNORED
        second = self._others[drawn] if swapped else second
        room = self._length - 3
        kept = max(room - len(second), min(len(first), room // 2))
        first = first[:kept]
        second = second[: room - len(first)]
        return [start, *first, end, *second, end], len(first) + 2, int(swapped)

    def _batch(self, rows: list[tuple[list[int], int, int]], masks: torch.Generator) -> Batch:
        pad, size = self._tokenizer.pad_token_id, max(len(row) for row, _, _ in rows)
        ids = torch.tensor([row + [pad] * (size - len(row)) for row, _, _ in rows])
        types = torch.tensor([[0] * at + [1] * (len(r) - at) + [0] * (size - len(r)) for r, at, _ in rows])
        follows = torch.tensor([each for _, _, each in rows])
        shown, words = masked(ids, self._tokenizer, masks)
        return Batch(shown, types, words, follows)


def masked(ids: Tensor, tokenizer: Any, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids with 15 % of the words masked, of which a tenth is another word and a tenth itself; the targets."""
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(ids.shape, generator=source) < MASKED) & ~special
    kind = torch.rand(ids.shape, generator=source)
    others = torch.randint(len(tokenizer), ids.shape, generator=source)
    shown = torch.where(chosen & (kind < RANDOM), others, ids)
    shown = torch.where(chosen & (kind >= RANDOM + KEPT), tokenizer.mask_token_id, shown)
    return shown, torch.where(chosen, ids, IGNORED)


def _encoded(tokenizer: Any, sentences: list[str]) -> list[list[int]]:
    if not sentences:
        return []
    found: list[list[int]] = tokenizer(sentences, add_special_tokens=False)["input_ids"]
    return found
