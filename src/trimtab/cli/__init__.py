"""The command line. A subcommand is one file with ``SUMMARY``, ``configure(parser)`` and ``run(args) -> exit code``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

from trimtab import __version__
from trimtab.core.errors import TrimtabError, nearest


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
    parser = argparse.ArgumentParser(prog="trimtab", description="The rollout-control layer of RL post-training.")
    parser.add_argument("--version", action="version", version=f"trimtab {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    asked = next((a for a in arguments if not a.startswith("-")), None)
    if asked is not None and asked not in names:
        near = nearest(asked, names)
        sys.stderr.write(f"trimtab: no command {asked!r}.{f' Did you mean {near!r}?' if near else ''} ")
        sys.stderr.write(f"Commands: {', '.join(names)}\n")
        return 2
    for name in names if asked is None else [asked]:
        module = importlib.import_module(f"{__name__}.{name}")
        sub = subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.configure(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code
