"""The `duoka` command: one verb, one file."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import duoka
from duoka.errors import DuokaError

VERBS = ("run", "rehearse", "devices", "verify")
_HELP = {
    "run": "run a script on several devices",
    "rehearse": "run a few steps of a script in several ways, and compare what comes of them",
    "devices": "list what can compute here",
    "verify": "compare the weights of two runs, step by step",
}


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(prog="duoka", description="Train the model you have on every device you have.")
    parser.add_argument("--version", action="version", version=f"duoka {duoka.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    for name in VERBS:
        # Only the verb that is meant is loaded: `duoka devices` starts nothing it does not need.
        is_meant = next((word for word in words if not word.startswith("-")), None) == name
        module = importlib.import_module(f"duoka.cli.{name}") if is_meant else None
        epilog = getattr(module, "EPILOG", None)
        verb = verbs.add_parser(
            name, help=_HELP[name], epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if module is not None:
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.run(arguments)
    except DuokaError as error:
        print(f"duoka: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
