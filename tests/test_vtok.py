"""The start of ``vtok``: what it imports, bounded spinning, and the CPU quota of the container."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import vtok
from visualtokens.cli.app import VERBS

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1


def run(code: str, **environment: str) -> str:
    """Output of a new process without OpenMP's variables, except the given ones."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


CONFIGURED = (
    "import os, sys, vtok; assert 'torch' not in sys.modules; vtok.configure_threads(os.environ); "
    "print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_NUM_THREADS'), end=' '); "
    "import torch; print(torch.get_num_threads())"
)


def test_spinning_is_bounded_before_torch_is_loaded():
    assert run(CONFIGURED).split()[0] == str(vtok.SPIN_COUNT)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"GOMP_SPINCOUNT": "7"}, ["7", "None"]),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ["None", "None"]),
        ({"OMP_NUM_THREADS": "1"}, [str(vtok.SPIN_COUNT), "1", "1"]),
    ],
)
def test_variables_of_the_user_are_kept(given: dict[str, str], expected: list[str]):
    assert run(CONFIGURED, **given).split()[: len(expected)] == expected


def test_importing_the_library_changes_no_settings_of_the_process():
    run(
        "import os, torch; before = dict(os.environ), torch.get_num_threads(), torch.initial_seed(); "
        "import visualtokens, visualtokens.cli; "
        "assert before == (dict(os.environ), torch.get_num_threads(), torch.initial_seed())"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("", 0),
        ("--help", 0),
        ("--version", 0),
        *((f"{verb} --help", 0) for verb in VERBS),
        ("models", 0),
        ("models nowhere", 2),
        ("help train", 0),
        *((f"completion {shell}", 0) for shell in ("bash", "zsh", "fish")),
        ("trian", 2),
        ("train --modle resnet18", 2),
        ("train --model a --data b --out c --epochs many", 2),
        ("predict --checkpoint", 2),
    ],
)
def test_help_and_argument_errors_import_no_torch(arguments: str, code: int):
    out = run(
        f"import contextlib, io, sys, vtok; sys.argv = ['vtok', *{arguments.split()}]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n    code = vtok.main()\n"
        "print(code, *sorted({'torch', 'timm', 'torchvision', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    assert out == str(code)


def module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m name``, which reports its imports on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", name, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["vtok", "visualtokens"])
def test_the_package_is_the_command(name: str):
    done = module(name, "models", "nano")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].startswith("paca_vit_nano ")
    assert "| torch\n" not in done.stderr
    assert module(name, "trian").returncode == 2


AS_MODULE = """
import os, runpy, sys
arguments = ["--help"]
sys.argv, sys.orig_argv = ["-m", *arguments], ["python", "-m", NAME, *arguments]
__import__(NAME.partition(".")[0])  # as Python does while it looks for the module
assert "torch" not in sys.modules
sys.argv[0] = "__main__.py"
try:
    runpy.run_module(NAME, run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
assert "torch" not in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize("name", ["visualtokens", "visualtokens.train"])
def test_modules_of_the_package_set_up_the_threads_before_torch_is_loaded(name: str):
    assert run(f"NAME = {name!r}{AS_MODULE}").splitlines()[-1] == str(vtok.SPIN_COUNT)


def test_another_package_that_is_run_as_a_module_registers_the_models(tmp_path: Path):
    """While Python looks for its module, ``sys.argv`` is that of ours."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("import visualtokens\n")
    (tmp_path / "tool" / "__main__.py").write_text("import timm; print(timm.is_model('paca_vit_nano'))\n")
    done = subprocess.run([sys.executable, "-m", "tool"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_models_are_registered_with_timm_by_an_import():
    run("import visualtokens, timm; assert timm.is_model('paca_vit_nano') and timm.is_model('reduced_vit')")


def test_a_verb_knows_the_models():
    code = "import sys, vtok; sys.argv = ['vtok', 'models', 'nano']; sys.exit(vtok.main())"
    assert "paca_vit_nano" in run(code)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"a/b": "max 100000"}, None),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a": "50000 100000", "a/b": "400000 100000"}, 0.5),  # an ancestor has the lower limit
        ({".": "300000 100000"}, 3.0),
        ({"a/b": "nonsense"}, None),
    ],
)
def test_quota_of_control_groups_version_2(tmp_path: Path, limits: dict[str, str], quota: float | None):
    for folder, text in limits.items():
        group(tmp_path / folder, cpu__max=text)
    (tmp_path / "membership").write_text("0::/a/b\n")
    assert vtok.cpu_quota(tmp_path / "membership", tmp_path) == quota


@pytest.mark.parametrize(("limit", "quota"), [("-1", None), ("25000", 0.25), ("200000", 2.0)])
@pytest.mark.parametrize("path", ["docker/1", ""])  # a container may see its group as the root
def test_quota_of_control_groups_version_1(tmp_path: Path, limit: str, quota: float | None, path: str):
    group(tmp_path / "cpu" / path, cpu__cfs_quota_us=limit, cpu__cfs_period_us="100000")
    (tmp_path / "membership").write_text("5:memory:/other\n3:cpu,cpuacct:/docker/1\n0::/\n")
    assert vtok.cpu_quota(tmp_path / "membership", tmp_path) == quota


def test_no_control_groups(tmp_path: Path):
    assert vtok.cpu_quota(tmp_path / "missing", tmp_path) is None


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group of 0.5 processors."""
    folder = CPU_GROUPS / f"vtok-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"control groups cannot be created here: {error}")
    yield folder
    folder.rmdir()


def test_threads_in_a_real_control_group(limited: Path):
    if vtok.cpu_count() < 2:
        pytest.skip("one processor has one thread anyway")
    join = f"import os; open({str(limited / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    assert run(join + CONFIGURED).split()[1:] == ["1", "1"]
