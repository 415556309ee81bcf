"""What reduce and restore promise beyond the kinds of models: options, refusals, threads, wrappers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, Place, Pool, Pooled, Seen, forward_tokens

from .helpers import DEPTH, build, images, run

reduce, restore = visualtokens.reduce, visualtokens.restore


def test_it_changes_the_model_in_place_and_says_how() -> None:
    model: Any = build("deit")
    assert reduce(model, "kmedoids", keep=[8, 4, 0], carry=False) is model
    assert (model.reduction.method, model.reduction.carry) == ("kmedoids", False)
    assert model.reduction.schedule.tokens(16) == (8, 4, 0)
    assert restore(model) is model
    assert not hasattr(model, "reduction")
    with pytest.raises(UserError, match="not reduced"):
        restore(model)


def test_reducing_anew_replaces_the_reduction() -> None:
    model, x = build("deit"), images()
    reduce(model, "conv", keep=[4, 4, 4])
    reduce(model, "kmeans", keep=0.5)
    again = run(model, x)
    other = build("deit")
    assert torch.equal(run(reduce(other, "kmeans", keep=0.5), x), again)
    assert model.state_dict().keys() == other.state_dict().keys()


def test_a_refused_reduction_leaves_the_model_as_it_was() -> None:
    model, x = build("deit"), images()
    reduce(model, "merge", keep=0.5)
    before = run(model, x)
    with pytest.raises(UserError):
        reduce(model, "merge", keep=[1, 2])
    assert torch.equal(run(model, x), before)


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_only_the_class_token_is_left_where_k_is_0(method: Any, carry: bool) -> None:
    model, x = build("deit"), images()
    reduce(model, method, keep=[9, 0, 0], carry=carry)
    tokens = forward_tokens(model, x)
    assert tokens.prefix.shape == (2, 1, 192)
    assert tokens.tokens.shape[1] == (1 if method == "conv" else 0)  # a convolution leaves at least one
    assert torch.isfinite(run(model, x)).all()


class Quarters(Pool):
    """Of a 4×4 grid whose quarters are equal, keeps the first."""

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        quarter = torch.tensor([[0, 1, 0, 1], [2, 3, 2, 3]]).repeat(2, 1).flatten()
        chosen = torch.tensor([0, 1, 4, 5]).expand(len(x), 4)
        return Pooled(chosen=chosen, assignment=quarter.expand(x.shape[:2]))


@pytest.mark.parametrize("carry", [False, True])
def test_joining_equal_tokens_loses_nothing_if_it_is_carried(carry: bool) -> None:
    model: Any = build("deit")
    nn.init.zeros_(model.pos_embed)  # so that equal patches are equal tokens
    x = images()[:, :, :32, :32].repeat(1, 1, 2, 2)
    with torch.no_grad():
        plain, features = model(x), model.forward_features(x)
        reduce(model, lambda place: Quarters(), keep=[4, 4, 4], carry=carry)
        assert torch.allclose(model(x), plain, atol=1e-5) == carry
        assert torch.allclose(model.forward_features(x), features, atol=1e-4) == carry


@pytest.mark.parametrize("method", ["kmeans", "weighted_kmedoids", "merge", "power_bert"])
def test_images_of_a_batch_are_reduced_each_for_itself(method: Any) -> None:
    model, x = build("deit"), images(batch=4)
    reduce(model, method, keep=[12, 7, 3])
    whole = run(model, x)
    for b in range(4):
        assert torch.allclose(run(model, x[b : b + 1]), whole[b : b + 1], atol=1e-5)


def test_threads_do_not_disturb_each_other() -> None:
    model = build("deit")
    reduce(model, "weighted_kmedoids", keep=[12, 7, 3])
    inputs = [images(seed=s) for s in range(4)]
    expected = [run(model, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(8):
                if not torch.equal(model(inputs[i]), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_distributed_training(tmp_path: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        model = build("deit").train()
        reduce(model, "weighted_kmedoids", keep=[12, 7, 3])
        x = images()
        model(x).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        DistributedDataParallel(model)(x).sum().backward()
        assert all(
            torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(expected, model.parameters(), strict=True)
        )
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_training_with_checkpoints() -> None:
    torch._dynamo.reset()
    model = build("deit").train()
    reduce(model, "weighted_kmedoids", keep=[12, 7, 3])
    model.set_grad_checkpointing(True)
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)):
        model.zero_grad()
        forward(images()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients, strict=True))


def test_inductor() -> None:
    torch._dynamo.reset()
    model, x = build("deit"), images()
    reduce(model, "weighted_kmedoids", keep=[12, 7, 3])
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=False)(x)
        assert torch.allclose(compiled, model(x), atol=1e-3)


def test_drop_path_and_dropout_stay_in_training() -> None:
    model = build("deit", drop_path_rate=0.9, proj_drop_rate=0.3).train()
    reduce(model, "power_bert", keep=[12, 7, 3])
    assert not torch.equal(run(model, images(), seed=0), run(model, images(), seed=1))
    assert torch.equal(run(model, images(), seed=1), run(model, images(), seed=1))


def test_learned_alpha() -> None:
    model = build("deit").train()
    reduce(model, "weighted_kmedoids", keep=[12, 7, 3], normalize_qk=True, alpha="learned")
    names = [n for n in model.state_dict() if n.endswith("alpha")]
    assert names == [f"blocks.{i}.reduction.alpha" for i in range(DEPTH)]
    assert model.state_dict()[names[0]] == 64**0.5
    model(images()).square().sum().backward()
    assert all(block.reduction.alpha.grad.abs() > 0 for block in model.blocks)
    fixed = build("deit")
    reduce(fixed, "weighted_kmedoids", keep=[12, 7, 3], normalize_qk=True, alpha=8.0)
    assert torch.allclose(run(fixed, images()), run(model.eval(), images()), atol=1e-5)
    assert not any("alpha" in n for n in fixed.state_dict())


class Double(Pool):
    """A pool of somebody's own: acts everywhere and learns."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def acts(self, n: int, k: int) -> bool:
        return True

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        same = torch.arange(x.shape[1]).expand(x.shape[:2])
        return Pooled(tokens=x * self.factor, assignment=same)


