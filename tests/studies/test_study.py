"""Reading studies: the included ones, and every mistake in a file of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm

import visualtokens
from tests.studies.conftest import change
from visualtokens.bench import count_parameters
from visualtokens.errors import UserError
from visualtokens.papers.figures import published
from visualtokens.studies.jobs import all_jobs, arm_jobs
from visualtokens.studies.study import (
    FOLDER,
    STAGES,
    Study,
    data_spec,
    find_study,
    merged,
    needed_paths,
    read_study,
    study_names,
)


def test_every_file_is_a_study() -> None:
    files = {path.stem.replace("_", "-") for path in FOLDER.iterdir() if path.name != STAGES}
    assert set(study_names()) == files
    assert {find_study(name).name for name in study_names()} == files


@pytest.mark.parametrize("name", study_names())
def test_published_rows_exist(name: str) -> None:
    """Each comparison that names rows of a published table names two that are there."""
    study = find_study(name)
    for comparison in study.compare:
        if comparison.published:
            rows = {f"{f.model} {f.variant}" for f in published(study.source.paper, comparison.table)}
            assert len(comparison.published) == 2
            assert set(comparison.published) <= rows


@pytest.mark.parametrize("name", ["vt-vs-resnet", "paca-vs-pvt", "stvit-vs-swin"])
def test_models_are_of_matching_size(name: str) -> None:
    visualtokens.register_models()
    study = find_study(name)
    sizes = {}
    for arm in study.arms:
        options = study.options(arm)
        args = dict(options.get("model_args", {}))
        if "img_size" not in args and options["size"] == 64:
            args["img_size"] = 64
        sizes[arm] = count_parameters(timm.create_model(options["model"], num_classes=10, **args))
    assert max(sizes.values()) < 1.3 * min(sizes.values()), sizes


def test_runs_are_shared_between_studies() -> None:
    """The plain VT-ResNet is an arm of three studies and is trained once."""
    studies = [find_study(name) for name in ("vt-vs-resnet", "vt-tokenizers", "vt-token-mixers")]
    keys = [{job.key for job in arm_jobs(study, [0]).values()} for study in studies]
    assert len(keys[0] & keys[1] & keys[2]) == 1
    assert len(all_jobs(studies, None)) == 3 * len(keys[0] | keys[1] | keys[2])


def test_stages_come_before_the_runs_that_need_them() -> None:
    jobs = all_jobs([find_study("pooling-qk")], None)
    position = {job.key: i for i, job in enumerate(jobs)}
    assert all(position[need.key] < position[job.key] for job in jobs for need in job.needs.values())
    stages = [job.label for job in jobs if job.label != "reduced_vit"]
    assert stages.count("teacher_cifar") == 1  # for all seeds
    assert stages.count("deit_64") == stages.count("search_64_mid") == 3  # for each seed


def test_bfloat16_is_that_of_every_training() -> None:
    """Stages and arms train in bfloat16; no run in float32 counts as one of them."""
    study = find_study("pooling-qk")
    jobs, others = all_jobs([study.in_bfloat16()], None), all_jobs([study], None)
    assert all(job.options["bf16"] for job in jobs)
    assert len(jobs) == len(others)
    assert not {job.key for job in jobs} & {job.key for job in others}


def test_seeds_are_interleaved(tiny: Study) -> None:
    assert list(arm_jobs(tiny, range(2))) == [("narrow", 0), ("wide", 0), ("narrow", 1), ("wide", 1)]


def test_an_arm_adds_to_the_recipe() -> None:
    recipe = {"lr": 1.0, "ema": 0.9, "model_args": {"a": 1, "b": 2}}
    own = {"lr": 2.0, "ema": None, "model_args": {"b": None, "c": 3}}
    assert merged(recipe, own) == {"lr": 2.0, "model_args": {"a": 1, "c": 3}}


def test_the_key_depends_on_what_is_trained_only(tiny_file: Path) -> None:
    def keys(**entries: Any) -> set[str]:
        study = read_study(change(tiny_file, **entries))
        return {job.key for job in arm_jobs(study, [0]).values()}

    assert keys(claim="Another.", price=2) == keys()
    assert keys(recipe={"model": "paca_vit_nano", "lr": 0.5}).isdisjoint(keys())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"claim": None}, "study has no 'claim'"),
        ({"clam": "x"}, "unknown entry of study 'clam'; did you mean 'claim'?"),
        ({"data": "imagenet"}, "unknown data 'imagenet'"),
        ({"price": "much"}, "price"),
        ({"arms": ["narrow"]}, "arms must be a mapping"),
        ({"arms": {"narrow": {"epoch": 3}, "wide": {}}}, "unknown training option 'epoch'"),
        ({"arms": {"narrow": {"epochs": 0}, "wide": {}}}, "epochs=0 must be at least 1"),
        ({"arms": {"narrow": {"seed": 3}, "wide": {}}}, "seed=3 cannot be chosen in a study"),
        ({"arms": {"narrow": {"init": "no_stage"}, "wide": {}}}, "unknown stage in init 'no_stage'"),
        ({"arms": {"wide": {}}}, "unknown arm 'narrow'"),
        ({"compare": [{"claim": "x"}]}, "compare has no 'a'"),
        ({"source": {"paper": "paca-vit"}}, "source has no 'tables'"),
    ],
)
def test_mistakes_are_one_line(tiny_file: Path, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_study(change(tiny_file, **entries))
    assert message in str(error.value)
    assert "changed.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_claim_of_equality_needs_a_margin(tiny_file: Path) -> None:
    comparison = {"claim": "x", "table": "2", "a": "wide", "b": "narrow", "expect": "same"}
    with pytest.raises(UserError, match="give a margin with 'same' only"):
        read_study(change(tiny_file, compare=[comparison]))


def test_missing_data_say_what_to_give(tmp_path: Path) -> None:
    assert needed_paths([find_study("vt-fpn")]) == ["pets"]
    assert needed_paths([find_study("vt-recipes")]) == []
    with pytest.raises(UserError, match=r"needs --cifar FILE of CIFAR-10 \(npz with x_train"):
        data_spec("cifar", {})
    with pytest.raises(UserError, match=r"--pets .*/none does not exist"):
        data_spec("pets", {"pets": str(tmp_path / "none")})
    assert data_spec("cifar", {"cifar": str(tmp_path)}) == f"npz:{tmp_path}"
    assert data_spec("digits", {}) == "digits"
