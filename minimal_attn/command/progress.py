"""A moving line on a terminal, for ../bench/ and the examples."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import track


def watched(jobs: Sequence, name: str, console: Console) -> Iterable:
    """jobs one by one, beside a bar. Shows nothing unless console is a terminal."""
    return track(jobs, name, console=console, transient=True, disable=not console.is_terminal)
