"""Studies as data: YAML files with a claim, arms that are trained, and what is compared. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from visualtokens.errors import UserError, unknown
from visualtokens.files import as_dataclass, one_line
from visualtokens.train.config import TrainConfig
from visualtokens.yaml_files import read_yaml

FOLDER = Path(__file__).parents[1] / "recipes" / "studies"
STAGES = "stages.yaml"  # trainings that several studies start from
SEARCH = "search"  # of a stage: λ of the search for a schedule
PER_SEED = "per_seed"  # of a stage: trained once for each seed, not once for all
BF16 = "bf16"  # of `vtok train`; every training of a study has the same
INSERT = "insert"  # of an arm: evaluate the model with the weights of its stage, without training
OWN_OPTIONS = (SEARCH, PER_SEED, INSERT)  # those that are not of `vtok train`
# The data of the studies: the option that gives their path, and how `vtok train --data` takes it.
GIVEN = {"cifar": "npz:", "pets": "pets:"}
BUILT_IN = ("digits", "digit_scenes")
EXPECTED = ("above", "below", "same")
MERGED = ("model_args", "optimizer_args", "data_args", "loss_args")  # an arm adds to those of the recipe
REFERENCES = ("init", "teacher")  # options whose value is the name of a stage
SET_BY_RUNNER = ("out", "seed", "resume", "overwrite", "keep", "data")

Options = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where the claim is printed."""

    paper: str  # as in `vtok papers`
    tables: list[str]  # or figures
    section: str


@dataclass(frozen=True)
class Comparison:
    """One comparison of arms, per seed: the mean of the arms ``a`` minus that of the arms ``b``."""

    claim: str
    table: str
    a: list[str]
    b: list[str]
    expect: str  # what the paper claims of the difference: above 0, below 0, or the same within the margin
    margin: float = 0.0  # of "same", in points
    metric: str = ""  # by default the main metric of the task; train_accuracy is that on training images
    best: bool = False  # b is, per seed, the best of those arms that take no more multiply-adds than a
    published: list[str] = field(default_factory=list)  # the rows of the table for a and for b

    def __post_init__(self) -> None:
        if self.expect not in EXPECTED:
            raise unknown("expect", self.expect, EXPECTED)
        if (self.expect == "same") != (self.margin > 0):
            raise UserError(f"expect={self.expect} with margin={self.margin}; give a margin with 'same' only")


@dataclass(frozen=True)
class Study:
    """A claim and the trainings that test it."""

    name: str
    claim: str
    source: Source
    data: str
    arms: dict[str, Options]  # options of `vtok train`
    compare: list[Comparison]
    price: float  # core-minutes of all runs with the default seeds, without stages
    full_scale: str  # the command that trains the paper's model
    recipe: Options = field(default_factory=dict)  # options of all arms
    stages: dict[str, Options] = field(default_factory=dict)  # trained before the arms
    seeds: int = 3
    notes: str = ""

    def __post_init__(self) -> None:
        if self.data not in (*GIVEN, *BUILT_IN):
            raise unknown("data", self.data, (*GIVEN, *BUILT_IN))
        for comparison in self.compare:
            for arm in (*comparison.a, *comparison.b):
                if arm not in self.arms:
                    raise unknown("arm", arm, self.arms)
        for arm in self.arms:
            self.check(self.options(arm))
        for stage in self.used_stages():
            self.check(self.stages[stage])

    def options(self, arm: str) -> Options:
        """Return the options of an arm with those of the recipe."""
        return merged(self.recipe, self.arms[arm])

    def in_bfloat16(self) -> Study:
        """Return the study with all trainings, those of stages too, in bfloat16 mixed precision."""
        stages = {name: options | {BF16: True} for name, options in self.stages.items()}
        return replace(self, recipe=self.recipe | {BF16: True}, stages=stages)

    def check(self, options: Options) -> None:
        """Raise :class:`UserError` for options that cannot be trained with."""
        given = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        for name in SET_BY_RUNNER:
            if name in given and name != "data":
                raise UserError(f"{name}={given[name]!r} cannot be chosen in a study; leave it out")
        for name in given:
            if name not in TrainConfig.names():
                raise unknown("training option", name, TrainConfig.names())
        for name in REFERENCES:
            if name in given and given[name] not in self.stages:
                raise unknown(f"stage in {name}", str(given[name]), self.stages)
        TrainConfig(**({"model": "reduced_vit"} | given | {"out": "unused", "data": "unused"}))

    def used_stages(self) -> list[str]:
        """Return the stages that the arms need, each after those that it needs itself."""
        found: list[str] = []

        def add(options: Options) -> None:
            for name in REFERENCES:
                if name in options and options[name] not in self.stages:
                    raise unknown(f"stage in {name}", str(options[name]), self.stages)
                if name in options and options[name] not in found:
                    add(self.stages[options[name]])
                    found.append(options[name])

        for arm in self.arms:
            add(self.options(arm))
        return found

    def data_of(self, options: Options) -> str:
        """Return the name of the data that options train on; stages may have data of their own."""
        return str(options.get("data", self.data))


