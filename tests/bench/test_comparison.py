"""Comparisons: exact columns, modes, untouched inputs, and the text table."""

import itertools
import json

import pytest
import torch
from torch import nn

from visualtokens.bench import Candidate, Comparison, ComparisonRow, Spread, compare, timing
from visualtokens.bench.comparison import build, collect, prepare
from visualtokens.errors import UserError


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A constant canary, so that no turn is repeated on a busy machine."""
    monkeypatch.setattr("visualtokens.bench.comparison.matmul_canary", lambda device: lambda: 1.0)


def conv(width):
    return nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width))


def run(models, **options):
    return compare(models, **(dict(size=(16, 12), batch=2, rounds=6, min_seconds=0.0, threads=1) | options))


def test_rows():
    comparison = run([Candidate("a", conv(4)), Candidate("b", conv(8))], against=[Candidate("f", torch.relu)])
    a, b, f = comparison.rows
    assert (a.name, b.name, f.name) == ("a", "b", "f")
    assert (a.parameters, b.parameters, f.parameters) == (4 * 27 + 8, 8 * 27 + 16, None)
    assert (a.macs, b.macs, f.macs) == (4 * 27 * 14 * 10, 8 * 27 * 14 * 10, None)  # of one image
    assert f.peak_bytes == 2 * 3 * 16 * 12 * 4
    assert b.peak_bytes > a.peak_bytes
    assert a.verdict is None
    assert a.ratio == Spread(1, 1, 1)
    assert b.verdict in ("faster", "slower", "same within noise")
    for row in comparison.rows:
        rate = row.images_per_second
        assert 0 < rate.low <= rate.median <= rate.high


def test_models_by_name():
    comparison = run(["paca_vit_nano"], against=["resnet18"], size=(32, 32), mode="train", rounds=1)
    ours, theirs = comparison.rows
    assert (ours.name, theirs.name) == ("paca_vit_nano", "resnet18")
    assert theirs.parameters == 11_689_512
    assert comparison.mode == "train"
    assert ours.verdict is None
    assert theirs.verdict == "too few rounds"


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@pytest.mark.slow
def test_more_models_of_one_class_than_the_recompile_limit_are_compiled():
    torch._dynamo.utils.counters.clear()
    models = [Candidate(str(factor), Scale(factor)) for factor in range(11)]
    assert len(models) > torch._dynamo.config.recompile_limit
    assert len(run(models, mode="compile", rounds=1).rows) == 11
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 11


def observer(seen):
    """A model that adds the state it runs in to ``seen``."""

    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, x):
            last = x.is_contiguous(memory_format=torch.channels_last)
            seen.add((self.training, torch.is_inference_mode_enabled(), last, torch.get_num_threads()))
            return x * self.weight

    return Observer()


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("eager", (False, True, False, 1)),
        ("channels_last", (False, True, True, 1)),
        ("train", (True, False, False, 1)),
    ],
)
def test_modes(mode, state):
    seen = set()
    images = torch.randn(2, 3, 8, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prepare(Candidate("a", observer(seen)), images, mode)()
    finally:
        torch.set_num_threads(before)
    assert seen == {state}


def test_threads_are_set_reported_and_restored():
    before = torch.get_num_threads()
    seen = set()
    comparison = run(
        [Candidate("a", lambda x: seen.add(torch.get_num_threads()))], threads=before + 1, rounds=1
    )
    assert seen == {before + 1}
    assert comparison.machine["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("mode", ["channels_last", "train"])
def test_given_models_and_the_random_state_are_unchanged(mode):
    model = conv(4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    run([Candidate("a", model)], mode=mode, rounds=1)
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.is_contiguous() for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_training_computes_and_frees_all_gradients():
    model = conv(4)
    gradients = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: gradients.append(p.shape))
    prepare(Candidate("a", model), torch.randn(2, 3, 8, 8), "train")()
    assert len(gradients) == 3
    assert all(p.grad is None for p in model.parameters())


def test_models_of_fixed_size_are_built_for_the_given_size():
    assert build("deit_tiny_patch16_224", (32, 48)).patch_embed.grid_size == (2, 3)


def test_errors():
    with pytest.raises(UserError, match="unknown model 'paca_vit_bo'; did you mean 'paca_vit_b"):
        run(["paca_vit_bo"])
    with pytest.raises(UserError, match="'resnet18' is given 2 times"):
        collect(["resnet18", "resnet18"], (8, 8))
    with pytest.raises(UserError, match="nothing to compare"):
        run([])
    with pytest.raises(UserError, match="unknown mode 'fast'"):
        run([Candidate("a", conv(4))], mode="fast")
    with pytest.raises(UserError, match="threads=0"):
        run([Candidate("a", conv(4))], threads=0)
    with pytest.raises(UserError, match="0 images"):
        run([Candidate("a", conv(4))], batch=0)
    with pytest.raises(UserError, match="'f' is a function and cannot train"):
        run([Candidate("f", torch.relu)], mode="train")


def a_comparison(**changes):
    spread = Spread(123.4, 120.0, 130.0)
    long_name = "swinv2_base_window12to16_192to256_ms_in22k_ft_in1k"
    rows = tuple(
        ComparisonRow(
            name=name,
            parameters=3_344_238,
            macs=616_947_264,
            images_per_second=spread,
            peak_bytes=123_456_789,
            ratio=Spread(1.5, 1.25, 1.75),
            verdict=verdict,
        )
        for name, verdict in [("paca_vit_b0", None), (long_name, "same within noise"), ("x", "faster")]
    )
    here = dict(cpu="Some(R) CPU", cores=2, threads=1, memory_gb=25.0, gpu=None, torch="2.15.0", device="cpu")
    fields = dict(
        rows=rows, size=(224, 320), batch=8, mode="eager", rounds=7, machine=here, tolerance=0.15,
        discarded=0, noisy=0,
    )  # fmt: skip
    return Comparison(**(fields | changes))


def test_table():
    lines = a_comparison().table().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "Some(R) CPU, 2 cores, 1 thread, torch 2.15.0"
    assert lines[1] == "8 images of 224×320, forward, eager, 7 rounds"
    header, first, name, second, third = lines[3:8]
    assert header.split() == ["model", "Mparams", "GMACs", "images/s", "peak", "MB", "speed"]
    assert first.split() == ["paca_vit_b0", "3.34", "0.617", "123.4", "±5.0", "123.5", "1", "reference"]
    assert name == "swinv2_base_window12to16_192to256_ms_in22k_ft_in1k"
    assert second.split()[-5:] == ["1.50", "(1.25–1.75)", "same", "within", "noise"]
    assert third.endswith("faster")
    assert first.index("0.617") == second.index("0.617") == third.index("0.617")
    assert lines[-1] == "speed: relative to paca_vit_b0, paired by round: median (95 % interval)."


def test_table_reports_disturbances():
    text = a_comparison(discarded=4, noisy=2, rounds=3).table()
    assert "4 turns were repeated: a matrix product timed next to them took 15% longer" in text
    assert "NEVER QUIET: 2 of 9 turns" in text
    assert "full range" in text
    assert max(map(len, text.splitlines())) <= 100
    text = a_comparison(waiting=0.8).table()
    assert "NEVER QUIET: no core was free 80% of the time" in text
    assert max(map(len, text.splitlines())) <= 100


def test_to_dict_is_ready_for_json():
    comparison = a_comparison(noisy=1)
    saved = json.loads(json.dumps(comparison.to_dict()))
    assert saved["quiet"] is False
    assert saved["size"] == [224, 320]
    assert saved["machine"]["cpu"] == "Some(R) CPU"
    assert saved["rows"][1]["ratio"] == {"median": 1.5, "low": 1.25, "high": 1.75}
    assert saved["rows"][0]["verdict"] is None


def test_a_busy_machine_is_reported(monkeypatch):
    canaries = itertools.chain([1.0] * timing.CALIBRATIONS, itertools.repeat(9.0))
    monkeypatch.setattr("visualtokens.bench.comparison.matmul_canary", lambda device: lambda: next(canaries))
    comparison = run([Candidate("a", torch.relu)], rounds=2)
    assert comparison.noisy == 2
    assert comparison.discarded > 0
    assert comparison.to_dict()["quiet"] is False
