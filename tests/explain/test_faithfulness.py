from __future__ import annotations

import json
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur as torchvision_blur

from visualtokens.data import BadImage
from visualtokens.errors import UserError
from visualtokens.explain import METHODS, Faithfulness, FaithfulnessEvaluator, Score, Setting, gather
from visualtokens.explain.faithfulness import HEADER, Mean, randomisation_check
from visualtokens.explain.foreground import find_mask, read_foreground
from visualtokens.explain.hiding import gaussian_blur
from visualtokens.explain.metrics import (
    area,
    blurred,
    curve_ends,
    deletion,
    foreground_auroc,
    insertion,
    pointing,
    rank_correlation,
    saco,
)

from .stubs import OneRegion, one_hot_maps, preprocess

SETTING = Setting(preprocess(32, 32), batch=8)
REGION = slice(8, 16), slice(16, 24)


# The metrics of one heat map.


def brightness(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3)).sigmoid()


def slow_curve(start: np.ndarray, end: np.ndarray, heat: np.ndarray, steps: int) -> list[float]:
    """The curve of ``brightness``, one pixel at a time, for heat without ties."""
    order = sorted(np.ndindex(heat.shape), key=lambda place: -heat[place])
    current, out = start.copy(), []
    changed = 0
    for step in range(steps + 1):
        while changed < math.ceil(step * len(order) / steps):
            y, x = order[changed]
            current[:, y, x] = end[:, y, x]
            changed += 1
        out.append(1 / (1 + math.exp(-current.mean())))
    return out


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (7, 3), (12, 100)])
def test_curves_against_the_slow_reference(steps: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(3, 6, 8)), dtype=torch.float32)
    heat = rng.permutation(48).reshape(6, 8).astype(np.float32)
    sizes = []

    def probability(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return brightness(images)

    got = deletion(probability, x, heat, steps=steps, batch=batch)
    assert got.tolist() == pytest.approx(slow_curve(x.numpy(), np.zeros((3, 6, 8)), heat, steps), abs=1e-5)
    assert sum(sizes) == steps + 1
    assert max(sizes) <= batch
    got = insertion(probability, x, heat, steps=steps, batch=batch)
    assert got.tolist() == pytest.approx(slow_curve(blurred(x).numpy(), x.numpy(), heat, steps), abs=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_curves_with_known_ends_are_the_same_with_fewer_images(steps: int) -> None:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(3, 6, 8)), dtype=torch.float32)
    heat = rng.normal(size=(6, 8)).astype(np.float32)
    computed = []

    def probability(images: Tensor) -> Tensor:
        computed.append(len(images))
        return brightness(images)

    for curve, ends in zip((deletion, insertion), curve_ends(brightness, x), strict=True):
        whole = curve(brightness, x, heat, steps=steps, batch=4)
        computed.clear()
        known = curve(probability, x, heat, steps=steps, batch=4, ends=ends)
        assert known.tolist() == pytest.approx(whole.tolist(), abs=1e-6)
        assert sum(computed) == steps - 1


def test_ties_are_broken_without_a_direction() -> None:
    """Of a constant map, the first half of the pixels is spread over the image."""
    images: list[Tensor] = []

    def probability(batch: Tensor) -> Tensor:
        images.append(batch)
        return brightness(batch)

    deletion(probability, torch.ones(3, 20, 20), np.zeros((20, 20)), steps=2, batch=3)
    half = images[0][1, 0]
    assert half.sum() == 200
    for part in (half[:10], half[10:], half[:, :10], half[:, 10:]):
        assert 70 < part.sum() < 130


def test_area() -> None:
    assert area(np.linspace(1, 0, 11)) == pytest.approx(0.5)
    assert area(np.array([1.0, 0.0, 0.0])) == pytest.approx(0.25)


def test_blur_keeps_the_mean_and_removes_details() -> None:
    x = torch.randn(3, 64, 48)
    assert blurred(x).shape == x.shape
    assert blurred(x).std() < 0.4 * x.std()
    assert blurred(torch.full((3, 64, 48), 0.7)).sub(0.7).abs().max() < 1e-5
    assert blurred(torch.randn(3, 2, 100)).shape == (3, 2, 100)  # lower than the kernel


