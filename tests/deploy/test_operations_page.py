"""The page on operations explains every message that the server can print."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
EXPLAINED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
FILES = (
    *("server/run", "server/session", "server/journal", "server/registry", "server/validation"),
    *("server/exchange", "flower/supervisor", "protocol/transport", "flower/superlink"),
)
CALLS = {"InputError", "message", "_refused", "_Refusal", "Rejected", "ValueError"}
INNER = {"its checksum does not match"}  # a part of another message


def messages(path: Path) -> set[str]:
    """The texts of errors and messages in a file, with a space for each value."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            for argument in node.args if name in CALLS else ():
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                texts = [part.value if isinstance(part, ast.Constant) else " " for part in parts]
                if all(isinstance(text, str) for text in texts) and "".join(texts).strip():
                    found.add("".join(texts))
    return found - INNER


@pytest.mark.parametrize("name", FILES)
def test_every_message_of_the_server_is_explained(name: str) -> None:
    found = messages(ROOT / "src" / "offbeat" / "deploy" / f"{name}.py")
    assert found
    assert {text for text in found if not any(each in text for each in EXPLAINED)} == set()


def test_the_page_explains_no_message_that_does_not_exist() -> None:
    code = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # adjacent strings are one
        for path in (ROOT / "src" / "offbeat").rglob("*.py")
    )
    plain = {"full ("}  # the kind of a line in the log, in front of its count
    assert [each for each in EXPLAINED if each not in code and each not in plain] == []
