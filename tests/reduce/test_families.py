"""Models of transformers, open_clip and torchvision, and of timm beyond VisionTransformer and Eva."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import randn
from tests.reduce.test_blocks import Inspect
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, macs
from visualtokens.reduce.attention import Evidence
from visualtokens.reduce.encoder import first_tensor
from visualtokens.reduce.families import BlockEncoder, encoder_of
from visualtokens.reduce.methods import KEYS, SIGNIFICANCE

transformers = pytest.importorskip("transformers")
open_clip = pytest.importorskip("open_clip")

SIDE, DEPTH, DIM, PATCHES = 64, 3, 64, 16
SMALL: dict[str, Any] = dict(
    hidden_size=DIM, num_hidden_layers=DEPTH, num_attention_heads=4, intermediate_size=96, image_size=SIDE,
    patch_size=16,
)  # fmt: skip
TIMM: dict[str, Any] = dict(img_size=SIDE, depth=DEPTH, embed_dim=DIM, num_heads=4)


def hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**SMALL, **options))


def clip() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SMALL, projection_dim=8)
    text = transformers.CLIPTextConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        projection_dim=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=vision, text_config=text)
    ).vision_model


def wrapped() -> nn.Module:
    config = transformers.TimmWrapperConfig(
        architecture="deit_tiny_patch16_224", num_labels=7, do_pooling=True, model_args=TIMM
    )
    return transformers.TimmWrapperForImageClassification(config)


def tower() -> nn.Module:
    return open_clip.transformer.VisionTransformer(
        image_size=SIDE, patch_size=16, width=DIM, layers=DEPTH, heads=4, mlp_ratio=2.0, output_dim=8,
        ls_init_value=0.5,
    )  # fmt: skip


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=SIDE,
        patch_size=16,
        num_layers=DEPTH,
        num_heads=4,
        hidden_dim=DIM,
        mlp_dim=96,
        num_classes=7,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": hf("ViTForImageClassification", "ViTConfig"),
    "deit": hf("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "clip": clip,
    "clip_projection": hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=8),
    "siglip": hf("SiglipVisionModel", "SiglipVisionConfig"),
    "dinov2": hf("Dinov2ForImageClassification", "Dinov2Config"),
    "dinov2_registers": hf("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=4),
    "dinov3": hf("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2),
    "timm_wrapper": wrapped,
    "open_clip": tower,
    "torchvision": torchvision_vit,
    "beit": lambda: timm.create_model("beit_base_patch16_224", **TIMM, num_classes=7),
    "relpos": lambda: timm.create_model("vit_relpos_base_patch16_224", **TIMM, num_classes=7),
    "shared_relpos": lambda: timm.create_model("vit_srelpos_small_patch16_224", **TIMM, num_classes=7),
    "relpos_class": lambda: timm.create_model("vit_relpos_base_patch16_cls_224", **TIMM, num_classes=7),
    "sam": lambda: timm.create_model("samvit_base_patch16_224", **TIMM, num_classes=7, window_size=4),
}
every_kind = pytest.mark.parametrize("kind", MODELS)


@functools.cache
def _built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"), torch.inference_mode(False):
        model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def build(kind: str) -> nn.Module:
    return copy.deepcopy(_built(kind))


def images(batch: int = 2) -> Tensor:
    return randn(batch, 3, SIDE, SIDE, seed=1)


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    return first_tensor(model(x))


@every_kind
def test_keeping_all_tokens_changes_nothing_and_restore_is_exact(kind: str) -> None:
    model, x = build(kind), images()
    plain = run(model, x)
    for method in ("merge", "weighted_merge", "kmeans"):  # need keys, significance, nothing
        visualtokens.reduce(model, method, keep=1.0)
        # sums of 64 float32 in another order, in three blocks
        assert_close(run(model, x), plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    visualtokens.restore(model)
    assert torch.equal(run(model, x), plain)


@every_kind
@pytest.mark.parametrize("needs", [KEYS, SIGNIFICANCE])
def test_evidence_does_not_change_the_output(kind: str, needs: frozenset[Evidence]) -> None:
    model, x = build(kind), images()
    expected, shapes = run(model, x), []
    visualtokens.reduce(model, lambda place: Inspect(needs, shapes), keep=1.0, carry=False)
    assert_close(run(model, x), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    shape = (2, PATCHES)
    assert shapes == [[shape if needs == SIGNIFICANCE else None, shape if needs == KEYS else None]] * DEPTH


@every_kind
def test_reduced_model_of_every_kind(kind: str) -> None:
    model, x = build(kind), images()
    plain = run(model, x)
    names = {name for name, _ in model.named_parameters()}
    visualtokens.reduce(model, keep=[12, 6, 3])
    reduced = run(model, x)
    assert reduced.shape == plain.shape
    assert reduced.isfinite().all()
    assert not torch.allclose(reduced, plain, atol=1e-3)
    assert {name for name, _ in model.named_parameters()} == names
    with visualtokens.record_groupings(model) as groupings:
        assert torch.equal(run(model, x), reduced)
    assert [g.tokens for g in groupings.values()] == [12, 6, 3]
    assert all(g.grid == (4, 4) for g in groupings.values())
    visualtokens.restore(model)
    assert torch.equal(run(model, x), plain)


@pytest.mark.parametrize("kind", ["vit", "deit", "torchvision", "timm_wrapper"])
def test_only_prefix_tokens_attend_where_no_patch_is_kept(kind: str) -> None:
    model, x = build(kind), images()
    visualtokens.reduce(model, keep=[16, 16, 1])
    expected = run(model, x)
    visualtokens.reduce(model, keep=[16, 16, 0])
    assert_close(run(model, x), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert macs(model).total == count_macs(encoder_of(model).module, (SIDE, SIDE))


@every_kind
def test_images_of_a_batch_are_independent(kind: str) -> None:
    model, x = build(kind), images(3)
    visualtokens.reduce(model, keep=[12, 6, 3])
    together = run(model, x)
    alone = torch.cat([run(model, x[i : i + 1]) for i in range(3)])
    assert_close(alone, together, rtol=1e-4, atol=1e-5 * together.abs().max().item())


@every_kind
def test_cost_is_that_of_the_running_transformer(kind: str) -> None:
    model = build(kind)
    module = encoder_of(model).module
    for keep in (None, [12, 6, 3]):
        if keep is not None:
            visualtokens.reduce(model, "merge", keep=keep)
        counted = count_macs(module, (SIDE, SIDE))
        if kind == "sam":  # the convolutions of the neck and relative positions are not counted
            assert macs(model).total <= counted
        else:
            assert macs(model).total == counted


def test_cost_of_the_same_network_is_the_same_in_both_libraries() -> None:
    """DeiT-Ti in transformers without pooler costs what timm's costs without classifier."""
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768
    )
    with torch.device("meta"):
        theirs = transformers.ViTModel(config, add_pooling_layer=False)
        ours = timm.create_model("deit_tiny_patch16_224", num_classes=0)
    keep = "deit_small/3"
    visualtokens.reduce(theirs, "merge", keep=keep)
    visualtokens.reduce(ours, "merge", keep=keep)
    assert macs(theirs).total == macs(ours).total