def test_blur_against_the_kernel_of_both_directions() -> None:
    x = torch.randn(3, 40, 56)
    expected = torchvision_blur(x, [23, 23], [4.5, 4.5])
    torch.testing.assert_close(gaussian_blur(x, sigma=4.5, radius=11), expected, atol=2e-6, rtol=0)


def test_pointing_game() -> None:
    mask = np.array([[1, 0], [-1, 0]])
    assert pointing(np.array([[3.0, 1.0], [0.0, 2.0]]), mask) == 1
    assert pointing(np.array([[1.0, 3.0], [0.0, 2.0]]), mask) == 0
    assert pointing(np.array([[3.0, 1.0], [9.0, 2.0]]), mask) == 1  # undecided pixels are left out
    assert pointing(np.array([[3.0, 3.0], [0.0, 2.0]]), mask) == 0.5
    assert math.isnan(pointing(np.zeros((1, 1)), np.full((1, 1), -1)))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.sampled_from([-1, 0, 1])), min_size=1, max_size=12)
)
def test_auroc_against_counting_pairs(pixels: list[tuple[float, int]]) -> None:
    heat = np.array([[p[0] for p in pixels]], dtype=np.float32)
    mask = np.array([[p[1] for p in pixels]])
    front, back = heat[mask == 1], heat[mask == 0]
    got = foreground_auroc(heat, mask)
    if not len(front) or not len(back):
        assert math.isnan(got)
        return
    hotter = sum(float(f > b) + 0.5 * float(f == b) for f in front for b in back)
    assert got == pytest.approx(hotter / (len(front) * len(back)), abs=1e-9)


# Methods on images.


def one_region() -> OneRegion:
    return OneRegion(one_hot_maps(4, 4), *REGION)


def test_clusters_find_the_decisive_region_and_random_maps_do_not() -> None:
    mask = np.zeros((32, 32), dtype=np.int8)
    mask[REGION] = 1
    evaluator = FaithfulnessEvaluator(one_region(), SETTING, methods=["clusters", "random"], steps=16)
    scores = evaluator.evaluate(torch.ones(3, 32, 32), mask)
    clusters, random = scores["clusters"], scores["random"]
    assert clusters.pointing == 1
    assert clusters.auroc == pytest.approx(1, abs=0.02)
    # The region is 1/16 of the image, so the probability reaches its minimum after the first steps.
    lowest = clusters.deletion.min()
    assert area(clusters.deletion) - lowest < 0.1 * (area(random.deletion) - lowest)
    assert clusters.deletion[0] == pytest.approx(clusters.insertion[-1], abs=1e-6)  # the whole image


def test_the_predicted_class_is_evaluated_also_without_a_mask() -> None:
    """On a black image class 0 is predicted, and its probability falls as the region turns grey."""
    evaluator = FaithfulnessEvaluator(one_region(), SETTING, methods=["random"], steps=4)
    score = evaluator.evaluate(torch.full((3, 32, 32), -2.0))["random"]
    assert score.deletion[0] > 0.8
    assert score.deletion[-1] < score.deletion[0]
    assert (score.pointing, score.auroc) == (None, None)
    assert gather([{"random": score}]).rows()[0][4:] == ("–", "–")


