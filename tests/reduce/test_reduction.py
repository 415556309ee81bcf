"""``reduce`` and ``restore``: options, custom methods, errors, copies, threads, training, precision."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import visualtokens
from tests.reduce.helpers import DEPTH, DIM, build, images, quarters, run
from visualtokens.bench import count_macs
from visualtokens.errors import UserError
from visualtokens.reduce import METHODS, Place, Pool, Pooled, Seen, macs, reduce, restore
from visualtokens.reduce.families import encoder_of
from visualtokens.tune.calibration import find_thresholds, tokens_of

KEEP = [12, 7, 3]  # of 16
SIZES: dict[str, Any] = dict(img_size=64, depth=DEPTH, embed_dim=DIM, num_heads=4, num_classes=7)


def test_reduction_is_described_on_the_model() -> None:
    model: Any = build("deit")
    assert reduce(model, "kmedoids", keep=[8, 4, 0], carry=False) is model
    assert (model.reduction.method, model.reduction.carry) == ("kmedoids", False)
    assert model.reduction.schedule.tokens(16) == (8, 4, 0)
    assert restore(model) is model
    assert not hasattr(model, "reduction")
    with pytest.raises(UserError, match="not reduced"):
        restore(model)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    """Names of parameters and modules, copies, cost, the head of the features, an exact restore."""
    model, x = build("deit"), images()
    plain, names, kinds = run(model, x), list(model.state_dict()), [type(m) for m in model.modules()]
    reduce(model, method, keep=quarters(16))
    reduced = run(model, x)
    assert torch.isfinite(reduced).all()
    assert not torch.allclose(reduced, plain, atol=1e-3)
    added = [name for name in model.state_dict() if name not in names]
    assert added == ([f"blocks.{i}.reduction.pool.weight" for i in (1, 2)] if method == "conv" else [])
    assert [type(m) for m in model.modules() if not type(m).__module__.startswith("visualtokens")] == kinds
    assert macs(model).total == count_macs(model, (64, 64))
    torch.manual_seed(0)
    with torch.no_grad():
        assert_close(model.forward_head(model.forward_features(x)), reduced)
    duplicate = copy.deepcopy(model)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), x), reduced)
    restore(model)
    assert torch.equal(run(model, x), plain)
    assert list(model.state_dict()) == names
    assert torch.equal(run(duplicate, x), reduced)  # independent of the original


def test_reducing_again_replaces_the_reduction() -> None:
    model, x = build("deit"), images()
    reduce(model, "conv", keep=[4, 4, 4])
    reduce(model, "kmeans", keep=0.5)
    other = reduce(build("deit"), "kmeans", keep=0.5)
    assert torch.equal(run(other, x), run(model, x))
    assert model.state_dict().keys() == other.state_dict().keys()


def test_refused_reduction_leaves_the_model_unchanged() -> None:
    model, x = reduce(build("deit"), "merge", keep=0.5), images()
    before = run(model, x)
    with pytest.raises(UserError):
        reduce(model, "merge", keep=[1, 2])
    assert torch.equal(run(model, x), before)


class Quadrants(Pool):
    """Keeps the first quadrant of a 4×4 grid whose quadrants are equal."""

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        assignment = torch.tensor([[0, 1, 0, 1], [2, 3, 2, 3]]).repeat(2, 1).flatten()
        chosen = torch.tensor([0, 1, 4, 5]).expand(len(x), 4)
        return Pooled(chosen=chosen, assignment=assignment.expand(x.shape[:2]))


@pytest.mark.parametrize("carry", [False, True])
def test_joining_equal_tokens_is_lossless_if_sizes_are_carried(carry: bool) -> None:
    model: Any = build("deit")
    nn.init.zeros_(model.pos_embed)  # equal patches become equal tokens
    x = images()[:, :, :32, :32].repeat(1, 1, 2, 2)
    with torch.no_grad():
        plain, features = model(x), model.forward_features(x)
        reduce(model, lambda place: Quadrants(), keep=[4, 4, 4], carry=carry)
        assert torch.allclose(model(x), plain, atol=1e-5) == carry
        assert torch.allclose(model.forward_features(x), features, atol=1e-4) == carry


class Double(Pool):
    """Acts in every block and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def acts(self, n: int, k: int) -> bool:
        return True

    def forward(self, x: Tensor, k: int, seen: Seen) -> Pooled:
        same = torch.arange(x.shape[1]).expand(x.shape[:2])
        return Pooled(tokens=x * self.factor, assignment=same)


