"""The plays of Shakespeare by role, for next-character prediction: LEAF (Caldas et al., 2018).

A role with at least three lines is a client; its lines are joined by spaces, runs of spaces become
one, and every 80 characters in a row are an input whose target is the character that follows. The
alphabet is LEAF's 80 characters. On the Gutenberg text of 1994 this gives LEAF's 1,129 roles and
4,226,158 samples. Departures: the last fifth of each role's text is for testing, in windows that
share no character with training and start 80 apart, so that a test pass stays affordable; roles too
short for one training window are left out. That leaves 1,106 roles, 3,363,458 and 10,212 windows.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SEQUENCE = 80
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
TEST_SHARE = 0.2
LEAST_LINES = 3

_AUTHOR = "by William Shakespeare"
_SPEECH = re.compile(r" {2}(?P<role>[A-Za-z][A-Za-z ]*)\. (?P<words>.*)")
_MORE = re.compile(r" {4}(?P<words>.*)")
# This one play is printed without indentation; acts and marks that begin with "<" end a speech in it.
_FLUSH_PLAY = "THE COMEDY OF ERRORS"
_FLUSH_SPEECH = re.compile(r"(?P<role>[A-Za-z][A-Za-z ]*)\. (?P<words>.*)")
_FLUSH_MORE = re.compile(r"(?P<words>.*)")
_FLUSH_BREAK = re.compile(r"<|act [a-z ]*\. ", re.IGNORECASE)


class Windows(NamedTuple):
    """Windows of text, the characters that follow them, and the roles that speak."""

    inputs: NDArray[np.uint8]  # (windows, SEQUENCE)
    targets: NDArray[np.int64]  # (windows,)
    roles: NDArray[np.int64]  # (windows,)


def roles_of_text(text: str) -> dict[str, str]:
    """The words of each role in the raw text of the complete works, each line ended by a line break."""
    spoken: dict[str, str] = {}
    for title, lines in _works(text.splitlines()):
        speakers = _speakers(title, lines)
        if len(speakers) < 2:  # the poems
            continue
        for role, words in speakers.items():
            if len(words) >= LEAST_LINES:
                name = re.sub(r"\W", "_", f"{title} {role}")
                spoken[name] = "".join(f"{line}\n" for line in words)
    return dict(sorted(spoken.items()))


def roles_of_json(text: str) -> dict[str, str]:
    """The words of each role in a JSON object of role to {"text": words}."""
    try:
        return {role: str(entry["text"]) for role, entry in sorted(json.loads(text).items())}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError('it does not map each role to {"text": its words}') from error


def windows(spoken: dict[str, str]) -> tuple[Windows, Windows]:
    """The training and the test windows of all roles."""
    train: list[Windows] = []
    test: list[Windows] = []
    for words in spoken.values():
        symbols = encode(words)
        cut = len(symbols) - int(len(symbols) * TEST_SHARE)
        if cut > SEQUENCE:
            train.append(_slide(symbols[:cut], 1, len(train)))
            test.append(_slide(symbols[cut:], SEQUENCE, len(test)))
    if not train:
        raise ValueError(f"no role in it says more than {SEQUENCE} characters")
    return _join(train), _join(test)


def encode(words: str) -> NDArray[np.uint8]:
    """Positions in the alphabet; what is not in it becomes a space."""
    table = np.full(129, ALPHABET.index(" "), np.uint8)
    table[[ord(symbol) for symbol in ALPHABET]] = np.arange(len(ALPHABET))
    flat = re.sub(" {2,}", " ", words.replace("\n", " "))
    codes = np.frombuffer(flat.encode("utf-32-le", "replace"), np.uint32)
    return table[np.minimum(codes, 128)]


def _works(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each work's title and lines; the title is the last line set above the author's name."""
    starts = [number for number, line in enumerate(lines) if _AUTHOR in line]
    for start, end in pairwise([*starts, len(lines)]):
        above = [line.strip() for line in lines[max(0, start - 7) : max(0, start - 1)]]
        yield next((line for line in reversed(above) if line), ""), lines[start + 1 : end]


def _speakers(title: str, lines: list[str]) -> dict[str, list[str]]:
    flush = title == _FLUSH_PLAY
    speech, more = (_FLUSH_SPEECH, _FLUSH_MORE) if flush else (_SPEECH, _MORE)
    speakers: dict[str, list[str]] = {}
    role = ""
    for line in lines:
        if flush and _FLUSH_BREAK.match(line):
            role = ""
        elif begun := speech.match(line):
            role = begun["role"].upper()
            speakers.setdefault(role, []).append(begun["words"])
        elif role and (went_on := more.match(line)):
            speakers[role].append(went_on["words"])
    return speakers


def _slide(symbols: NDArray[np.uint8], stride: int, role: int) -> Windows:
    starts = np.arange(0, max(0, len(symbols) - SEQUENCE), stride)
    if not len(starts):
        return Windows(np.empty((0, SEQUENCE), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
    inputs = np.lib.stride_tricks.sliding_window_view(symbols, SEQUENCE)[starts]
    return Windows(inputs, symbols[starts + SEQUENCE].astype(np.int64), np.full(len(starts), role))


def _join(parts: list[Windows]) -> Windows:
    return Windows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