@pytest.mark.parametrize(
    ("options", "message"), [(dict(methods=[]), "no methods"), (dict(steps=0), "steps=0")]
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FaithfulnessEvaluator(one_region(), SETTING, **options)


def test_means_and_standard_errors() -> None:
    values = [0.1, 0.4, 0.7, 0.6]
    scores = [{"clusters": Score(np.full(3, v), np.full(3, 1 - v), v, math.nan)} for v in values]
    found = gather(scores)
    means = found.means("clusters")
    assert found.images == 4
    assert means["deletion"].value == pytest.approx(np.mean(values))
    assert means["deletion"].error == pytest.approx(np.std(values, ddof=1) / 2)
    assert means["insertion"].value == pytest.approx(1 - np.mean(values))
    assert means["auroc"].images == 0
    assert [len(row) for row in found.rows()] == [len(HEADER)]
    document = json.loads(json.dumps(found.to_dict()))
    assert document["clusters"]["pointing"]["mean"] == pytest.approx(np.mean(values))
    assert document["clusters"]["insertion_curve"] == pytest.approx([1 - np.mean(values)] * 3)


def test_means_as_text() -> None:
    assert str(Mean(0.5, 0.01, 9)) == "0.500 ± 0.010"
    assert str(Mean.of([0.25])) == "0.250"
    assert str(Mean.of([])) == "–"


def test_scores_survive_json() -> None:
    before = Score(np.array([0.5, 0.25]), np.array([0.1, 0.9]), 1.0, None)
    after = Score.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after.deletion.tolist() == [0.5, 0.25]
    assert after.insertion.tolist() == [0.1, 0.9]
    assert (after.pointing, after.auroc) == (1.0, None)


def test_curves_of_every_method_are_plotted() -> None:
    rng = np.random.default_rng(0)
    found = Faithfulness({name: [Score(rng.random(9), rng.random(9))] for name in METHODS})
    for ax, which in zip(found.plot().axes, ("deletion", "insertion"), strict=True):
        assert len(ax.lines) == len(METHODS)
        for line, name in zip(ax.lines, METHODS, strict=True):
            assert line.get_ydata().tolist() == found.curve(name, which).tolist()
            assert line.get_label() == f"{name} {found.means(name)[which].value:.3f}"
        styles = {(line.get_linestyle(), line.get_marker()) for line in ax.lines}
        assert len(styles) == len(METHODS)  # distinct without colour


# Foreground masks.


def written(path: Path, values: list[list[int]]) -> Path:
    Image.fromarray(np.array(values, dtype=np.uint8)).save(path)
    return path


def test_trimaps_and_black_and_white_masks(tmp_path: Path) -> None:
    trimap = written(tmp_path / "a.png", [[1, 2], [3, 1]])
    assert read_foreground(trimap, preprocess(2, 2), (2, 2)).tolist() == [[1, 0], [-1, 1]]
    white = written(tmp_path / "b.png", [[255, 0], [0, 255]])
    assert read_foreground(white, preprocess(2, 2), (2, 2)).tolist() == [[1, 0], [0, 1]]


def test_palette_masks_are_read_by_index(tmp_path: Path) -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putdata([1, 2])
    indexed.putpalette([0, 0, 0, 200, 10, 10, 10, 200, 10])
    indexed.save(tmp_path / "a.png")
    assert read_foreground(tmp_path / "a.png", preprocess(1, 2), (2, 1)).tolist() == [[1, 0]]


def test_a_mask_is_cropped_like_its_image(tmp_path: Path) -> None:
    """The model sees the middle 4×4 of 8×4 pixels, halved."""
    path = written(tmp_path / "a.png", [[2, 2, 1, 1, 2, 2, 3, 3]] * 4)
    assert read_foreground(path, preprocess(2, 2), (8, 4)).tolist() == [[1, 0], [1, 0]]


def test_invalid_masks(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="the value 77"):
        read_foreground(written(tmp_path / "a.png", [[77, 1]]), preprocess(1, 2), (2, 1))
    with pytest.raises(BadImage, match="2×1 for an image of 3×3"):
        read_foreground(written(tmp_path / "a.png", [[2, 1]]), preprocess(1, 2), (3, 3))
    (tmp_path / "b.png").write_text("not an image")
    with pytest.raises(BadImage, match="not an image in a lossless format"):
        read_foreground(tmp_path / "b.png", preprocess(1, 2), (2, 1))


def test_masks_in_other_modes(tmp_path: Path) -> None:
    """White and black in colours or one bit, GIF files, and trimaps of 16 bits."""
    white = Image.fromarray(np.array([[255, 0]], np.uint8))
    for mode in ("RGB", "RGBA", "LA", "1"):
        white.convert(mode).save(tmp_path / f"{mode}.png")
        assert read_foreground(tmp_path / f"{mode}.png", preprocess(1, 2), (2, 1)).tolist() == [[1, 0]], mode
    white.save(tmp_path / "w.gif")
    assert read_foreground(tmp_path / "w.gif", preprocess(1, 2), (2, 1)).tolist() == [[1, 0]]
    Image.fromarray(np.array([[1, 2, 3]], np.uint16)).save(tmp_path / "deep.png")
    assert read_foreground(tmp_path / "deep.png", preprocess(1, 3), (3, 1)).tolist() == [[1, 0, -1]]


def test_files_that_are_no_masks_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would run Ghostscript for the first, allocate gigabytes for the second, wait for the third."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'called'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b""), b"IEND"]
    body = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(body))
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name, reason in {
        "eps": "not an image in a lossless format",
        "bomb": "too large",
        "pipe": "not a regular file",
        "folder": "is a folder",
    }.items():
        mask = find_mask(f"{name}.jpg", tmp_path)
        with pytest.raises(BadImage, match=reason) as caught:
            read_foreground(mask, preprocess(4, 4), (10, 10))
        assert caught.value.path == str(mask)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "called").exists()


