"""Sphinx' settings: `make docs`."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generate

import fl_lightning

project = "fl_lightning"
author = "the fl_lightning developers"
release = version = fl_lightning.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["sort.js"]
html_title = f"fl_lightning {release}"
html_show_copyright = False
html_show_sphinx = False
html_extra_path = ["../llms.txt"]
exclude_patterns = ["_build", "generated/methods.md", "generated/sections"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
# The pages ask the usual server for MathJax when they are read; MATHJAX_PATH names a copy of one's own, and nothing is
# asked for when they are made.
mathjax_path = os.environ.get("MATHJAX_PATH", "https://cdn.jsdelivr.net/npm/mathjax@4/tex-mml-chtml.js")
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]

generate.all_pages(Path(__file__).parent)


def setup(app: Any) -> None:
    """Let shapes such as (C, *shape) stand as they are."""
    app.connect("autodoc-process-docstring", escape_stars)


def escape_stars(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Change the lines in place, as Sphinx wants it."""
    lines[:] = [line.replace(" *shape", r" \*shape") for line in lines]
