"""One packed batch: upstream's wrapper, the identity collate that makes it, and its way to the device."""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING, Any

import torch

from bagel_wds.layout import KEY_ORDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bagel_wds.pixels import PackedPixels
    from bagel_wds.state import StreamState


class PackedBatch(dict[str, Any]):
    """A packed batch as the dataset gives it: upstream's dict, and where its stream is after it.

    Attributes:
        state: what a run needs to go on after this batch; None where there is no bookmark.
        is_padding: a batch without any loss, at the end of a finite pass.
    """

    def __init__(
        self, batch: Mapping[str, Any], state: StreamState | None = None, *, is_padding: bool = False
    ) -> None:
        super().__init__(batch)
        self.state = state
        self.is_padding = is_padding

    def move(self) -> PackedBatch:
        """The same batch as a new one, which leaves this one empty.

        A generator that gave a batch refers to it until it is asked for another: where streams take turns, for long.
        """
        moved = PackedBatch(self, self.state, is_padding=self.is_padding)
        self.clear()
        return moved

    def keys(self) -> KeysView[str]:  # type: ignore[override] # of which dict's own view is one
        """The keys, as a dict has them; to ask for pixels that are still uint8 is an error."""
        return _WholeKeys(self) if "pixels" in self else super().keys()


class _WholeKeys(KeysView[str]):
    # Upstream's collates ask which keys there are, and would take a batch whose pixels travel as uint8 for one without any.
    def __contains__(self, key: object) -> bool:
        if key in _PIXEL_KEYS:
            raise RuntimeError(
                f'{key}: the pixels of this batch are still uint8 (transport="uint8"), which this collate does not know; use '
                "bagel_wds.collate_wrapper(), or leave transport out"
            )
        return super().__contains__(key)


class SimpleCustomBatch:
    """A packed batch whose keys are attributes.

    Keys that a batch lacks (images, timesteps, labels where there are none) are missing attributes too.

    With `transport="uint8"` the pixels are levels until `to` or `cuda` makes `padded_images` and `packed_vit_tokens` of
    them, on the device; asked for before, they and `to_dict` raise.

    Args:
        batch: a list with the one dict that the dataset gave.

    Attributes:
        state: where the batch's stream is after it; None where a stage keeps no bookmark.
        is_padding: a batch without any loss, at the end of a finite pass.
        use_flex: whether attention comes as `split_lens` and `attn_modes` instead of `nested_attention_masks`.
    """

    sequence_length: int
    sample_lens: list[int]
    batch_data_indexes: list[dict[str, Any]]
    packed_text_ids: torch.Tensor
    packed_text_indexes: torch.Tensor
    packed_position_ids: torch.Tensor
    nested_attention_masks: list[torch.Tensor]
    split_lens: list[int]
    attn_modes: list[str]
    padded_images: torch.Tensor
    patchified_vae_latent_shapes: list[tuple[int, int]]
    packed_latent_position_ids: torch.Tensor
    packed_vae_token_indexes: torch.Tensor
    packed_vit_tokens: torch.Tensor
    packed_vit_position_ids: torch.Tensor
    packed_vit_token_indexes: torch.Tensor
    vit_token_seqlens: torch.Tensor
    packed_timesteps: torch.Tensor
    mse_loss_indexes: torch.Tensor
    packed_label_ids: torch.Tensor
    ce_loss_indexes: torch.Tensor
    ce_loss_weights: torch.Tensor

    def __init__(self, batch: Sequence[dict[str, Any]]) -> None:
        data = dict(batch[0])
        self._pixels: PackedPixels | None = data.pop("pixels", None)
        self._keys = tuple(data)
        self.state: StreamState | None = getattr(batch[0], "state", None)
        self.is_padding: bool = getattr(batch[0], "is_padding", False)
        self.use_flex = "nested_attention_masks" not in data
        for key, value in data.items():
            setattr(self, key, value)

    def __getattr__(self, name: str) -> Any:
        # Not an AttributeError: `hasattr` would take a batch whose pixels are on their way for one without any.
        if name in _PIXEL_KEYS and self.__dict__.get("_pixels") is not None:
            raise RuntimeError(_UNFINISHED.format(what=name))
        raise AttributeError(f"this batch has no {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The batch as the dict that the dataset gave, tensors where they are now.

        Raises:
            RuntimeError: with `transport="uint8"`, before `to` or `cuda`.
        """
        if self._pixels is not None:
            raise RuntimeError(_UNFINISHED.format(what="to_dict()"))
        return {key: getattr(self, key) for key in self._keys}

    def map_values(self, kind: type[Any], change: Callable[[Any], Any]) -> SimpleCustomBatch:
        """Change each value of a kind, such as each tensor, in place; also those in lists, and those of the pixels."""
        if self._pixels is not None:
            self._pixels = self._pixels.map_values(kind, change)
        for key in self._keys:
            value = getattr(self, key)
            if isinstance(value, kind):
                setattr(self, key, change(value))
            elif isinstance(value, list):
                setattr(self, key, [change(item) if isinstance(item, kind) else item for item in value])
        return self

    def pin_memory(self) -> SimpleCustomBatch:
        """Pin every tensor, in place; without a GPU there is nothing to pin for, and nothing happens."""
        return self.map_values(torch.Tensor, torch.Tensor.pin_memory) if torch.cuda.is_available() else self

    def cuda(self, device: int | str | torch.device | None = None) -> SimpleCustomBatch:
        """Move every tensor to a GPU, or as upstream to any device that is named, in place; see `to`."""
        return self.to("cuda" if device is None else device)

    def to(self, device: int | str | torch.device) -> SimpleCustomBatch:
        """Move every tensor to a device, in place, without waiting for pinned ones; levels become floats there."""
        self.map_values(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))
        return self._finish()

    def _finish(self) -> SimpleCustomBatch:
        if self._pixels is not None:
            finished = self._pixels.finish()
            vars(self).update(finished)
            keys = {*self._keys, *finished}
            self._keys = tuple(key for key in KEY_ORDER if key in keys)
            self._pixels = None
        return self


_PIXEL_KEYS = ("padded_images", "packed_vit_tokens")
_UNFINISHED = (
    '{what}: the pixels of this batch are still uint8 (transport="uint8"); call batch.to(device) first'
)


def collate_wrapper() -> Callable[[Sequence[dict[str, Any]]], SimpleCustomBatch]:
    """The identity collate: `DataLoader(dataset, batch_size=1, collate_fn=collate_wrapper())`."""
    return bagel_packed_collate_fn


def bagel_packed_collate_fn(batch: Sequence[dict[str, Any]]) -> SimpleCustomBatch:
    """Wrap the one packed dict of a batch; it is a batch already, so use `batch_size=1`.

    Raises:
        ValueError: if more than one comes.
    """
    if len(batch) != 1:
        raise ValueError(f"{len(batch)} packs in one batch: a pack is a batch already, so set batch_size=1")
    return SimpleCustomBatch(batch)
