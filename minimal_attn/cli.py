"""The command minimal-attn, also python -m minimal_attn: what is here, is it right, how fast is it?

Read next: info.py, crosscheck.py and bench/, which do the work.
"""

import argparse
import os
import sys

from . import __version__
from .info import print_info


def main(argv: list[str] | None = None) -> int:
    """Run the command line argv, sys.argv's if None; the exit code."""
    parser = argparse.ArgumentParser(prog="minimal-attn", description="Attention for PyTorch: tools of minimal_attn.")
    parser.add_argument("--version", action="version", version=f"minimal_attn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="GPU, versions, backends, kernels, and where builds are kept")
    commands.add_parser("check", help="every backend against the reference; exit code 1 if one is wrong")
    commands.add_parser("bench", help="time everything side by side; bench --help for its options", add_help=False)
    args, rest = parser.parse_known_args(argv)
    if args.command == "bench":
        return bench(rest, "minimal-attn bench")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return info() if args.command == "info" else check()


def info() -> int:
    print_info()
    return 0


def check() -> int:
    os.environ.setdefault("MINIMAL_ATTN_AUTOTUNE", "0")  # to tune for its few small shapes would take the most time
    try:
        from .crosscheck import run
    except ModuleNotFoundError as error:
        return _lacks("check", error)
    return run()


def bench(argv: list[str], program: str) -> int:
    """bench/ with the options argv; program is how the command was called."""
    try:
        from .bench import main
    except ModuleNotFoundError as error:
        return _lacks("bench", error)
    return main(argv, program)


def _lacks(command: str, error: ModuleNotFoundError) -> int:
    if error.name.split(".")[0] != "rich":
        raise error
    print(f"minimal-attn {command} needs rich, of the extra \"bench\": pip install 'minimal_attn[bench]'",
          file=sys.stderr)
    return 2
