"""Progress on a terminal's stderr for what takes more than a second; in a pipe there is silence."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Meter", "Stopwatch", "meter"]

DELAY_SECONDS = 1.0


class Meter:
    """A bar that appears once its work has taken a second. Call it with (bytes done, bytes in all).

    Until it is called it shows that something is going on and for how long.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown: tuple[Progress, TaskID] | None = None
        self._lock = threading.Lock()
        self._done, self._total = 0, 0
        self._timer = threading.Timer(DELAY_SECONDS, self._show)
        self._timer.daemon = True
        self._ended = False

    def __call__(self, done: int, total: int) -> None:
        """Report progress; from any one thread."""
        self._done, self._total = done, total
        shown = self._shown
        if shown is not None:
            progress, task = shown
            progress.update(task, completed=done, total=total)

    def begin(self) -> None:
        """Start to wait for the second to pass."""
        if sys.stderr.isatty():
            self._timer.start()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._ended:
                return
            progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                console=Console(stderr=True, markup=False, highlight=False),
                transient=True,
            )
            task = progress.add_task(self._label, total=self._total or None, completed=self._done)
            progress.start()
            self._shown = progress, task

    def end(self) -> None:
        """Take the bar away."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._shown is not None:
                self._shown[0].stop()
                self._shown = None


@contextmanager
def meter(label: str) -> Iterator[Meter]:
    """Show a :class:`Meter` around a piece of work."""
    shown = Meter(label)
    shown.begin()
    try:
        yield shown
    finally:
        shown.end()


class Stopwatch:
    """Seconds of each named stage, with a meter around it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, label: str) -> Iterator[Meter]:
        """Time a stage; stages of one name add up."""
        begin = time.perf_counter()
        try:
            with meter(label) as shown:
                yield shown
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def total(self, *names: str) -> float:
        """The sum of some stages; one that never ran took no time."""
        return sum(self.seconds.get(name, 0.0) for name in names)

    def facts(self) -> dict[str, float]:
        """The stages for JSON, in whole microseconds."""
        return {name: round(seconds, 6) for name, seconds in self.seconds.items()}
