"""The plans of a group that a class of upstream's kind reads, for a run.

Of our own classes a run takes the order of the rows alone: under `fidelity="upstream"` it plans them as it plans rows from
shards, and decodes what a pack shows. A user's class is asked for its samples, whose pictures are decoded by then; the
process-wide generators are lent a state of the group's own for each.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from bagel_wds.drops import LEAST_IN_A_ROW, Drops
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.groups import groups_of, planner_of
from bagel_wds.images import EncodedImage, truncated_images_taken
from bagel_wds.planners import settle
from bagel_wds.planners.build import check_views
from bagel_wds.records import Kind, RawSample
from bagel_wds.rng import KeyedDraws
from bagel_wds.sources.jsonl import parse_line
from bagel_wds.upstream.distributed import DistributedIterableDataset, Row
from bagel_wds.upstream.frame_sampler import open_clip
from bagel_wds.upstream.interleave import UnifiedEditIterableDataset, encoded
from bagel_wds.upstream.samples import plan_of
from bagel_wds.upstream.t2i import T2IIterableDataset
from bagel_wds.upstream.vlm import SftJSONLIterableDataset, media_path, named_images, read_file
from bagel_wds.wiring import dropout_rates, pack_limits, plan_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.errors import Tally
    from bagel_wds.records import Picture, SamplePlan
    from bagel_wds.rng import Draws
    from bagel_wds.tokens import TextEncoder
    from bagel_wds.upstream.draws import OwnGenerators


EDIT_COLUMNS = ("image_list", "instruction_list")
"""Of a parquet file of edits, what a sample is made of."""

_REASONS = {str(reason): reason for reason in Reason}


class PlannedRows:
    """The plans of the rows that one worker reads, in upstream's order, without end; nothing is decoded that need not be.

    Args:
        dataset: one of our own classes.
        group: name of the group.
        config: its mixture must hold the group.
        encoder: what the groups have in common for texts.
        draws: in call order.
        tally: of rows read and dropped.
        worker: number of the worker.
        num_workers: of so many; 0 is the process itself.
        position: go on behind the row there; None goes on where the dataset's `data_status` says.

    Attributes:
        position: of the last row that gave a plan.
    """

    def __init__(
        self,
        dataset: DistributedIterableDataset,
        group: str,
        config: BagelDatasetConfig,
        encoder: TextEncoder,
        draws: Draws,
        tally: Tally,
        *,
        worker: int,
        num_workers: int,
        position: Any = None,
    ) -> None:
        settings = groups_of(config)[group]
        self._dataset = dataset
        self._tools, self._planner = plan_tools(config, group, settings, encoder), planner_of(settings)
        self._draws = draws
        self._tally = tally
        self._rows, self._raw = _reading(dataset)
        self._paths, self._worker = dataset.share_of(worker, num_workers)
        self.position = dataset.status_of(worker) if position is None else position

    def __iter__(self) -> Iterator[SamplePlan]:
        """The plans.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        drops = Drops(self._tools.group, self._tally)
        for row, planned in self._dataset.passes(
            self._rows,
            self._use,
            lambda row, bad: drops.drop(row.place, bad),
            self._paths,
            self._worker,
            self.position,
        ):
            self.position = row.status
            yield planned

    def _use(self, row: Row, _worker: int) -> SamplePlan:
        self._tally[self._tools.group, "read"] += 1
        planned = self._planner(self._raw(row), self._tools, self._draws)
        check_views(planned)
        return planned

    def media(self, positions: Iterable[Any]) -> dict[Any, tuple[Sequence[Picture], ...]]:
        """The encoded pictures of the rows at some positions, by position; each row group is gone through once.

        Raises:
            ConfigError: if there is no such row any more, or it cannot be used.
        """
        found: dict[Any, tuple[Sequence[Picture], ...]] = {}
        # A whole number is the position of a line, which is found at once.
        for group, wanted in groupby(
            sorted(set(positions)), lambda at: at[:-1] if isinstance(at, tuple) else at
        ):
            places = list(wanted)
            before = (*group, places[0][-1] - 1) if isinstance(group, tuple) else group - 1
            rows = iter(self._rows(self._paths, before))
            for place in places:
                row = next((row for row in rows if row.position >= place), None)
                found[place] = self._media_of(row, place)
        return found

    def _media_of(self, row: Row | None, position: Any) -> tuple[Sequence[Picture], ...]:
        where = f"group {self._tools.group!r}: the state speaks of row {position} of worker {self._worker}"
        if row is None or row.position != position:
            raise ConfigError(f"{where}, which is not there; have its files changed?")
        try:
            return self._raw(row).media
        except BadSample as bad:
            raise ConfigError(
                f"{where}, {row.place}, which cannot be used now: {bad}; have its files changed?"
            ) from bad


def _reading(
    dataset: DistributedIterableDataset,
) -> tuple[Callable[[Sequence[Any], Any], Iterable[Row]], Callable[[Row], RawSample]]:
    """How the rows of one of our classes are read, and what each is before it is planned."""
    if isinstance(dataset, T2IIterableDataset):
        return dataset.rows, _raw_t2i
    if isinstance(dataset, SftJSONLIterableDataset):
        return dataset.rows, _raw_vlm
    if isinstance(dataset, UnifiedEditIterableDataset):
        return _EditRows(dataset), _raw_edit
    raise TypeError(f"{type(dataset).__name__} is none of our classes")


