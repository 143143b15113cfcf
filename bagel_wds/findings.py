"""What a verification finds: of one thing, of a shard, of a dataset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class What(StrEnum):
    """What a finding is about."""

    MISSING = "missing"
    """The shard is not there."""
    UNREADABLE = "unreadable"
    """The shard is there and its disk does not give it."""
    SIZE = "size"
    """The shard has another size than the manifest says."""
    CHECKSUM = "checksum"
    """The shard holds other bytes than those that were written."""
    TAR = "tar"
    """The tar is broken or cut short, or something lies behind its last sample."""
    SAMPLE = "sample"
    """A sample is not as the shard format has it: its JSON first, with our header, then the media that this names."""
    SAMPLES = "samples"
    """The shard holds another number of samples than the manifest says."""
    INDEX = "index"
    """The index is not there, cannot be read, or says something else than the tar."""
    KEYS = "keys"
    """Two samples of the dataset have one key."""
    COUNTS = "counts"
    """The counts of the manifest do not add up."""
    QUARANTINE = "quarantine"
    """The list of rows left out is not there, cannot be read, or does not agree with the manifest's counts."""
    STRAY = "stray"
    """Tars in the folder that the manifest does not name: nobody reads them."""
    UNFINISHED = "unfinished"
    """Files of a conversion that did not end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        shard: its URL as the manifest has it, or the name of the sidecar.
        what: about what.
        detail: what is wrong, with the place and the values: that of the first such thing in the shard, and how many more
            there are.
    """

    shard: str
    what: What
    detail: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.what}: {self.detail}"


@dataclass(frozen=True, slots=True)
class ShardFindings:
    """What was found in one shard.

    Attributes:
        shard: its URL as the manifest has it.
        findings: one for each kind of thing that is wrong.
        num_samples: that were met.
        num_bytes: that were read.
        kinds: of the samples.
        key_digests: of each key in order, 8 bytes.
    """

    shard: str
    findings: tuple[Finding, ...]
    num_samples: int
    num_bytes: int
    kinds: frozenset[str]
    key_digests: bytes = field(repr=False)


@dataclass(frozen=True)
class Findings:
    """What was found in a dataset.

    Attributes:
        manifest: its URL.
        faults: what is wrong: shards in the order of the manifest, then the dataset as a whole.
        notes: what is no fault, and somebody should know.
        num_shards: that the manifest names.
        num_samples: that were met in them.
        num_bytes: that were read.
    """

    manifest: str
    faults: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    num_shards: int
    num_samples: int
    num_bytes: int

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


class FindingLog:
    """What is wrong with one shard: the first of each kind, and how many there are."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._first: dict[What, str] = {}
        self._counts: Counter[What] = Counter()

    def add(self, what: What, detail: str) -> None:
        """Put down one more thing."""
        self._first.setdefault(what, detail)
        self._counts[what] += 1

    def findings(self) -> tuple[Finding, ...]:
        """One for each kind, in the order in which they were met."""
        return tuple(
            Finding(self._shard, what, detail + self._how_many_more(what))
            for what, detail in self._first.items()
        )

    def _how_many_more(self, what: What) -> str:
        more = self._counts[what] - 1
        return f"; and {more} more" if more else ""
