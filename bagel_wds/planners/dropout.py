"""Conditioning dropout and timesteps: the draws that settle what of a plan is in the pack, and its true length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bagel_wds.records import Kind, SamplePlan, Segment

if TYPE_CHECKING:
    from bagel_wds.rng import Draws


@dataclass(frozen=True)
class DropoutRates:
    """Probabilities of conditioning dropout, by kind of segment."""

    text: float = 0.1
    vit: float = 0.4
    vae: float = 0.1

    def of(self, kind: Kind) -> float:
        """The probability for a kind."""
        # A choice, no table: the hash of an enum is a call, and this is asked for each segment.
        return self.text if kind is Kind.TEXT else self.vit if kind is Kind.VIT_IMAGE else self.vae


def settle(plan: SamplePlan, rates: DropoutRates, draws: Draws, *, upstream: bool = False) -> SamplePlan:
    """Decide which segments conditioning dropout leaves out, and the timestep of each noised split.

    A clip is dropped whole, the VAE's frames of it by one draw and the ViT's by another. BAGEL: drops its frames one
    by one; `upstream=True` restores that.

    The timestep is a standard normal number (the model maps it to 0..1 by a sigmoid); the frames of a split share it.
    """
    settled: list[Segment] = []
    dropped, timestep = False, -math.inf
    for i, segment in enumerate(plan.segments):
        if upstream or (segment.split_start and not segment.shares_dropout):
            dropped = segment.enable_cfg and draws.random(f"dropout:{i}") < rates.of(segment.kind)
        if dropped:
            settled.append(replace(segment, dropped=True))
            continue
        if segment.kind is Kind.VAE_IMAGE and segment.loss:
            if segment.split_start:
                timestep = draws.normal(f"timestep:{i}")
            settled.append(replace(segment, timestep=timestep))
        else:
            settled.append(segment)
    return plan.with_segments(tuple(settled))
