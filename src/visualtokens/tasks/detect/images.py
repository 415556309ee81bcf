"""What a detector does to images before it looks at them, and to its findings afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes
from torchvision.transforms.v2 import functional

from visualtokens.data.detection_sizes import fit
from visualtokens.errors import UserError

Detection = dict[str, Tensor]
THRESHOLD = 0.5  # of a mask's probability
DIVISOR = 32  # the sides of a batch are padded to multiples of it


class FitImages(GeneralizedRCNNTransform):
    """Normalises, resizes and pads images; afterwards brings boxes and masks back to the original size.

    To train, images keep the size they come with: whoever varies their size varies their objects too
    (``data.detection_sizes.Sizing``). Otherwise the short side becomes ``short``, unless the long one would
    then exceed ``long``.
    """

    def __init__(self, *, short: int, long: int, mean: Sequence[float], std: Sequence[float]) -> None:
        if not 1 <= short <= long:
            raise UserError(f"short={short}, long={long}: give sides in pixels, the short one first")
        super().__init__(short, long, list(mean), list(std), size_divisible=DIVISOR)

    def resize(self, image: Tensor, target: Detection | None = None) -> tuple[Tensor, Detection | None]:
        if self.training:
            return image, target
        size = fit((image.shape[1], image.shape[2]), short=self.min_size[0], long=self.max_size)
        return functional.resize(image, list(size), antialias=True), target

    def postprocess(
        self,
        result: list[Detection],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[Detection]:
        """Boxes ``(n, 4)`` and masks ``(n, H, W)`` bool in pixels of the image as it came."""
        if self.training:
            return result
        for found, seen, original in zip(result, image_shapes, original_image_sizes, strict=True):
            found["boxes"] = resize_boxes(found["boxes"], seen, original)
            if "masks" in found:
                found["masks"] = _paste(found["masks"], found["boxes"], original)
        return result


def _paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Probabilities ``(n, 1, 28, 28)`` inside boxes to masks ``(n, H, W)`` bool.

    One at a time: as floats, a hundred of a large photograph would take gigabytes.
    """
    pasted = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    for i in range(len(masks)):
        pasted[i] = paste_masks_in_image(masks[i : i + 1], boxes[i : i + 1], size)[0, 0] > THRESHOLD
    return pasted