def test_masks_are_found_by_split_class_and_name(tmp_path: Path) -> None:
    for place in ("beagle_1.png", "beagle/beagle_1.png", "val/beagle/beagle_1.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
        assert find_mask("/data/val/beagle/beagle_1.jpg", tmp_path) == tmp_path / place
    (tmp_path / "photo.1.png").touch()
    assert find_mask("photo.1.jpg", tmp_path) == tmp_path / "photo.1.png"
    with pytest.raises(UserError, match=r"cat\.jpg has no mask in .*cat\.png"):
        find_mask("/x/cat.jpg", tmp_path)


# SaCo, the randomisation check and intervals.


def slow_saco(heat: np.ndarray, drops: list[float], groups: int) -> float:
    """Wu et al. (2024), Algorithm 1, for heat without ties."""
    order = np.argsort(-heat.ravel())
    totals = [heat.ravel()[part].sum() for part in np.array_split(order, groups)]
    score = total = 0.0
    for i in range(groups - 1):
        for j in range(i + 1, groups):
            weight = totals[i] - totals[j]
            score += weight if drops[i] >= drops[j] else -weight
            total += abs(weight)
    return score / total


def test_saco_against_the_slow_reference() -> None:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(3, 6, 8)), dtype=torch.float32)
    heat = rng.permutation(48).reshape(6, 8).astype(np.float32) ** 1.5
    drops = []
    for part in np.array_split(np.argsort(-heat.ravel()), 6):
        changed = x.clone().flatten(1)
        changed[:, part] = 0
        drops.append(float(brightness(x[None]) - brightness(changed.view(1, 3, 6, 8))))
    assert saco(brightness, x, heat, groups=6, batch=4) == pytest.approx(slow_saco(heat, drops, 6), abs=1e-6)
    assert saco(brightness, x, np.zeros((6, 8)), groups=6, batch=4) == 0


def test_saco_of_perfect_and_reversed_maps() -> None:
    x = torch.arange(1.0, 37.0).view(1, 6, 6).expand(3, -1, -1)
    heat = x[0].numpy()  # the brightness falls most where the image is brightest
    assert saco(brightness, x / 100, heat, groups=6, batch=6) == 1
    assert saco(brightness, x / 100, -heat, groups=6, batch=6) == -1


def test_rank_correlation() -> None:
    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert rank_correlation(a, np.ones((2, 2))) == 0
    assert rank_correlation(a, np.array([[2.0, 1.0], [4.0, 3.0]])) == pytest.approx(0.6)


def test_randomised_weights_change_maps_that_explain_the_model() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=24, num_heads=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = [torch.randn(3, 64, 64) for _ in range(3)]
    setting = Setting(preprocess(64, 64), batch=8)
    found = randomisation_check(model, setting, images, methods=["relevance", "random"])
    assert abs(found["relevance"].value) < 0.9
    assert found["random"].value == pytest.approx(1)  # does not depend on the model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bootstrap_intervals_cover_the_mean() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(60):
        low, high = Mean.of(rng.normal(size=40).tolist()).interval
        inside += low < 0 < high
    assert 48 <= inside <= 60


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(0)
    level = rng.random(30)
    scores = [
        {name: Score(np.full(3, v + shift), np.full(3, v)) for name, shift in (("path", 0.0), ("rise", 0.1))}
        for v in level
    ]
    found = gather(scores)
    low, high = found.differences("path", "rise")["deletion"].interval
    assert (low, high) == pytest.approx((-0.1, -0.1))
    assert found.means("path")["deletion"].interval[1] > found.means("rise")["deletion"].interval[0]
