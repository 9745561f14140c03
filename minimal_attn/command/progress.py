"""A moving line on a terminal that names the job at work, for crosscheck.py, ../bench/ and the examples."""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import (BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn,
                           TimeRemainingColumn)


def watched(jobs: Iterable, name: Callable[..., str], console: Console) -> Iterator:
    """jobs one by one, each under the line name(job). Shows nothing unless console is a terminal."""
    jobs = list(jobs)
    columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
               TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=name(job))
            yield job
            progress.advance(task)
