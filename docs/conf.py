"""Settings of the documentation: ``make docs``."""

from __future__ import annotations

from sphinx.application import Sphinx

import ddp_hooks

project = "ddp-hooks"
author = "the ddp-hooks authors"
copyright = author
release = version = ddp_hooks.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"ddp-hooks {release}"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"


def skip_field_numbers(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples, which Python documents as "Alias for field number 0"."""
    return True if str(member.__doc__).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_field_numbers)
