"""The training stages of Token Pooling: soft extraction, then fine-tuning."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from visualtokens.data import open_dataset
from visualtokens.errors import UserError
from visualtokens.reduce import AS_PUBLISHED
from visualtokens.reduce.trainable import extraction_cost, extraction_pools
from visualtokens.tasks.task import Loading, open_training
from visualtokens.train import TrainConfig, load_checkpoint, train
from visualtokens.tune.search import SearchResult, finetune, search

SMALL = dict(patch_size=4, embed_dim=24, depth=3, num_heads=2)
OPTIONS = dict(epochs=2, batch=16, lr=2e-3, device="cpu", augment="none")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    arrays = {}
    for split, count in (("train", 64), ("val", 24)):
        digits = open_dataset("digits", split)  # type: ignore[arg-type]
        arrays[f"x_{split}"] = np.stack([np.asarray(digits[i][0]) for i in range(count)])
        arrays[f"y_{split}"] = np.array([digits[i][1] for i in range(count)])
    file = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(file, **arrays)
    return f"npz:{file}"


@pytest.fixture(scope="module")
def base(data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("base") / "run")
    train(
        TrainConfig(
            model="deit_tiny_patch16_224",
            data=data,
            out=out,
            size=32,
            model_args=SMALL,
            **OPTIONS,  # type: ignore[arg-type]
        )
    )
    return out


@pytest.fixture(scope="module")
def found(base: str, data: str, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(base, data=data, out=tmp_path_factory.mktemp("search"), price=0.02, options=OPTIONS)


def test_the_search_learns_to_keep_fewer_tokens(found: SearchResult) -> None:
    assert len(found.keep) == 3
    assert found.keep[0] < 64
    left = 64
    for keep, mass in zip(found.keep, found.mass, strict=True):
        left = min(left, math.ceil(mass - 1e-4))
        assert keep == left


def test_start_is_the_plain_model_with_the_weights_of_the_search(found: SearchResult) -> None:
    soft = load_checkpoint(found.soft.out).model.state_dict()
    plain = load_checkpoint(found.start)
    assert plain.config["architecture"] == "deit_tiny_patch16_224"
    assert plain.config["training"]["keep"] == list(found.keep)
    weights = plain.model.state_dict()
    assert set(soft) - set(weights) == {f"blocks.{i}.reduction.pool.slow" for i in range(3)}
    assert all(torch.equal(weights[name], soft[name]) for name in weights)


def test_the_log_shows_the_remaining_tokens(found: SearchResult) -> None:
    tokens = [record["train_tokens"] for record in found.soft.history]
    assert tokens[0] <= 3 * 64
    assert tokens[-1] < tokens[0]


def test_a_finished_search_is_not_repeated(found: SearchResult, base: str, data: str) -> None:
    out = Path(found.start).parent
    before = (out / "soft" / "model.safetensors").read_bytes()
    again = search(base, data=data, out=out, price=0.02, options=OPTIONS)
    assert again.keep == found.keep
    assert (out / "soft" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("method", ["weighted_kmedoids", "power_bert", "conv"])
def test_finetuning_saves_a_reduced_checkpoint(
    found: SearchResult, data: str, tmp_path: Path, method: str
) -> None:
    result = finetune(
        found.start, data=data, out=tmp_path, method=method, keep=found.keep, options=OPTIONS | {"epochs": 1}
    )
    model = load_checkpoint(result.out).model
    assert model.reduction.method == method
    if method != "conv":  # which only halves the grid
        assert model.reduction.schedule.tokens(64) == found.keep
    assert not model.reduction.carry
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "reduced_vit"


def test_finetuning_with_the_published_clustering_and_a_learned_scale(
    found: SearchResult, data: str, tmp_path: Path
) -> None:
    """The options of the reduction, and the trained α of each block, are saved and loaded."""
    reduction = AS_PUBLISHED | {"normalize_qk": True, "alpha": "learned"}
    result = finetune(
        found.start,
        data=data,
        out=tmp_path,
        method="weighted_kmeans",
        keep=found.keep,
        reduction=reduction,
        options=OPTIONS | {"epochs": 1},
    )
    model = load_checkpoint(result.out).model
    for name, value in reduction.items():
        assert getattr(model.reduction, name) == value
    pool = model.blocks[0].reduction.pool
    assert (pool.init, pool.iterations) == ("significance", 3)
    alphas = [block.reduction.alpha.item() for block in model.blocks]
    assert all(alpha != pytest.approx(12**0.5, abs=1e-6) for alpha in alphas)  # it starts at √D


def test_the_loss_is_that_of_the_task_plus_the_extraction_cost(base: str, data: str, tmp_path: Path) -> None:
    config = TrainConfig(
        model="reduced_vit",
        data=data,
        out=str(tmp_path),
        task="extract",
        init=base,
        size=32,
        label_smoothing=0.0,
        model_args=SMALL | {"base": "deit_tiny_patch16_224", "price": 0.01, "pace": 20.0},
        **OPTIONS,  # type: ignore[arg-type]
    )
    task = open_training(config)
    task.model.eval()
    with torch.no_grad():
        extraction_pools(task.model)[0].slow.fill_(0.25 / 20)
    batch = next(iter(task.val_loader(Loading(batch=8))))
    rng = np.random.default_rng(0)
    both = task.loss(task.model, batch, rng=rng).value
    alone = task.inner.loss(task.model, batch, rng=rng).value
    torch.testing.assert_close(both - alone, extraction_cost(task.model), rtol=1e-3, atol=1e-4)
    assert extraction_cost(task.model).item() == pytest.approx(0.01 * (16 + 2 * 64 + 3 * 64), rel=1e-4)


def test_wrong_starts_and_options_are_refused(found: SearchResult, data: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown training option 'epoch'; did you mean 'epochs'"):
        search(found.start, data=data, out=tmp_path, price=0.1, options={"epoch": 3})
    with pytest.raises(UserError, match="model='x' cannot be chosen here"):
        search(found.start, data=data, out=tmp_path, price=0.1, options={"model": "x"})
    with pytest.raises(UserError, match="is already reduced"):
        search(found.soft.out, data=data, out=tmp_path, price=0.1, options=OPTIONS)
