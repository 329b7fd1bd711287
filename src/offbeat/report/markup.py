"""Text from outside, made safe for HTML and SVG."""

from collections.abc import Mapping
from html import escape

_UNSHOWN = "\N{REPLACEMENT CHARACTER}"


def text(value: str) -> str:
    """As text or as an attribute's value: nothing in it is markup, and nothing in it is invisible."""
    return escape("".join(each if each.isprintable() else _UNSHOWN for each in value))


def element(tag: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """One element; `inside` is markup already."""
    words = "".join(f' {name}="{text(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{words}>{inside}</{tag}>" if inside else f"<{tag}{words}/>"
