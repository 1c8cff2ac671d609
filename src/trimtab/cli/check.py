"""``trimtab check``: validate a recipe and its overrides, without torch and without a token."""

from __future__ import annotations

import argparse
import json
import sys

from trimtab.core.recipe import load, parse_overrides, resolve

SUMMARY = "validate a recipe file and settings, without loading torch"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("recipe", help="a recipe's slug or the path of a .yaml file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to lay over it")
    parser.add_argument("--json", action="store_true", help="print the resolved configuration as JSON")


def run(args: argparse.Namespace) -> int:
    """Resolve and say so; errors go to standard error with exit code 2."""
    resolved = resolve(load(args.recipe), parse_overrides(args.overrides))
    if args.json:
        sys.stdout.write(json.dumps(resolved.to_dict()) + "\n")
        return 0
    import yaml

    sys.stdout.write(f"{resolved.recipe.name}: ok\n")
    sys.stdout.write(yaml.safe_dump(resolved.to_dict()["parts"], sort_keys=False))
    return 0