def merged(recipe: Mapping[str, Any], own: Mapping[str, Any]) -> Options:
    """Return the options of a recipe, overridden by an arm's own; None removes an option."""
    both = dict(recipe) | dict(own)
    for name in MERGED:
        if name in recipe and own.get(name) is not None:
            both[name] = {k: v for k, v in {**recipe[name], **own[name]}.items() if v is not None}
    return {name: value for name, value in both.items() if value is not None}


def data_spec(data: str, paths: Mapping[str, str | None]) -> str:
    """Return the data as `vtok train --data` takes them; ``paths`` are those that the user gave."""
    if data in BUILT_IN:
        return data
    path = paths.get(data)
    if path is None:
        what = "FILE of CIFAR-10 (npz with x_train, y_train, x_test, y_test)"
        if data == "pets":
            what = "FOLDER of Oxford-IIIT Pets with trimaps"
        raise UserError(f"this study needs --{data} {what}")
    if not Path(path).exists():
        raise UserError(f"--{data} {path} does not exist")
    return GIVEN[data] + path


def study_names() -> list[str]:
    """Return the names of the included studies, in the order of the papers."""
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.yaml") if path.name != STAGES)


def find_study(name: str) -> Study:
    """Return an included study by its name, or the one in a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name.replace('-', '_')}.yaml"
    if not name.endswith((".yaml", ".yml")) and name not in study_names():
        raise unknown("study", name, study_names())
    return read_study(path)


@functools.cache
def read_study(path: Path) -> Study:
    """Return the study in a YAML file; unknown, missing and wrong entries raise :class:`UserError`."""
    content = _mapping(read_yaml(path, what="study"), "it")
    shared = FOLDER / STAGES
    stages = _mapping(read_yaml(shared, what="stages"), STAGES) if shared.exists() else {}
    try:
        content["stages"] = stages | _mapping(content.get("stages", {}), "stages")
        content["source"] = _build(Source, content.get("source"), "source")
        comparisons = content.get("compare")
        if not isinstance(comparisons, list):
            raise UserError("compare must be a list")
        content["compare"] = [_build(Comparison, _listed(each), "compare") for each in comparisons]
        for name in ("arms", "stages"):
            content[name] = {k: _mapping(v or {}, k) for k, v in _mapping(content.get(name), name).items()}
        return _build(Study, {"name": path.stem.replace("_", "-"), **content}, "study")
    except UserError as error:
        raise UserError(f"study {str(path)!r}: {error}") from error


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{name} must be a mapping of names to values")
    return dict(value)


def _listed(comparison: Any) -> Any:
    """Return a comparison in which one arm is written without a list."""
    if not isinstance(comparison, dict):
        return comparison
    arms = {name: [comparison[name]] for name in ("a", "b") if isinstance(comparison.get(name), str)}
    return comparison | arms | {"table": str(comparison.get("table", ""))}


def _build(kind: type[Any], content: Any, name: str) -> Any:
    values = _mapping(content, name)
    known = [each.name for each in fields(kind)]
    for key in values:
        if key not in known:
            raise unknown(f"entry of {name}", key, known)
    for each in fields(kind):
        required = each.default is MISSING and each.default_factory is MISSING
        if required and each.name not in values:
            raise UserError(f"{name} has no {each.name!r}; add it")
    numbers = {k: float(v) for k, v in values.items() if k in ("price", "margin") and _is_int(v)}
    try:
        return as_dataclass(kind, values | numbers)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a value of another type
        raise UserError(f"{name}: {one_line(error)}") from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def needed_paths(studies: Sequence[Study]) -> list[str]:
    """Return which of ``--cifar`` and ``--pets`` the studies need."""
    needed = {
        study.data_of(options)
        for study in studies
        for options in (
            *(study.options(a) for a in study.arms),
            *(study.stages[s] for s in study.used_stages()),
        )
    }
    return [name for name in GIVEN if name in needed]