def test_same_weights_give_the_same_tokens_in_timm_and_transformers() -> None:
    """The path through replaced blocks computes what the path through replaced forward passes does."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, num_labels=7)).eval()
    options = TIMM | dict(num_classes=7, mlp_ratio=1.5)
    vit: Any = timm.create_model("vit_tiny_patch16_224", **options).eval()
    theirs: Any = model.vit
    with torch.no_grad():
        theirs.embeddings.cls_token.copy_(vit.cls_token)
        theirs.embeddings.position_embeddings.copy_(vit.pos_embed)
        theirs.embeddings.patch_embeddings.projection.load_state_dict(vit.patch_embed.proj.state_dict())
        theirs.layernorm.load_state_dict(vit.norm.state_dict())
        model.classifier.load_state_dict(vit.head.state_dict())
        for layer, block in zip(theirs.layers, vit.blocks, strict=True):
            layer.layernorm_before.load_state_dict(block.norm1.state_dict())
            layer.layernorm_after.load_state_dict(block.norm2.state_dict())
            layer.mlp.load_state_dict(block.mlp.state_dict())
            layer.attention.o_proj.load_state_dict(block.attn.proj.state_dict())
            parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
            for i, part in enumerate(parts):
                part.weight.copy_(block.attn.qkv.weight[i * DIM : (i + 1) * DIM])
                part.bias.copy_(block.attn.qkv.bias[i * DIM : (i + 1) * DIM])
        for norm in (m for m in theirs.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = vit.norm.eps
    x = images()
    assert_close(run(model, x), run(vit, x), rtol=1e-5, atol=1e-5)
    for method in ("weighted_merge", "merge", "weighted_kmedoids", "power_bert"):
        keep = [12, 6, 3]
        visualtokens.reduce(model, method, keep=keep)
        visualtokens.reduce(vit, method, keep=keep)
        assert_close(run(model, x), run(vit, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "clip", "dinov2_registers", "dinov3"])
def test_hidden_states_have_all_patches(kind: str) -> None:
    model, x = build(kind), images()
    encoder = encoder_of(model)
    visualtokens.reduce(model, keep=[12, 6, 3])
    with torch.no_grad(), visualtokens.record_groupings(model) as groupings:
        states = model(x, output_hidden_states=True).hidden_states
    assert len(states) == DEPTH + 1
    for state, grouping in zip(states[1:], groupings.values(), strict=True):
        patches = state[:, encoder.prefix :]
        assert patches.shape == (2, PATCHES, DIM)
        for image, source in zip(patches, grouping.hard(), strict=True):
            assert len(image.unique(dim=0)) == grouping.tokens  # one feature for all patches of a token
            for token in range(grouping.tokens):
                assert (image[source == token] == image[source == token][0]).all()


def test_feature_maps_of_a_backbone() -> None:
    config = transformers.Dinov2Config(**SMALL, out_features=["stage1", "stage3"])
    model = transformers.Dinov2Backbone(config).eval()
    visualtokens.reduce(model, keep=[12, 6, 3])
    with torch.no_grad():
        maps = model(images()).feature_maps
    assert [tuple(m.shape) for m in maps] == [(2, DIM, 4, 4)] * 2


def test_backbone_of_a_segmenter_and_of_a_detector() -> None:
    options: dict[str, Any] = dict(img_size=SIDE, embed_dim=DIM, num_heads=4)
    segmenter = visualtokens.segment.create(
        "fpn", backbone="deit_tiny_patch16_224", classes=3, out_indices=[5, 11], backbone_args=options
    ).eval()
    x = images()
    with torch.no_grad():
        plain = segmenter(x)
        visualtokens.reduce(segmenter, macs=0.5)
        reduced = segmenter(x)
        assert reduced.shape == plain.shape
        assert not torch.allclose(reduced, plain, atol=1e-3)
        visualtokens.restore(segmenter)
        assert torch.equal(segmenter(x), plain)
    detector = visualtokens.detect.create(
        "retinanet", backbone="deit_tiny_patch16_224", classes=3, out_indices=[11],
        backbone_args=dict(dynamic_img_size=True, embed_dim=DIM, num_heads=4),
    ).eval()  # fmt: skip
    visualtokens.reduce(detector, macs=0.5)
    with torch.no_grad():
        assert set(detector([randn(3, 64, 96)])[0]) == {"boxes", "labels", "scores"}


def test_gradients_with_and_without_checkpointing() -> None:
    model = build("vit").train()
    visualtokens.reduce(model, keep=[12, 6, 3])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(0)
        first_tensor(model(images())).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == set(gradients[1])
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all()
        assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", ["vit", "open_clip", "beit"])
def test_compiles(kind: str) -> None:
    torch._dynamo.reset()
    model, x = build(kind), images()
    visualtokens.reduce(model, keep=[12, 6, 3])
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    assert_close(run(compiled, x), run(model, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["vit", "siglip", "open_clip", "relpos"])
def test_a_copy_is_reduced_as_well(kind: str) -> None:
    model, x = build(kind), images()
    visualtokens.reduce(model, keep=[12, 6, 3])
    other = copy.deepcopy(model)
    visualtokens.restore(model)
    assert not torch.allclose(run(other, x), run(model, x), atol=1e-3)
    visualtokens.restore(other)
    assert torch.equal(run(other, x), run(model, x))


@pytest.mark.parametrize("kind", ["vit", "siglip", "dinov3", "open_clip", "torchvision", "beit", "relpos"])
def test_plan_with_and_without_images(kind: str) -> None:
    model, x = build(kind), images(4)
    plan = visualtokens.plan(model, macs=0.6)
    assert plan.macs <= 0.6 * plan.full_macs
    calibrated = visualtokens.plan(model, macs=0.6, images=x)
    assert calibrated.macs <= 0.6 * calibrated.full_macs
    assert calibrated.calibrated_on == 4
    visualtokens.reduce(model, macs=0.6)
    assert macs(model).total <= 0.6 * plan.full_macs


def test_steps_of_a_pass_give_its_output() -> None:
    """What calibration does block by block is what the model does in one call."""
    for kind in ("vit", "dinov3", "open_clip", "beit", "sam"):
        model, x = build(kind), images()
        keep = (12, 6, 3)
        visualtokens.reduce(model, keep=keep)
        encoder = encoder_of(model)
        assert isinstance(encoder, BlockEncoder)
        with torch.no_grad():
            tokens, state, positions = encoder.embed(x)
            for i, k in enumerate(keep):
                tokens, state = encoder.run_block(i, tokens, state, k, positions)
            assert_close(encoder.read_out(x, tokens, state), run(model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    model, x = build("vit"), images()
    visualtokens.reduce(model, method, keep=[16, 4, 1])
    assert run(model, x).isfinite().all()


def test_dropping_methods_are_refused_where_patches_are_read() -> None:
    model = build("siglip")
    with pytest.raises(UserError, match="SiglipVisionModel reads the features of patches and cannot ignore"):
        visualtokens.reduce(model, "power_bert", keep=[12, 6, 3])
    with pytest.raises(UserError, match="keep leaves no token"):
        visualtokens.reduce(model, keep=[12, 6, 0])
    assert not encoder_of(model).reduced


def test_other_image_sizes() -> None:
    model = build("vit")
    visualtokens.reduce(model, keep=0.5)
    with torch.no_grad():
        large = model(randn(1, 3, 96, 96), interpolate_pos_encoding=True)
        assert large.logits.isfinite().all()
        with pytest.raises(UserError, match="24 patches do not form a square"):
            model(randn(1, 3, 64, 96), interpolate_pos_encoding=True)


def test_masks_are_refused() -> None:
    model = build("vit")
    visualtokens.reduce(model, keep=0.5)
    mask = torch.ones(2, PATCHES + 1, dtype=torch.bool)
    mask[:, -4:] = False
    with pytest.raises(UserError, match=r"attention masks .* refer to patches"), torch.no_grad():
        model(images(), attention_mask=mask)


def test_blocks_called_out_of_order_are_an_error() -> None:
    model = build("torchvision")
    visualtokens.reduce(model, keep=0.5)
    with pytest.raises(UserError, match="block 1 was given other features than block 0 returned"):
        encoder_of(model).blocks[1](randn(2, PATCHES + 1, DIM))


def siglip2() -> nn.Module:
    options = {k: v for k, v in SMALL.items() if k != "image_size"}
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**options, num_patches=16))


def clip_with_text() -> nn.Module:
    return transformers.Blip2Model(transformers.Blip2Config())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (siglip2, "pads images of several sizes"),
        (lambda: timm.create_model("samvit_base_patch16", depth=2), "attends within windows of 14"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "windows or on several scales"),
        (lambda: torchvision.models.swin_t(), "windows or on several scales"),
        (lambda: transformers.SwinModel(transformers.SwinConfig()), "windows or on several scales"),
        (lambda: timm.create_model("resnet18"), "not a vision transformer of a supported kind"),
        (lambda: nn.Sequential(build("vit")), "reduce the model inside"),
    ],
)
def test_refused_models(make: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(UserError, match=message):
        visualtokens.reduce(model, keep=0.5)
