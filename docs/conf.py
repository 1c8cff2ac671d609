"""Sphinx configuration: Markdown pages, strict build."""

project = "Trimtab"
author = "the Trimtab developers"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Trimtab"
