"""Windows, scales, flips, and images from one pixel to thousands."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from visualtokens.data.segmentation import SegmentPreprocess
from visualtokens.errors import UserError
from visualtokens.tasks import segment
from visualtokens.tasks.segment import Inference, predict
from visualtokens.tasks.segment import inference as module
from visualtokens.tasks.segment.inference import _starts, probabilities

from ...ops.helpers import LargestTensor

PREPROCESS = SegmentPreprocess((64, 64), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class PerPixel(nn.Module):
    """Logits that depend on the pixel alone, so that windows and flips must change nothing."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, classes, 1)
        self.sizes: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append((x.shape[2], x.shape[3]))
        return self.conv(x)


class PlaceInWindow(PerPixel):
    """Logits that tell the column in what the model is shown."""

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.arange(x.shape[3], dtype=x.dtype).expand(len(x), 1, *x.shape[2:])
        return torch.cat([columns, torch.zeros_like(columns)], dim=1)


@pytest.mark.parametrize(
    ("side", "window", "stride"), [(10, 4, 3), (10, 10, 3), (11, 4, 4), (7, 20, 5), (100, 7, 7), (5, 4, 1)]
)
def test_windows_cover_the_image(side: int, window: int, stride: int) -> None:
    starts = _starts(side, window, stride)
    covered = {p for start in starts for p in range(start, min(start + window, side))}
    assert covered == set(range(side))
    assert starts[-1] == max(side - window, 0)
    assert starts == sorted(set(starts))
    assert all(b - a <= stride for a, b in pairwise(starts))


def test_windows_do_not_change_a_pixelwise_model() -> None:
    model = PerPixel()
    x = torch.randn(2, 3, 23, 41)
    (whole,) = Inference()(model, x, mirror=range(3))
    (slid,) = Inference(window=16, stride=5)(model, x, mirror=range(3))
    torch.testing.assert_close(slid, whole)
    assert set(model.sizes[1:]) == {(16, 16)}
    model.sizes.clear()
    Inference(window=30)(model, x, mirror=range(3))
    assert set(model.sizes) == {(23, 30)}  # a side that is shorter than the window is seen whole
    model.sizes.clear()
    Inference(window=41)(model, x, mirror=range(3))
    assert model.sizes == [(23, 41)]


def test_overlapping_windows_are_averaged() -> None:
    (slid,) = Inference(window=4, stride=3)(PlaceInWindow(), torch.zeros(1, 3, 4, 8), mirror=range(2))
    # Windows begin at 0, 3 and 4: column 4 is their columns 1 and 0.
    assert slid[0, 0, 0].tolist() == [0, 1, 2, 1.5, 0.5, 1.5, 2.5, 3]


def test_scales_and_flips_are_separate_views() -> None:
    model = PerPixel()
    x = torch.randn(1, 3, 20, 30)
    views = Inference(scales=(0.5, 1.0, 1.5), flip=True)(model, x, mirror=range(3))
    assert [tuple(view.shape[2:]) for view in views] == [(10, 15)] * 2 + [(20, 30)] * 2 + [(30, 45)] * 2
    for straight, mirrored in zip(views[::2], views[1::2], strict=True):
        torch.testing.assert_close(straight, mirrored)


def test_mirrored_views_swap_classes() -> None:
    views = Inference(flip=True)(PerPixel(), torch.randn(1, 3, 4, 4), mirror=[0, 2, 1])
    torch.testing.assert_close(views[1], views[0][:, [0, 2, 1]])


@pytest.mark.parametrize("strip", [1, 100, 10**9])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (40, 33), (3, 64)])
def test_strips_equal_the_whole_image(
    monkeypatch: pytest.MonkeyPatch, strip: int, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(module, "STRIP", strip)
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(4, h, w, generator=generator) for h, w in ((9, 7), (16, 3), (1, 1))]
    expected = torch.stack([F.interpolate(x[None], size, mode="bilinear")[0].softmax(0) for x in views]).mean(
        0
    )
    expected = expected.permute(1, 2, 0)  # (H, W, classes)
    parts = list(probabilities(views, size))
    assert [rows.start for rows, _ in parts] == sorted(rows.start for rows, _ in parts)
    torch.testing.assert_close(torch.cat([share for _, share in parts]), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (2000, 3), (33, 17)])
@pytest.mark.parametrize("inference", [Inference(), Inference(scales=(0.5, 1.25), flip=True, window=48)])
@pytest.mark.parametrize("head", ["fpn", "vt_fpn", "upernet"])
def test_images_of_any_size(size: tuple[int, int], inference: Inference, head: str) -> None:
    torch.manual_seed(0)
    small = dict(dim=8) if head == "upernet" else dict(dim=8, width=8)
    model = segment.create(
        head, backbone="resnet18", classes=5, backbone_args=dict(channels=(8, 8, 8, 8)), head_args=small
    ).eval()
    labels = predict(
        model,
        Image.new("RGB", size, "teal"),
        preprocess=PREPROCESS,
        classes=list("abcde"),
        inference=inference,
    )
    assert labels.shape == (size[1], size[0])
    assert labels.dtype == torch.uint8
    assert int(labels.max()) < 5


def test_memory_of_a_large_image_is_bounded() -> None:
    """2000² pixels of 60 classes are 240 million probabilities; a strip of them is enough."""
    model = PerPixel(classes=60)
    image = Image.new("RGB", (2000, 2000), "teal")
    with LargestTensor() as largest:
        labels = predict(model, image, preprocess=PREPROCESS, classes=[str(i) for i in range(60)])
    assert labels.shape == (2000, 2000)
    assert largest.numel <= max(module.STRIP, 3 * 2000 * 2000)


def test_predict_on_a_simple_picture() -> None:
    """A model that calls bright pixels 1 draws the bright half exactly, up to one smooth edge."""
    model = PerPixel(classes=2)
    with torch.no_grad():
        model.conv.weight.copy_(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand_as(model.conv.weight))
        model.conv.bias.zero_()
    image = Image.new("RGB", (100, 60), "black")
    image.paste("white", (50, 0, 100, 60))
    for inference in (Inference(), Inference(scales=(0.5, 1.0, 2.0), flip=True, window=40)):
        labels = predict(model, image, preprocess=PREPROCESS, classes=["dark", "bright"], inference=inference)
        assert labels[:, :48].max() == 0
        assert labels[:, 52:].min() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scales=()), "one or more positive"),
        (dict(scales=(1.0, 0.0)), "one or more positive"),
        (dict(window=0), "window=0"),
        (dict(stride=4), "no effect without a window"),
        (dict(window=4, stride=5), "leaves gaps"),
        (dict(window=4, stride=0), "leaves gaps"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Inference(**options)
