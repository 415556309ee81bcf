import json

import torch

from visualtokens.bench import machine
from visualtokens.bench.memory import _field


def test_the_machine_is_described_and_saved_as_json():
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
