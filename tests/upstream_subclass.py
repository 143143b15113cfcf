"""A dataset class as a user of upstream has written it; nothing in it knows of this project."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image

import bagel_wds

GROUP = "my_edits"


def make_class(package: Any) -> type[Any]:
    """The class over upstream's package, or over this one: the same lines."""

    class MyEdits(package.InterleavedBaseIterableDataset, package.ParquetStandardIterableDataset):  # type: ignore[misc]
        """Shows a row's first image, says one thing, and asks for its last; now and then a clip of all of them."""

        __qualname__ = "MyEdits"

        def parse_row(self, row: Any) -> dict[str, Any]:
            if row["number"] % 10 == 1:
                return {}
            images = [package.pil_img2rgb(Image.open(io.BytesIO(data))) for data in row["image_list"]]
            data = self._init_data()
            data = self._add_image(data, images[0], need_loss=False, need_vae=True, need_vit=True)
            said = random.choice(row["instruction_list"][0])
            data = self._add_text(data, said, need_loss=random.random() < 0.5, enable_cfg=False)
            if len(images) > 2:
                frames = [images[1]] * 3
                data = self._add_video(data, frames, [0, 2, 5], need_loss=False, need_vae=True)
            data = self._add_image(data, images[-1], need_loss=True, need_vae=False, need_vit=False)
            return dict(data)

    return MyEdits


MyEdits: Any = make_class(bagel_wds)
