"""Self-contained pages: one template, styles, scripts and data in one file that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from trimtab.report.text import embed, visible


def render(name: str, page: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The page ``name``: <name>.html (a child of page.html) filled with ``page``, and <name>.js with ``data``.

    ``page`` holds at least ``header`` with ``facts``. Every text in it is escaped where the template shows it.
    """
    scripts = [_script(get_plotlyjs()), _script(_resource("base.js") + _resource(f"{name}.js"))]
    return (
        _jinja()
        .get_template(f"{name}.html")
        .render(
            **page,
            css=Markup(_resource("report.css")),
            data=Markup(embed(data)),
            scripts=[Markup(script) for script in scripts],
            script_hashes=[_hash(script) for script in scripts],
        )
    )


def _jinja() -> Environment:
    environment = Environment(loader=FunctionLoader(_resource), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["visible"] = visible
    return environment


def _resource(name: str) -> str:
    return (resources.files("trimtab.report") / name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    """A script as it may stand in the page: nothing in it ends its element early."""
    return text.replace("</script", "<\\/script")


def _hash(script: str) -> str:
    """Digest by which the page's policy admits a script; what is not on the list never runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
