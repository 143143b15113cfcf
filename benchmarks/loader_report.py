"""What `benchmarks.loader` makes of its runs: medians, ratios in one round, and the goals."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from benchmarks.loader_tasks import LIMIT, PLAIN, UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.loader_runs import Figures

MIXED = "mixed"


@dataclass(frozen=True)
class Run:
    """One run of one contestant: the mix, the workers, the round, and what was measured."""

    mix: str
    workers: int
    contestant: str
    number: int
    figures: Figures


@dataclass(frozen=True)
class Place:
    """A cell of the report: one contestant on one mix with so many workers."""

    mix: str
    workers: int
    contestant: str


def places(runs: Sequence[Run]) -> list[Place]:
    """All of them, in the order in which they ran first."""
    return list(dict.fromkeys(Place(run.mix, run.workers, run.contestant) for run in runs))


def figures_at(runs: Sequence[Run], place: Place) -> dict[int, Figures]:
    """The figures of a place, by round."""
    return {
        run.number: run.figures
        for run in runs
        if (run.mix, run.workers, run.contestant) == (place.mix, place.workers, place.contestant)
    }


def median_of(runs: Sequence[Run], place: Place, figure: Callable[[Figures], float]) -> float:
    """Of a figure, over the rounds."""
    return statistics.median(map(figure, figures_at(runs, place).values()))


def rate(figures: Figures, against: str, clock: str) -> float:
    """What is compared with a contestant, a second: tokens; images with the limit, which has no other work."""
    count = figures.images if against == LIMIT else figures.tokens
    return count / (figures.wall_s if clock == "wall" else figures.cpu_s)


def ratio(runs: Sequence[Run], place: Place, other: Place, clock: str = "wall") -> float | None:
    """How many times as fast as another one; the median over the rounds that have both, None without any."""
    own, others = figures_at(runs, place), figures_at(runs, other)
    found = [
        rate(figures, other.contestant, clock) / rate(others[number], other.contestant, clock)
        for number, figures in own.items()
        if number in others
    ]
    return statistics.median(found) if found else None


def base(place: Place, contestant: str) -> Place:
    """What a place is compared with: the same mix and workers; the limit has one thread, whatever the workers."""
    return Place(place.mix, 0 if contestant == LIMIT else place.workers, contestant)


def summary(runs: Sequence[Run], place: Place) -> dict[str, Any]:
    """The medians of a place, and its ratios to the three that it is compared with, by wall and by CPU time."""

    def median(figure: Callable[[Figures], float]) -> float:
        return median_of(runs, place, figure)

    return {
        "mix": place.mix,
        "workers": place.workers,
        "contestant": place.contestant,
        "rounds": len(figures_at(runs, place)),
        "tokens_per_s": median(lambda own: own.tokens / own.wall_s),
        "tokens_per_cpu_s": median(lambda own: own.tokens / own.cpu_s),
        "images_per_s": median(lambda own: own.images / own.wall_s),
        "batches_per_s": median(lambda own: own.batches / own.wall_s),
        "bytes_per_batch": median(lambda own: own.num_bytes / own.batches),
        "fill": median(lambda own: own.fill),
        "first_s": median(lambda own: own.first_s),
        "peak_rss": median(lambda own: own.peak_rss),
        **{
            f"times_{other}": {
                clock: ratio(runs, place, base(place, other), clock) for clock in ("wall", "cpu")
            }
            for other in (UPSTREAM, PLAIN, LIMIT)
        },
    }


@dataclass(frozen=True)
class Goal:
    """One of the figures to be reached.

    Attributes:
        text: what is wanted.
        measure: what is there; None where the runs for it are missing.
    """

    text: str
    measure: Callable[[Sequence[Run]], float | None]


def _times(mix: str, contestant: str, other: str) -> Callable[[Sequence[Run]], float | None]:
    place = Place(mix, 0, contestant)
    return lambda runs: ratio(runs, place, base(place, other))


def _scaling(contestant: str) -> Callable[[Sequence[Run]], float | None]:
    return lambda runs: ratio(runs, Place(MIXED, 2, contestant), Place(MIXED, 0, contestant))


def _figure(workers: int, contestant: str, name: str) -> Callable[[Sequence[Run]], float | None]:
    place = Place(MIXED, workers, contestant)

    def measure(runs: Sequence[Run]) -> float | None:
        return median_of(runs, place, lambda own: getattr(own, name)) if figures_at(runs, place) else None

    return measure


def _memory(workers: int, contestant: str) -> Callable[[Sequence[Run]], float | None]:
    ours, theirs = _figure(workers, contestant, "peak_rss"), _figure(workers, UPSTREAM, "peak_rss")

    def measure(runs: Sequence[Run]) -> float | None:
        own, other = ours(runs), theirs(runs)
        return own / other if own and other else None

    return measure


GOALS = (
    Goal("mixed, ours fast: at least 3.5 x upstream", _times(MIXED, "ours fast", UPSTREAM)),
    Goal("mixed, ours uint8: at least 5 x upstream", _times(MIXED, "ours uint8", UPSTREAM)),
    Goal("mixed, ours exact: at least 1.8 x upstream", _times(MIXED, "ours exact", UPSTREAM)),
    Goal("edit alone, ours fast: at least 5 x upstream", _times("unified_edit", "ours fast", UPSTREAM)),
    Goal("mixed, ours uint8: at least 0.75 x limit", _times(MIXED, "ours uint8", LIMIT)),
    Goal("mixed, ours fast: at least 0.55 x limit", _times(MIXED, "ours fast", LIMIT)),
    Goal("ours fast, 2 workers: at least 1.8 x 1 process", _scaling("ours fast")),
    Goal("ours uint8, 2 workers: at least 1.8 x 1 process", _scaling("ours uint8")),
    Goal("ours fast, peak RSS of a worker: at most 0.5 x upstream", _memory(2, "ours fast")),
    Goal("ours uint8, peak RSS of a worker: at most 0.5 x upstream", _memory(2, "ours uint8")),
    Goal("ours best_fit, fill: at least 0.985", _figure(0, "ours best_fit", "fill")),
    Goal("ours fast, seconds to the first batch: at most 2", _figure(0, "ours fast", "first_s")),
)


def _markdown(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        # The first says what; the others are figures.
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    return table


def runs_table(runs: Sequence[Run]) -> Table:
    """One row a place; of each ratio the one by wall time, and in brackets that by CPU time."""
    table = _markdown(
        "mix, workers, contestant",
        "tokens/s",
        "tokens/CPU s",
        "images/s",
        "batches/s",
        "MB/batch",
        "fill",
        "first s",
        "peak MB",
        "x upstream",
        "x plain",
        "x limit",
    )
    for place in places(runs):
        row = summary(runs, place)
        # It makes no batch, and holds what it needs beforehand.
        makes = place.contestant != LIMIT
        table.add_row(
            f"{place.mix}, {place.workers}, {place.contestant}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_cpu_s']:,.0f}",
            f"{row['images_per_s']:.1f}",
            f"{row['batches_per_s']:.2f}",
            f"{row['bytes_per_batch'] / 1e6:.0f}" if makes else "",
            f"{row['fill']:.3f}",
            f"{row['first_s']:.2f}" if makes else "",
            f"{row['peak_rss'] / 1e6:.0f}" if makes else "",
            *(
                _ratio_cell(row[f"times_{other}"]) if other != place.contestant else ""
                for other in (UPSTREAM, PLAIN, LIMIT)
            ),
        )
    return table


def _ratio_cell(ratios: dict[str, float | None]) -> str:
    wall, cpu = ratios["wall"], ratios["cpu"]
    return "" if wall is None or cpu is None else f"{wall:.2f} ({cpu:.2f})"


def goals_table(runs: Sequence[Run]) -> Table:
    """What is wanted, and what is there, by wall time."""
    table = _markdown("goal", "measured")
    for goal in GOALS:
        measured = goal.measure(runs)
        table.add_row(goal.text, "not run" if measured is None else f"{measured:.3g}")
    return table
