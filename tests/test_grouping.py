"""Groupings, and recording them from compiled, checkpointed and multi-threaded models."""

from __future__ import annotations

import copy
import threading

import pytest
import timm
import torch
from torch import Tensor, nn

from visualtokens import Grouping, Tap, record_groupings


def test_soft_size_is_the_effective_number_of_patches() -> None:
    weights = torch.zeros(1, 6, 3)
    weights[0, :, 0] = 1 / 6  # all six patches
    weights[0, 2, 1] = 1.0  # one patch
    weights[0, :2, 2] = 0.5  # two patches
    assert Grouping.soft(weights, (2, 3)).size[0].tolist() == pytest.approx([6, 1, 2])


def test_hard_groupings_agree_in_dense_and_sparse_form() -> None:
    assignment = torch.tensor([[0, 2, 2, -1, 0, 2]])
    sparse = Grouping.hard_from(assignment, 3, (2, 3))
    dense = Grouping(sparse.dense(), (2, 3), sparse.size)
    assert sparse.size.tolist() == [[2, 0, 3]]
    assert sparse.dense().tolist()[0] == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]]
    for grouping in (sparse, dense):
        assert torch.equal(grouping.hard(), assignment)
        assert grouping.maps().shape == (1, 3, 2, 3)
        assert grouping.maps()[0, 2].tolist() == [[0, 1, 1], [0, 0, 1]]


def test_grouping_without_tokens() -> None:
    unassigned = torch.full((2, 4), -1)
    for grouping in (
        Grouping.hard_from(unassigned, 0, (2, 2)),
        Grouping(torch.zeros(2, 4, 0), (2, 2), torch.zeros(2, 0)),
    ):
        assert grouping.tokens == 0
        assert grouping.dense().shape == (2, 4, 0)
        assert torch.equal(grouping.hard(), unassigned)


def test_sparse_weights_of_one_token_add_up() -> None:
    """Two weights of a patch for the same token are one weight in the dense form."""
    weights = torch.tensor([[[0.25, 0.25, 0.5]]])
    index = torch.tensor([[[1, 1, -1]]])
    dense = Grouping(weights, (1, 1), torch.ones(1, 2), index).dense()
    assert dense.tolist() == [[[0, 0.5]]]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("paca_vit_nano", num_classes=3).eval()


def image(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, x: Tensor) -> dict[str, Grouping]:
    with torch.no_grad(), record_groupings(model) as groupings:
        model(x)
    return groupings


def assert_same(a: dict[str, Grouping], b: dict[str, Grouping]) -> None:
    assert list(a) == list(b) != []
    for name in a:
        assert torch.allclose(a[name].weights, b[name].weights, atol=1e-6)


def test_recorded_weights_are_those_of_the_layer(model: nn.Module) -> None:
    block = model.stages[0].blocks[0]
    with torch.no_grad():
        tokens, grid = model.stages[0].embed(image())
        expected = block.attn.clustering(block.norm1(tokens), grid)
    groupings = recorded(model, image())
    assert list(groupings) == ["stages.0.blocks.0.attn.tap", "stages.1.blocks.0.attn.tap"]
    first = groupings["stages.0.blocks.0.attn.tap"]
    assert first.grid == grid == (16, 16)
    assert torch.allclose(first.weights, expected, atol=1e-6)


def test_recording_keeps_no_state(model: nn.Module) -> None:
    def state(module: nn.Module) -> list[tuple[str, list[str]]]:
        return [(name, sorted(vars(m))) for name, m in module.named_modules()]

    before, expected = state(model), model(image())
    inside = recorded(model, image())
    kept = dict(inside)
    assert torch.equal(model(image()), expected)
    assert state(model) == before
    model(image(1))
    assert inside == kept  # a pass after the block is not recorded


def test_only_the_given_model_is_recorded(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad(), record_groupings(model) as outer, record_groupings(other) as inner:
        model(image(0))
        other(image(1))
    assert_same(outer, recorded(model, image(0)))
    assert_same(inner, recorded(model, image(1)))


def test_detach(model: nn.Module) -> None:
    with record_groupings(model) as detached:
        model(image())
    with record_groupings(model, detach=False) as attached:
        model(image())
    assert not any(g.weights.requires_grad for g in detached.values())
    assert all(g.weights.requires_grad for g in attached.values())


def test_compiled_models_are_recorded(model: nn.Module) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = compiled(image())  # compiled before the recording
    with torch.no_grad(), record_groupings(compiled) as groupings:
        assert torch.allclose(compiled(image()), expected, atol=1e-5)
    plain = recorded(model, image())
    assert [n.removeprefix("_orig_mod.") for n in groupings] == list(plain)
    for ours, theirs in zip(groupings.values(), plain.values(), strict=True):
        assert torch.allclose(ours.weights, theirs.weights, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(compiled(image()), expected, atol=1e-6)


def test_checkpointing_records_the_forward_pass_only(model: nn.Module) -> None:
    plain = recorded(model, image())
    model.set_grad_checkpointing(True)
    model.train()
    with record_groupings(model) as groupings:
        out = model(image())
        first = dict(groupings)
        out.sum().backward()  # repeats the forward pass of each block
    assert all(groupings[name] is first[name] for name in first)
    assert_same(groupings, plain)


def test_two_threads_record_one_model(model: nn.Module) -> None:
    expected = [recorded(model, image(seed)) for seed in range(2)]
    results: list[list[dict[str, Grouping]]] = [[], []]
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        start.wait()
        for _ in range(10):
            results[seed].append(recorded(model, image(seed)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert len(results[seed]) == 10
        for groupings in results[seed]:
            assert_same(groupings, expected[seed])


def test_overlapping_recordings_of_a_compiled_model(model: nn.Module) -> None:
    """The first block to end must not re-enable compilation for the other; the second must."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    entered, left = threading.Event(), threading.Event()
    seen: dict[str, Grouping] = {}

    def work() -> None:
        with torch.no_grad(), record_groupings(compiled) as groupings:
            entered.set()
            left.wait()
            compiled(image())
        seen.update(groupings)

    thread = threading.Thread(target=work)
    with record_groupings(compiled):
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert len(seen) == 2
    torch._dynamo.utils.counters.clear()
    compiled(image())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_tap_outside_a_recording_is_the_identity() -> None:
    tap = Tap()
    weights = torch.rand(1, 4, 2)
    assert tap(weights, (2, 2)) is weights
    assert not tap.wanted()
    with record_groupings(nn.Sequential(tap)):
        assert tap.wanted()


def test_a_model_without_taps_is_an_error() -> None:
    with pytest.raises(ValueError, match="Linear has no taps"), record_groupings(nn.Linear(2, 2)):
        pass
