"""Polygons and run lengths of COCO to pixels and back, by the library that also judges detections."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from visualtokens.errors import UserError


def to_mask(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    """The pixels ``(H, W)`` inside polygons, or those that run lengths give. ValueError if they are none."""
    library = masks_library()
    try:
        return library.decode(library.segmToRle(segmentation, width, height)).astype(np.bool_)
    except RuntimeError as error:  # of the conversion to C++
        raise ValueError("neither polygons nor run lengths") from error


def to_run_lengths(mask: NDArray[np.bool_]) -> dict[str, Any]:
    """The pixels ``(H, W)`` as COCO's compressed run lengths."""
    return masks_library().encode(np.asfortranarray(mask.astype(np.uint8)))


def masks_library() -> Any:
    """The mask operations of faster-coco-eval."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise UserError(
            "COCO's masks and figures need a library; install it with: pip install 'visualtokens[detect]'"
        ) from error
    return mask