class _EditRows:
    """Rows of edits as plain lists; those for `parse_row` are pandas rows of a whole row group."""

    def __init__(self, dataset: UnifiedEditIterableDataset) -> None:
        self._dataset = dataset

    def __call__(self, groups: Sequence[Any], behind: Any) -> Iterator[Row]:
        for place, first, name, table in self._dataset.tables(groups, behind, EDIT_COLUMNS):
            for number in range(first, table.num_rows):
                value = {column: table[column][number].as_py() for column in table.column_names}
                yield Row((place, number), f"row {number} of {name}", value)


def _raw_t2i(row: Row) -> RawSample:
    image = EncodedImage(encoded(row.value.get("image")), upright=False)
    return _raw(row, {"captions": row.value.get("captions")}, [(image,)])


def _raw_edit(row: Row) -> RawSample:
    # What is no image, and nulls for instructions, matter where a sample comes to them: by then it has drawn.
    images = [
        EncodedImage(data if isinstance(data, bytes) else b"", upright=False)
        for data in row.value.get("image_list") or ()
    ]
    return _raw(
        row, {"instruction_list": row.value.get("instruction_list") or []}, [(image,) for image in images]
    )


def _raw_vlm(row: Row) -> RawSample:
    line, folder = row.value
    fields = parse_line(line.encode("utf-8", "surrogatepass"))
    spoken = {"conversations": fields.get("conversations")}
    if "image" in fields:
        images = [EncodedImage(read_file(folder, path), upright=False) for path in named_images(fields)]
        return _raw(row, spoken, [(image,) for image in images])
    if "video" in fields:
        return _raw(row, spoken, [open_clip(media_path(folder, fields["video"]))], is_clip=True)
    return _raw(row, spoken, [])


def _raw(
    row: Row, fields: dict[str, Any], media: Sequence[Sequence[Any]], *, is_clip: bool = False
) -> RawSample:
    return RawSample(
        key=row.place,
        url="",
        fields=fields,
        media=tuple(media),
        is_clip=(is_clip,) * len(media),
        indexes=row.position,
    )


def ready_plans(
    dataset: Iterable[dict[str, Any]],
    group: str,
    config: BagelDatasetConfig,
    generators: OwnGenerators,
    tally: Tally,
) -> Iterator[SamplePlan]:
    """The samples of a user's class as plans that are not settled; their pictures are ready.

    While it makes a sample, Pillow takes files that were cut short, as upstream has it take them.

    Args:
        dataset: gives upstream's sample dicts.
        group: name of the group.
        config: holds the sizes of patches.
        generators: that are lent to it for each sample.
        tally: of samples read, and of drops that the dataset counts itself.

    Raises:
        ConfigError: if a sample is not of upstream's form.
    """
    with generators.lent(), truncated_images_taken():
        samples = iter(dataset)
    return _ready(dataset, samples, group, config, generators, tally)


def _ready(
    dataset: object,
    samples: Iterator[dict[str, Any]],
    group: str,
    config: BagelDatasetConfig,
    generators: OwnGenerators,
    tally: Tally,
) -> Iterator[SamplePlan]:
    patch = {Kind.VIT_IMAGE: config.vit_patch_size, Kind.VAE_IMAGE: config.vae_image_downsample}
    drops, counted = Drops(group, tally, LEAST_IN_A_ROW), Counter[str]()
    for number in count():
        try:
            with generators.lent(), truncated_images_taken():
                sample = next(samples, None)
        except Exception as error:
            error.add_note(
                f"raised by {type(dataset).__name__}, which reads group {group!r}, after {number} samples"
            )
            raise
        dropped = Counter(
            dataset.dropped_by_reason if isinstance(dataset, DistributedIterableDataset) else ()
        )
        new = dropped - counted
        tally[group, "read"] += new.total() + (sample is not None)
        for reason, times in new.items():
            # A class may have words of its own.
            tally.drop(group, _REASONS.get(reason, Reason.ROW_INVALID), times)
        counted = dropped
        if sample is None:
            return
        key = f"{type(dataset).__name__}-{number}"
        try:
            plan = plan_of(sample, group, patch, key)
        except BadSample as bad:
            drops.drop(key, bad)
            continue
        drops.good()
        yield plan


def settled_plans(
    plans: Iterable[SamplePlan],
    group: str,
    config: BagelDatasetConfig,
    address: tuple[int | str, ...],
    tally: Tally,
) -> Iterator[SamplePlan]:
    """Plans with dropout and timesteps drawn, and those that no pack can hold dropped; for the default fidelity.

    Args:
        plans: of `ready_plans`.
        group: name of the group.
        config: holds rates and budgets.
        address: of the draws; the number of the sample is added to it.
        tally: of drops.

    Raises:
        NoUsableSampleError: if a thousand in a row are dropped.
    """
    rates, limits = dropout_rates(config), pack_limits(config)
    drops = Drops(group, tally, LEAST_IN_A_ROW)
    for number, plan in enumerate(plans):
        settled = settle(plan, rates, KeyedDraws(*address, number))
        if settled.length == 0:
            drops.drop(plan.key, BadSample(Reason.NO_TOKENS, "conditioning dropout left nothing"))
        elif settled.length > limits.longest_sample:
            detail = f"{settled.length} tokens; the most is {limits.longest_sample}"
            drops.drop(plan.key, BadSample(Reason.OVER_LENGTH, detail))
        else:
            drops.good()
            yield settled
