"""How the site is made, by `python -m sphinx -W -b html docs FOLDER`; it loads nothing from elsewhere."""

from typing import Any

import offbeat

project = "offbeat"
version = release = offbeat.__version__
project_copyright = "the authors of offbeat"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True  # attributes in docstrings are not objects of their own
myst_heading_anchors = 3
highlight_language = "none"  # a fence without a language is a drawing
default_role = "literal"  # docstrings write names between single backticks

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"undoc-members": True}  # methods are explained by their class
add_module_names = False
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "offbeat"
html_copy_source = False
html_show_sphinx = False
html_permalinks_icon = "#"
html_theme_options = {"footer_icons": []}


def _plain(app: Any, what: str, name: str, entity: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain English: a bar is a norm and a star a product, never markup."""
    lines[:] = [line.replace("|", r"\|").replace("*", r"\*") for line in lines]


def _skip(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Fields are in the signature of their class already."""
    told = callable(member) or isinstance(member, property | classmethod | staticmethod)
    return True if what == "class" and not told else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _plain)
    app.connect("autodoc-skip-member", _skip)
