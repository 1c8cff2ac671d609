"""The command line. A subcommand is one file with ``SUMMARY``, ``configure(parser)`` and ``run(args) -> exit code``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from typing import Any

from trimtab import __version__
from trimtab.core.errors import ConfigError, TrimtabError, nearest


def commands() -> list[str]:
    """Subcommands, from the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def main(argv: list[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on standard error and exit code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(arguments)
    except TrimtabError as error:
        sys.stderr.write(f"trimtab: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("trimtab: interrupted; a run with checkpoints continues with: trimtab train --resume RUN\n")
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (``| head``): nobody is left to tell
        return 1


def _dispatch(arguments: list[str]) -> int:
    names = commands()
    if not arguments or arguments[0].startswith("-"):
        _overview(names).parse_args(arguments)
        _overview(names).print_help()
        return 0
    asked, *rest = arguments
    if asked not in names:
        near = nearest(asked, names)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"no command {asked!r}.{hint} Commands: {', '.join(names)}")
    module = _module(asked)
    parser = argparse.ArgumentParser(prog=f"trimtab {asked}", description=module.SUMMARY)
    module.configure(parser)
    code: int = module.run(_parse(parser, rest))
    return code


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _overview(names: list[str]) -> argparse.ArgumentParser:
    """The parser behind ``trimtab``, ``trimtab --help`` and ``trimtab --version``."""
    width = max(len(name) for name in names)
    listed = "\n".join(f"  {name:{width}}  {_module(name).SUMMARY}" for name in names)
    parser = argparse.ArgumentParser(
        prog="trimtab",
        usage="trimtab [--help] [--version] command ...",
        description="The rollout-control layer of RL post-training.",
        epilog=f"commands:\n{listed}\n\ntrimtab command --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Settings and options in any order; a command with actions of its own keeps their order."""
    try:
        return parser.parse_intermixed_args(arguments)
    except TypeError:
        return parser.parse_args(arguments)
