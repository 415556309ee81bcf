"""Peak memory against known sizes, with SLACK for scalars that torch allocates, and the machine."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from visualtokens.bench.memory import _field, machine, peak_memory, replay
from visualtokens.errors import UserError

MEGA = 1_000_000
SLACK = 4096


@pytest.fixture
def x():
    return torch.randn(1000, 250)  # 1 MB


def assert_peak(run, expected):
    run()
    assert expected <= peak_memory(run) <= expected + SLACK


def test_outputs_count_and_inputs_do_not(x):
    assert_peak(lambda: x + 1, MEGA)
    assert_peak(lambda: torch.cat([x, x, x]), 3 * MEGA)


def test_in_place_operations_allocate_nothing(x):
    assert_peak(lambda: x.add_(1), 0)


def test_released_intermediates_do_not_add_up(x):
    def chain():
        y = x
        for _ in range(10):
            y = y + 1  # both are alive until the assignment
        return y

    assert_peak(chain, 2 * MEGA)


def test_kept_intermediates_add_up(x):
    def keep():
        kept = [x]
        for _ in range(10):
            kept.append(kept[-1] + 1)
        return kept[-1]

    assert_peak(keep, 10 * MEGA)


def test_a_peak_during_the_run(x):
    def bulge():
        small = x + 1
        big = torch.cat([small] * 5)
        total = big.sum()
        del big
        return small + total

    assert_peak(bulge, 6 * MEGA)


def test_views_are_free(x):
    assert_peak(lambda: x.view(500, 500).T[:100], 0)


def test_temporaries_inside_an_operation_count(x):
    """A sort along the first dimension copies its input; its outputs are values and int64 indices."""
    run = lambda: x.sort(dim=0)  # noqa: E731
    run()
    assert peak_memory(run) > 3 * MEGA + SLACK


def test_fused_attention_needs_no_square_matrix():
    q = torch.randn(1, 1, 2048, 16)
    square = 2048 * 2048 * 4
    with torch.inference_mode():
        assert peak_memory(lambda: torch.softmax(q @ q.mT, -1) @ q) >= 2 * square
        buffers = peak_memory(lambda: F.scaled_dot_product_attention(q, q, q)) - q.nbytes
    assert 0 < buffers < square / 2


def test_releases_of_earlier_memory_are_ignored(x):
    old = [torch.randn(1000, 2500)]  # 10 MB

    def replace():
        old.clear()
        return x + 1

    assert MEGA <= peak_memory(replace) <= MEGA + SLACK


def test_training_counts_activations_and_gradients():
    layers = nn.Sequential(*[nn.Linear(250, 250, bias=False) for _ in range(4)])
    x = torch.randn(1000, 250)

    def train():
        layers(x).sum().backward()
        layers.zero_grad()

    with torch.no_grad():
        assert_peak(lambda: layers(x), 2 * MEGA)
    train()
    # The four outputs are kept for backward; the gradients of the weights are 0.25 MB each.
    assert 4 * MEGA <= peak_memory(train) <= 7 * MEGA


def test_an_error_is_raised_and_the_next_run_works(x):
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        peak_memory(fail)
    assert_peak(lambda: x + 1, MEGA)


def test_only_the_log_of_the_profiler_is_dropped(x, capfd):
    def run():
        sys.stderr.write("a warning\n")
        return x + 1

    peak_memory(run)
    assert capfd.readouterr().err == "a warning\n"


def test_replay():
    assert replay([]) == 0
    assert replay([(1, 10), (2, 5), (1, -10), (3, 8), (2, -5), (3, -8)]) == 15
    assert replay([(9, -100), (1, 10)]) == 10  # a release of earlier memory
    assert replay([(1, 10), (1, -10), (1, 20), (1, -20)]) == 20  # an address is reused


def test_unsupported_devices(x):
    with pytest.raises(UserError, match="meta"):
        peak_memory(lambda: None, device="meta")


def test_machine_is_ready_for_json():
    here = machine()
    assert here["cpu"]
    assert here["cores"] >= 1
    assert here["threads"] == torch.get_num_threads()
    assert here["torch"] == torch.__version__
    assert json.loads(json.dumps(here)) == here


def test_fields_of_a_system_file(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0: fast\n\nmodel name\t: Other\n")
    assert _field(file, "model name") == "Some CPU @ 2.0: fast"
    assert _field(file, "cache size") is None
    assert _field(tmp_path / "none", "model name") is None