def test_custom_pool() -> None:
    model, places = build("deit").double(), []

    def make(place: Place) -> Pool:
        places.append(place)
        return Double()

    reduce(model, make, keep=KEEP, iterations=None, init="random")
    before = (16, *KEEP)
    assert places == [Place(i, DIM, 16, before[i], KEEP[i], "random") for i in range(DEPTH)]
    assert all(block.reduction.pool.factor.dtype == torch.float64 for block in model.blocks)
    model(images().double()).sum().backward()
    assert all(block.reduction.pool.factor.grad is not None for block in model.blocks)
    assert model.reduction.method == "make"


@pytest.mark.parametrize("method", ["kmeans", "weighted_kmedoids", "merge", "power_bert"])
def test_images_of_a_batch_are_independent(method: str) -> None:
    model, x = reduce(build("deit"), method, keep=KEEP), images(batch=3)
    whole = run(model, x)
    for b in range(3):
        assert_close(run(model, x[b : b + 1]), whole[b : b + 1], rtol=1e-4, atol=1e-5)


def test_threads_share_a_model() -> None:
    model = reduce(build("deit"), "weighted_kmedoids", keep=KEEP)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checks", [False, True])
def test_meta_device(method: str, checks: bool) -> None:
    model = build("deit").to("meta")
    before = visualtokens.set_checks(checks)
    try:
        out = reduce(model, method, keep=KEEP)(images().to("meta"))
    finally:
        visualtokens.set_checks(before)
    assert out.is_meta
    assert out.shape == (2, 7)


