"""Drawings as PNG, where the package that converts them is there, and letters to draw them with."""

from collections.abc import Callable

from offbeat.report.drawing import FONT

_ZOOM = 2.5  # sharp on paper, too
_PROBE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">'
    '<text x="2" y="15" font-family="{family}" font-size="14">{word}</text></svg>'
)

Convert = Callable[[str], bytes]


def converter() -> Convert | str:
    """From SVG to PNG; or why there is none, in a sentence."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        return "figures are not written as PNG, for resvg-py is not installed: pip install 'offbeat[report]'."

    def convert(drawing: str) -> bytes:
        return bytes(svg_to_bytes(svg_string=drawing, zoom=_ZOOM))

    written, blank = (convert(_PROBE.format(family=FONT, word=word)) for word in ("on", ""))
    if written == blank:
        return "figures are not written as PNG, for no font was found to write in: install DejaVu Sans."
    return convert
