"""The command minimal-attn, also python -m minimal_attn: what is here, is it right, how fast is it?"""

import argparse
import os
import sys
from collections.abc import Callable

from . import __version__
from .command.info import print_info


def main(argv: list[str] | None = None) -> int:
    """Run the command line argv, sys.argv's if None; the exit code."""
    return guarded("minimal-attn", lambda: _run(argv))


def guarded(program: str, command: Callable[[], int | None]) -> int:
    """The exit code of command(), which ends in one line rather than in a traceback: 130 after Ctrl-C, 1 after an error
    (which is raised all the same if MINIMAL_ATTN_TRACEBACK is set), 2 if a package of the extra "bench" is missing. A
    closed pipe (| head -1) ends it without a word, also with 1."""
    try:
        try:
            return command() or 0
        finally:
            print(end="", flush=True)  # here, where a closed pipe can still be caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("rich", "matplotlib"):
            raise
        print(f"{program}: this needs {package}, of the extra \"bench\": pip install 'minimal_attn[bench]'",
              file=sys.stderr)
        return 2
    except (OSError, RuntimeError, ValueError) as error:
        if os.environ.get("MINIMAL_ATTN_TRACEBACK"):
            raise
        said = [*str(error).strip().splitlines(), type(error).__name__][0]
        print(f"{program}: {said} (MINIMAL_ATTN_TRACEBACK=1 shows the traceback)", file=sys.stderr)
    return 1


def _run(argv):
    parser = argparse.ArgumentParser(prog="minimal-attn", description="Attention for PyTorch: tools of minimal_attn.")
    parser.add_argument("--version", action="version", version=f"minimal_attn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    of_demo = commands.add_parser("demo", help="one screen: is it right here, and fast? start here")
    of_demo.add_argument("--profile", action="store_true", help="also print the profiler's tables")
    commands.add_parser("info", help="GPU, versions, backends, kernels, and where builds are kept")
    commands.add_parser("check", help="every backend against the reference; exit code 1 if one is wrong")
    commands.add_parser("bench", help="time everything side by side; bench --help for its options", add_help=False)
    args, rest = parser.parse_known_args(argv)
    if args.command == "bench":
        return bench(rest, "minimal-attn bench")
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        return parser.print_help()
    if args.command == "info":
        return print_info()
    # The others are imported where they run: they need rich, which info does without.
    if args.command == "demo":
        from .bench.demo import run

        return run(args.profile)
    os.environ.setdefault("MINIMAL_ATTN_AUTOTUNE", "0")  # to tune for its few small shapes would take the most time
    from .command.crosscheck import run

    return run()


def bench(argv: list[str], program: str) -> int:
    """bench/ with the options argv; program is how the command was called."""
    from .bench import main

    return main(argv, program)