def test_repeated_reductions_leak_no_memory() -> None:
    """Every module of a reduction is collected after ``restore``, and the process does not grow."""
    code = """
import gc, os, timm, torch, visualtokens
from torch import nn

def resident():  # bytes
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def modules():
    gc.collect()
    return sum(isinstance(each, nn.Module) for each in gc.get_objects())

def reductions(count):
    for i in range(count):
        visualtokens.reduce(model, ("weighted_kmedoids", "merge", "power_bert")[i % 3], keep=[12, 7, 3])
        with torch.inference_mode():
            model(images)
        visualtokens.restore(model)

model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=3)
images = torch.randn(2, 3, 64, 64)
reductions(30)
alive, before = modules(), resident()
reductions(200)
print(modules() - alive, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    leaked, grown = map(int, done.stdout.split())
    assert leaked == 0
    assert grown < 20e6  # measured: below 3 MB; one copy of the weights for each reduction would be 1.3 GB


def test_distributed_training(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        model, x = reduce(build("deit").train(), "weighted_kmedoids", keep=KEEP), images()
        model(x).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        DistributedDataParallel(model)(x).sum().backward()
        for gradient, parameter in zip(expected, model.parameters(), strict=True):
            assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_training_with_checkpointing() -> None:
    torch._dynamo.reset()
    model = reduce(build("deit", depth=2).train(), "weighted_kmedoids", keep=KEEP[:2])
    model.set_grad_checkpointing(True)
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)):
        model.zero_grad()
        forward(images()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        assert_close(compiled, eager, rtol=1e-3, atol=1e-4 * max(1.0, eager.abs().max().item()))


@pytest.mark.slow
def test_inductor() -> None:
    torch._dynamo.reset()
    model, x = reduce(build("deit"), "weighted_kmedoids", keep=KEEP), images()
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True, dynamic=False)(x), model(x), rtol=1e-3, atol=1e-3)


def test_drop_path_and_dropout_in_training() -> None:
    model = build("deit", drop_path_rate=0.9, proj_drop_rate=0.3).train()
    reduce(model, "power_bert", keep=KEEP)
    assert not torch.equal(run(model, images(), seed=0), run(model, images(), seed=1))
    assert torch.equal(run(model, images(), seed=1), run(model, images(), seed=1))


def test_learned_alpha() -> None:
    model = build("deit").train()
    reduce(model, "weighted_kmedoids", keep=KEEP, normalize_qk=True, alpha="learned")
    names = [n for n in model.state_dict() if n.endswith("alpha")]
    assert names == [f"blocks.{i}.reduction.alpha" for i in range(DEPTH)]
    assert model.state_dict()[names[0]] == 16**0.5  # √D
    model(images()).square().sum().backward()
    assert all(block.reduction.alpha.grad.abs() > 0 for block in model.blocks)
    fixed = reduce(build("deit"), "weighted_kmedoids", keep=KEEP, normalize_qk=True, alpha=4.0)
    assert_close(run(fixed, images()), run(model.eval(), images()), rtol=1e-4, atol=1e-5)
    assert not any("alpha" in n for n in fixed.state_dict())


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


def test_low_precision() -> None:
    model, x = reduce(build("deit"), "weighted_kmeans", keep=KEEP), images()
    exact = run(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        rough = run(model, x).float()
    assert (rough - exact).abs().max() < 0.2 * exact.abs().max()
    assert torch.isfinite(run(model.bfloat16(), x.bfloat16())).all()


def test_reduce_is_also_the_package() -> None:
    """``visualtokens.reduce`` is a package that can be called."""
    model = visualtokens.reduce(build("deit"), "merge", keep=KEEP)
    assert visualtokens.reduce.macs(model) == macs(model)


def test_threshold_keeps_what_an_image_needs() -> None:
    """An image of one colour needs fewer tokens than noise; a batch gets as many as the neediest image."""
    model = build("deit")
    flat, noise = torch.full((1, 3, 64, 64), 0.3), images("deit", 1)
    visualtokens.reduce(model, threshold=0.3)
    encoder = encoder_of(model)
    with torch.no_grad():
        few, many = tokens_of(encoder, flat), tokens_of(encoder, noise)
        both = tokens_of(encoder, torch.cat((flat, noise)))
        alone = model(noise)
    assert all(a <= b for a, b in zip(few, many, strict=True))
    assert few[0] < many[0]
    assert both[0] == many[0]
    counts = []
    for threshold in (1e-6, 0.1, 0.3, 1.0, 100.0):
        visualtokens.reduce(model, threshold=threshold)
        with torch.no_grad():
            counts.append(tokens_of(encoder, noise))
    assert counts[0] == (16, 16, 0)  # nothing is below the threshold; the last block keeps no patch
    assert all(a >= b for first, second in pairwise(counts) for a, b in zip(first, second, strict=True))
    assert counts[-1][0] == 1  # a sixteenth of the patches stays
    visualtokens.reduce(model, threshold=0.3)
    args: dict[str, Any] = model.reduction.model_args()  # type: ignore[union-attr,operator]
    again = timm.create_model("reduced_vit", base="deit_tiny_patch16_224", **args, **SIZES).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_close(again(noise), alone)
    with pytest.raises(UserError, match="with a threshold the tokens depend on the image"):
        macs(again)


def test_threshold_for_a_budget() -> None:
    model, x = build("deit"), images("deit", 3)
    threshold = find_thresholds(model, x, macs=0.7)
    full = macs(model).total
    visualtokens.reduce(model, threshold=threshold)
    encoder = encoder_of(model)
    with torch.no_grad():
        costs = [macs(model, keep=tokens_of(encoder, image)).total for image in x.split(1)]
    assert 0.6 < sum(costs) / len(costs) / full < 0.75  # 16 patches come in large steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(threshold=0.1, keep=0.5), "one per block, and neither keep nor a budget"),
        (dict(threshold=0), "threshold=0 decides"),
        (dict(threshold=[0.1, 0.2]), "or 3, one per block"),
        (dict(threshold=0.1, method="merge"), "merge has no threshold"),
    ],
)
def test_wrong_thresholds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        visualtokens.reduce(build("deit"), **options)
