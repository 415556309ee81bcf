from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.explain import explain
from visualtokens.explain.hiding import Filler, inpaint, make_game, pixel_labels
from visualtokens.explain.inputs import class_score

from .stubs import MEAN, STD, OneRegion, one_hot_maps, preprocess

BLACK = -torch.tensor(MEAN).view(3, 1, 1) / torch.tensor(STD).view(3, 1, 1)
LABELS = np.array([[0, 0, 1, 1], [0, 2, 2, 1], [3, 3, 2, 2]])


def vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    tiny = dict(img_size=(48, 64), depth=2, embed_dim=24, num_heads=3, num_classes=5)
    return timm.create_model("vit_tiny_patch16_224", **tiny | options).eval()


@pytest.mark.parametrize("hide", ["mean", "black", "blur", "inpaint"])
def test_shown_pixels_are_kept_and_hidden_ones_replaced(hide: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 24, 32)
    shown = torch.from_numpy(np.array([[True, False, True, False], [False] * 4, [True] * 4]))
    mask = shown[:, pixel_labels(LABELS, (24, 32))].unsqueeze(1)  # (3, 1, H, W)
    images = Filler(x, hide, BLACK)(mask)
    for image, one in zip(images, mask.expand(-1, 3, -1, -1), strict=True):
        assert torch.equal(image[one], x[one])
    hidden = images[0][~mask[0].expand(3, -1, -1)]
    if hide in ("mean", "black"):
        expected = (BLACK if hide == "black" else torch.zeros(3, 1, 1)).expand(3, 24, 32)
        assert torch.equal(hidden, expected[~mask[0].expand(3, -1, -1)])
    else:
        assert hidden.std() < 0.5 * x.std()
        assert hidden.abs().max() > 0
    assert torch.equal(images[2], x)


def test_inpainting_continues_what_surrounds_the_hole() -> None:
    columns = torch.linspace(-1, 1, 32).expand(3, 32, 32)
    shown = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    shown[:, :, 12:20, 12:20] = False
    filled = inpaint(columns, shown)[0]
    assert (filled - columns).abs().max() < 0.25  # of a range of 2; the mean colour is off by up to 0.23 here
    constant = inpaint(torch.full((3, 17, 30), 0.7), shown[:, :, :17, :30])
    assert torch.allclose(constant, torch.tensor(0.7))
    nothing = inpaint(columns, torch.zeros_like(shown))
    assert nothing.abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"reg_tokens": 2}])
def test_removed_tokens_against_a_forward_pass_by_hand(options: dict) -> None:
    model = vit(**options)
    x = torch.randn(3, 48, 64)
    score = class_score(model, 3, against=None, unit="probability")
    game = make_game(model, x, LABELS, score, hide="tokens", black=BLACK, batch=2)
    coalitions = np.array([[1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]], dtype=bool)
    with torch.no_grad():
        got = game(coalitions)
        for one, value in zip(coalitions, got, strict=True):
            tokens = model._pos_embed(model.patch_embed(x[None]))
            prefix = model.num_prefix_tokens
            kept = torch.from_numpy(one[LABELS.ravel()])
            tokens = torch.cat((tokens[:, :prefix], tokens[:, prefix:][:, kept]), dim=1)
            for block in model.blocks:
                tokens = block(tokens)
            assert value == pytest.approx(
                model.forward_head(model.norm(tokens)).softmax(1)[0, 3].item(), abs=1e-6
            )
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert np.isfinite(game(np.zeros((1, 4), dtype=bool))).all()


def test_removed_tokens_take_their_rotary_positions_along() -> None:
    torch.manual_seed(0)
    options = dict(img_size=32, patch_size=16, depth=2, embed_dim=24, num_heads=2, num_classes=5)
    model = timm.create_model("eva02_tiny_patch14_224", **options).eval()
    x, labels = torch.randn(3, 32, 32), np.arange(4).reshape(2, 2)
    score = class_score(model, 1, against=None, unit="log-odds")
    game = make_game(model, x, labels, score, hide="tokens", black=BLACK, batch=1)
    seen: list[tuple[int, int]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append((args[0].shape[1], kwargs["rope"].shape[-2]))

    with torch.no_grad():
        game(np.array([[True, False, True, True]]))
        handle = model.blocks[1].register_forward_pre_hook(note, with_kwargs=True)
        game(np.array([[True, False, True, False]]))
        handle.remove()
        everything, plain = game(np.ones((1, 4), dtype=bool)), score(x[None])
    assert everything[0] == pytest.approx(plain.item(), abs=1e-5)
    assert seen in ([(3, 2)], [(3, 4)])  # before or after the positions were selected, by the order of hooks


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(timm.create_model, "resnet18"), "needs a vision transformer"),
        (lambda: visualtokens.reduce(vit(), "merge", keep=[6, 4]), "already merges"),
        (partial(timm.create_model, "beit_base_patch16_224", depth=1), "relative positions"),
    ],
)
def test_tokens_cannot_be_removed_from_every_model(build: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_game(build(), torch.zeros(3, 48, 64), LABELS, lambda x: x, hide="tokens", black=BLACK, batch=1)


@pytest.mark.parametrize("method", ["shapley", "greedy", "gradient"])
def test_every_method_finds_the_decisive_region(method: str) -> None:
    torch.manual_seed(0)

    class Convolution(OneRegion):
        def __init__(self) -> None:
            super().__init__(one_hot_maps(4, 4), slice(8, 16), slice(16, 24))
            self.conv = nn.Conv2d(3, 3, 8, 8, groups=3, bias=False)
            nn.init.constant_(self.conv.weight, 1 / 64)

        def score(self, pixels: Tensor) -> Tensor:
            return 8 * self.conv(pixels)[:, :, 1, 2].mean(1) - 2

    got = explain(
        Convolution(), torch.ones(3, 32, 32), method=method, preprocess=preprocess(32, 32), budget=64
    )
    decisive = got.regions[1, 2]
    assert got.order[0] == got.top[0] == decisive
    assert got.patch_saliency().argmax() == 1 * 4 + 2
    row, column = divmod(int(got.saliency().argmax()), 32)
    assert (row // 8, column // 8) == (1, 2)
    assert decisive in got.only.kept
    assert decisive not in got.without.kept
    assert got.only.score > got.without.score
    if method != "gradient":
        assert got.values.sum() == pytest.approx(got.full - got.empty, abs=1e-6)
        assert np.delete(np.abs(got.values), decisive).max() < 1e-6


@pytest.mark.parametrize("unit", ["probability", "log-odds"])
def test_why_this_class_and_not_that(unit: str) -> None:
    model, x = vit(), torch.randn(3, 48, 64)
    with torch.no_grad():
        logits = model(torch.stack((x, torch.zeros_like(x))))
    p = logits.softmax(1)
    difference = p[:, 1] - p[:, 2] if unit == "probability" else logits[:, 1] - logits[:, 2]
    options = dict(preprocess=preprocess(48, 64), regions=LABELS, budget=16, path=0)
    got = explain(model, x, method="shapley", target=1, against=2, unit=unit, **options)
    opposite = explain(model, x, method="shapley", target=2, against=1, unit=unit, **options)
    assert (got.full, got.empty) == pytest.approx(difference.tolist(), abs=1e-5)
    assert got.values.tolist() == pytest.approx((-opposite.values).tolist(), abs=1e-6)
    assert got.errors is None  # all 16 coalitions
    assert got.evaluations == 16
