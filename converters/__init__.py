"""Datasets in upstream's raw layouts to WebDataset shards.

    source ──plan──▶ slices ──an engine──▶ shards and their indexes ──▶ quarantine.jsonl, manifest.json

`convert_source` does one dataset, `convert_mixture` all those of a mixture file; `check_source` reads as they do and
writes nothing. Installed as `bagel_wds.converters`; from a checkout, `python -m converters` runs the same command as
`bagel-wds convert`.
"""

from __future__ import annotations

from .check import CheckSummary, check_source
from .convert import ConversionSummary, convert_source
from .downscale import Encoder
from .engine_ray import ClusterShare, ray_engine
from .mixture import RowRules, convert_mixture
from .quarantine import Limit
from .record import Mode
from .settings import ShardSettings

__all__ = [
    "CheckSummary",
    "ClusterShare",
    "ConversionSummary",
    "Encoder",
    "Limit",
    "Mode",
    "RowRules",
    "ShardSettings",
    "check_source",
    "convert_mixture",
    "convert_source",
    "ray_engine",
]