def test_a_pool_of_your_own() -> None:
    model, places = build("deit"), []

    def make(place: Place) -> Pool:
        places.append(place)
        return Double()

    reduce(model, make, keep=1.0)
    assert places == [Place(i, 192, 16) for i in range(DEPTH)]
    run_with_grad = model(images()).sum()
    run_with_grad.backward()
    assert all(block.reduction.pool.factor.grad is not None for block in model.blocks)
    assert model.reduction.method == "make"


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (50, 70)])
def test_images_of_other_sizes(size: tuple[int, int]) -> None:
    model = timm.create_model("deit_e252", depth=3, num_classes=5).eval()
    x = torch.randn(2, 3, *size)
    grid = -(-size[0] // 16), -(-size[1] // 16)
    reduce(model, "kmedoids", keep=0.3)
    with visualtokens.record_groupings(model) as groupings, torch.no_grad():
        model(x)
    last = groupings["blocks.2.reduction.tap"]
    assert last.grid == grid
    assert last.tokens == -(-3 * grid[0] * grid[1] // 10)
    reduce(model, "conv", keep=[49, 49, 16])
    with torch.no_grad():
        assert model(x).shape == (2, 5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: timm.create_model("resnet18"), "ResNet: it is not one of"),
        (lambda: timm.create_model("beit_base_patch16_224", depth=1), "Beit: it is not one of"),
        (lambda: nn.Sequential(build("deit")), "reduce what it wraps"),
        (lambda: build("deit", patch_drop_rate=0.1), "patch_drop_rate=0"),
        (lambda: build("deit", attn_layer="diff"), "DiffAttention of block 0 subtracts"),
        (
            lambda: timm.models.VisionTransformer(
                depth=1, block_fn=timm.models.vision_transformer.ParallelScalingBlock
            ),
            "ParallelScalingBlock of block 0 runs attention and MLP side by side",
        ),
        (lambda: Changed(depth=1), "changes VisionTransformer.forward_features"),
    ],
)
def test_what_cannot_be_reduced_is_refused_with_the_reason(model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        reduce(model(), "merge", keep=0.5)


class Changed(timm.models.VisionTransformer):
    def forward_features(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward_features(x, **options) * 2


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("deit", {"method": "kmedoid"}, "did you mean 'kmedoids'"),
        ("deit", {"init": "best"}, "unknown init"),
        ("deit", {"iterations": -1}, "give 0 or more"),
        ("deit", {"method": "merge", "iterations": 2}, "merge does not iterate"),
        ("deit", {"alpha": 2.0}, "normalize_qk=True"),
        ("deit", {"alpha": "free", "normalize_qk": True}, "'learned'"),
        ("gap", {"keep": [1, 1, 0]}, "keep at least 1"),
        ("siglip", {"keep": [1, 1, 0]}, "keep at least 1"),
    ],
)
def test_wrong_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    given = {"method": "kmedoids", "keep": 0.5} | options
    with pytest.raises(UserError, match=message):
        reduce(build(kind), given.pop("method"), **given)


def test_masks_are_refused() -> None:
    model = build("deit")
    reduce(model, "merge", keep=0.5)
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(UserError, match="restore it first"):
            call(images(), is_causal=True)


def test_low_precision() -> None:
    model, x = build("deit"), images()
    reduce(model, "weighted_kmeans", keep=[12, 7, 3])
    exact = run(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = run(model, x).float()
    assert (rough - exact).abs().max() < 0.2 * exact.abs().max()
    assert torch.isfinite(run(model.bfloat16(), x.bfloat16())).all()
