from __future__ import annotations

import pytest
import torch

from tests.tasks.detect.conftest import TWO, image
from visualtokens.errors import UserError
from visualtokens.tasks.detect.detectors import FitImages

MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)


def fit_images(short: int = 64, long: int = 96) -> FitImages:
    return FitImages(short=short, long=long, mean=MEAN, std=STD)


def test_training_images_keep_their_size_and_their_objects() -> None:
    seen, targets = fit_images().train()([image(40, 70)], [TWO])
    assert seen.image_sizes == [(40, 70)]
    assert seen.tensors.shape == (1, 3, 64, 96)
    assert targets[0]["boxes"] is TWO["boxes"]
    normalised = (image(40, 70) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(seen.tensors[0, :, :40, :70], normalised, atol=1e-6)
    assert not seen.tensors[0, :, 40:].any()
    assert not seen.tensors[0, :, :, 70:].any()


@pytest.mark.parametrize(
    ("size", "expected"),
    [((32, 40), (64, 80)), ((200, 100), (96, 48)), ((1, 2000), (1, 96)), ((1, 1), (64, 64))],
)
def test_images_to_look_at_are_fitted(size: tuple[int, int], expected: tuple[int, int]) -> None:
    seen, _ = fit_images().eval()([image(*size)])
    assert seen.image_sizes == [expected]
    assert all(side % 32 == 0 for side in seen.tensors.shape[2:])


def test_findings_go_back_to_the_size_the_image_came_with() -> None:
    found = [{"boxes": torch.tensor([[10.0, 20, 30, 40]]), "masks": torch.ones(1, 1, 28, 28)}]
    result = fit_images().eval().postprocess(found, [(64, 80)], [(32, 40)])[0]
    assert result["boxes"].tolist() == [[5, 10, 15, 20]]
    assert (result["masks"].shape, result["masks"].dtype) == ((1, 32, 40), torch.bool)
    rows, columns = torch.where(result["masks"][0])
    edges = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert (edges - result["boxes"][0]).abs().max() <= 1


def test_half_a_mask_is_pasted_where_it_belongs() -> None:
    half = torch.zeros(1, 1, 28, 28)
    half[..., 14:] = 1
    found = [{"boxes": torch.tensor([[0.0, 0, 40, 40]]), "masks": half}]
    mask = fit_images().eval().postprocess(found, [(64, 64)], [(64, 64)])[0]["masks"][0]
    assert not mask[:, :18].any()
    assert mask[2:38, 22:38].all()
    assert not mask[42:].any()


def test_impossible_sizes() -> None:
    with pytest.raises(UserError, match="short=90, long=80"):
        fit_images(90, 80)
