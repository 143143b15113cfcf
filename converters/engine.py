"""What an engine is: it does a piece of work for each slice, in whatever order and wherever, and names one that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from bagel_wds.errors import ConfigError, ShardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Result = TypeVar("Result")
Part = TypeVar("Part")

Tell = Callable[[int, int, int], None]
"""Takes how much was done: rows, bytes written, rows left out. Workers tell what is new, the engine tells the sums."""

Work = Callable[[Part, Tell], Result]
"""What is done with a slice; it and its results are pickled."""

TICK_SECONDS = 1.0
"""About so often the sums are told."""

GO_ON = "what is finished is kept: run it again (without --overwrite) to go on"


class Engine(Protocol):
    """A function that does some work for each slice; results come as they are ready.

    Raises:
        ConfigError: as raised by the work, which names the file.
        ShardError: for any other failure, naming the slice. No more slices begin then.
    """

    def __call__(self, work: Work[Part, Result], slices: Sequence[Part], watch: Tell, /) -> Iterator[Result]:
        """Do the work.

        Args:
            work: what to do. The same slice may be done twice, even at the same time: it gives the same bytes each time,
                and every file appears under its name at once.
            slices: each is worked on until it is done once; an error names one by its `str`.
            watch: told the sums over all slices so far, about once a second.
        """
        ...


def explain(part: object, error: Exception) -> ConfigError | ShardError:
    """The error that says which slice went wrong; one of the settings names the file itself."""
    if isinstance(error, ConfigError):
        return error
    return ShardError(f"{part}: {type(error).__name__}: {error}; {GO_ON}")
