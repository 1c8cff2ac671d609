"""``trimtab methods``: the recipes that ship, from their files; no method is imported."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from trimtab.core.recipe import Recipe, load, shipped

SUMMARY = "list the methods that ship as recipes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("slug", nargs="?", help="show one method with its parts and knobs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """One row of the list."""
    return {
        "slug": recipe.name,
        "title": recipe.title,
        "slots": recipe.slots,
        "paper": recipe.paper,
        "arxiv": recipe.arxiv,
        "year": recipe.year,
        "maturity": recipe.maturity,
        "summary": recipe.summary,
    }


def run(args: argparse.Namespace) -> int:
    """Print the table, one method, or JSON."""
    recipes = [load(args.slug)] if args.slug else [load(slug) for slug in shipped()]
    if args.json:
        rows = [as_dict(recipe) | ({"parts": recipe.parts} if args.slug else {}) for recipe in recipes]
        sys.stdout.write(json.dumps({"methods": rows}) + "\n")
    elif args.slug:
        _show(recipes[0])
    else:
        _table(recipes)
    return 0


def _table(recipes: list[Recipe]) -> None:
    """Two lines a method, which stay readable on 80 columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for r in recipes:
        facts = [" > ".join(r.slots), r.maturity, f"arXiv {r.arxiv}" if r.arxiv else str(r.year)]
        table.add_row(r.name, f"{r.summary}\n[dim]{' · '.join(facts)}[/dim]")
    Console(highlight=False).print(table)


def _show(recipe: Recipe) -> None:
    import yaml
    from rich.console import Console

    from trimtab.core.recipe import normalise
    from trimtab.core.registry import lookup

    console = Console(highlight=False)
    paper = f"{recipe.paper}{f', arXiv {recipe.arxiv}' if recipe.arxiv else ''}, {recipe.year}"
    console.print(f"[bold]{recipe.name}[/bold]  {recipe.title}", markup=True)
    console.print(f"{recipe.summary}\n{paper}\nmaturity: {recipe.maturity}", markup=False)
    for deviation in recipe.deviations:
        console.print(f"deviation: {deviation}", markup=False)
    for slot, links in normalise(recipe.parts, "parts").items():
        for link in links:
            part = lookup(slot, link["part"], slot)(**{k: v for k, v in link.items() if k != "part"})
            console.print(f"\n{slot}: {link['part']}", style="bold", markup=False)
            for f in fields(part):
                console.print(f"  {f.name} = {getattr(part, f.name)!r}  {f.metadata.get('doc', '')}", markup=False)
    if recipe.pocket:
        console.print("\nscaled for pocket models:", style="bold")
        console.print(yaml.safe_dump(recipe.pocket, sort_keys=False).rstrip(), markup=False)
