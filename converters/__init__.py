"""Datasets in upstream's raw layouts to WebDataset shards.

    source ──plan──▶ slices ──a pool of processes──▶ shards and their indexes ──▶ quarantine.jsonl, manifest.json

`convert_source` does one dataset, `convert_mixture` all those of a mixture file. Installed as `bagel_wds.converters`;
from a checkout, `python -m converters` runs the same command as `bagel-wds convert`.
"""

from __future__ import annotations

from .convert import ConversionSummary, convert_source
from .mixture import convert_mixture
from .settings import ShardSettings

__all__ = ["ConversionSummary", "ShardSettings", "convert_mixture", "convert_source"]
