"""``vtok reduce``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from visualtokens.cli.bench import parse_size
from visualtokens.cli.output import checkpoint_files, refuse_overwriting, unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Failure, Result, Verb, data_arguments
from visualtokens.errors import UserError, unknown
from visualtokens.progress import count, hardware, header, parameters
from visualtokens.tasks.options import DataOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from visualtokens.data import ImageDataset, Preprocess
    from visualtokens.tune.planning import Plan
    from visualtokens.tune.tradeoff import Tradeoff

CALIBRATION = 64  # photos
SHARES = (0.8, 0.65, 0.5, 0.35)  # of the multiply-adds, for the curve


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(DataOptions):
    """Make a vision transformer faster by reducing its tokens, and measure what that costs."""

    model: str
    """Checkpoint folder that `vtok train --out` wrote, or the name of a timm vision transformer."""

    weights: str | None = None
    """Weights of a named model: a .safetensors or .pth file, or pretrained to fetch timm's; else random."""

    method: str = "weighted_merge"
    """Reduction method: weighted_merge, merge, kmeans, weighted_kmeans, kmedoids, weighted_kmedoids,
    power_bert, importance, random or conv."""

    init: Literal["distinct", "significance", "random"] = "distinct"
    """Initial cluster centres of k-means and k-medoids: distinct tokens, those of highest significance, or
    random ones."""

    iterations: int | None = None
    """Cluster updates; by default 3 for k-means and 1 for k-medoids."""

    as_published: bool = False
    """Cluster as in Token Pooling: --init significance --iterations 3."""

    keep: str | float | int | None = None
    """Tokens to keep: the share after the last block (0.5), the number to drop per block (-13), a published
    schedule (deit_small/3), a saved plan (plan.json), or one number per block (196,150,120,…)."""

    macs: float | None = None
    """Budget: maximum multiply-adds per image; values up to 1 are a share of the whole model's."""

    speedup: float | None = None
    """Budget: minimum speed-up, measured on this machine."""

    latency: float | None = None
    """Budget: maximum milliseconds per batch, by default of one image."""

    calibrate: str | None = None
    """For a budget: folder of photos, without labels, by which the blocks to drop tokens in are chosen. 64 of
    them are used; a ViT-B takes minutes."""

    plan: str | None = None
    """For a budget: file for the schedule, plan.json for example, which --keep plan.json takes."""

    data: str | None = None
    """Images to evaluate on: digits, digit_scenes, folder:PATH, csv:FILE, parquet:FILE, npz:FILE. Reports the
    accuracy if their classes are those of the model, else the agreement with the whole model."""

    split: Literal["train", "val", "test"] = "val"
    """Split of the data: train, val or test."""

    images: int = 256
    """Number of images to evaluate on, evenly spaced; 0 takes all."""

    size: int | str | None = None
    """Image size: one number for squares, or HEIGHTxWIDTH; by default the model's own."""

    batch: int | None = None
    """Images per step; by default 8, for --latency 1."""

    rounds: int = 5
    """Rounds in which the schedules take turns; the table shows the median."""

    save: str | None = None
    """File for the trade-off curve: .png, .svg or .pdf."""

    search: bool = False
    """Learn the tokens to keep in each block (soft extraction), then fine-tune with them; see --lambda."""

    lambda_: float | None = None
    """For --search: weight of the number of tokens in the loss; a higher one keeps fewer."""

    out: str | None = None
    """Output folder for the reduced model, which predict, eval, explain and timm can load; needs --keep or a
    budget. For --search: folder of the search; the same command resumes an interrupted one."""

    search_epochs: int = 30
    """For --search: epochs of soft extraction."""

    epochs: int = 30
    """For --search: epochs of fine-tuning."""

    train: dict[str, Any] = field(default_factory=dict)
    """For --search: options of `vtok train` for both stages, such as --train.lr 1e-4 --train.batch 256."""


def run(config: ReduceConfig) -> Result:
    """Measure the trade-off, or search."""
    from visualtokens.reduce import METHODS

    if config.method not in METHODS:
        raise unknown("method", config.method, METHODS)
    budgets = [n for n in ("keep", "macs", "speedup", "latency") if getattr(config, n) is not None]
    for name in ("calibrate", "plan"):
        if getattr(config, name) is not None and budgets in ([], ["keep"]):
            raise UserError(f"--{name} needs a budget; give --macs, --speedup or --latency")
    if len(budgets) > 1 or (budgets and config.search):
        conflicting = [*budgets, *(["search"] if config.search else [])]
        raise UserError(f"--{' and --'.join(conflicting)} exclude each other; give one of them")
    options = _clustering(config)
    return _search(config, options) if config.search else _measure(config, options)


def _clustering(config: ReduceConfig) -> dict[str, Any]:
    """Return the options of ``reduce`` for the clustering."""
    from visualtokens.reduce import AS_PUBLISHED
    from visualtokens.reduce.methods import CLUSTERINGS

    chosen: dict[str, Any] = {"init": config.init, "iterations": config.iterations}
    given = {name: value for name, value in chosen.items() if value != getattr(ReduceConfig, name)}
    if (given or config.as_published) and config.method not in CLUSTERINGS:
        option = "as_published" if config.as_published else next(iter(given))
        raise UserError(
            f"--{option} has no effect with --method {config.method}; leave it out, or use "
            f"{', '.join(CLUSTERINGS)}"
        )
    if config.as_published and given:
        raise UserError(f"--as_published and --{' and --'.join(given)} exclude each other; give one of them")
    return dict(AS_PUBLISHED) if config.as_published else given


def _measure(config: ReduceConfig, options: dict[str, Any]) -> Result:
    from visualtokens.data import open_dataset
    from visualtokens.tune.inputs import open_model, read_photos, sample_images, save_reduced
    from visualtokens.tune.tradeoff import spread_schedules, tradeoff

    if config.data is None and config.data_options:
        raise UserError(f"{next(iter(config.data_options))} has no effect without --data; leave it out")
    dataset = None
    if config.data is not None:
        dataset = open_dataset(config.data, config.split, **config.data_options)
    if config.save is not None:
        refuse_overwriting([Path(config.save)], _input_files(config, dataset))
    _check_out(config)
    size = None if config.size is None else parse_size(config.size)
    opened = open_model(config.model, weights=config.weights, size=size)
    model, classes, preprocess = opened.model, opened.classes, opened.preprocess
    size = preprocess.size
    batch = config.batch or (1 if config.latency is not None else 8)
    _log_header(config, model, preprocess, dataset)
    images, labels, bad = sample_images(
        dataset, preprocess, classes, count=getattr(model, "num_classes", 0), limit=config.images
    )
    warn_unreadable(bad)
    method: Any = config.method
    photos = None
    if config.calibrate is not None:
        photos, unread = read_photos(config.calibrate, preprocess, limit=CALIBRATION)
        warn_unreadable(unread)
    name, keep, plan = _requested(config, model, size=size, batch=batch, photos=photos, options=options)
    schedules: dict[str, Any] = {} if keep is None else {name: keep}
    schedules |= spread_schedules(model, method, size=size, shares=SHARES, options=options)
    found = tradeoff(
        model,
        schedules,
        method=method,
        images=images,
        labels=labels,
        size=size,
        batch=batch,
        rounds=config.rounds,
        options=options,
    )
    saved = None if config.save is None else str(found.save(config.save))
    if config.plan is not None and plan is not None:
        plan.save(config.plan)
    if config.out is not None:
        save_reduced(config.out, opened, method=method, keep=found.rows[1].keep, options=options)
    document = {
        "model": config.model,
        "keep": None if keep is None else list(found.rows[1].keep),
        "plan": None if plan is None else asdict(plan),
        "tradeoff": found.to_dict(),
        "unreadable": unreadable_as_json(bad),
        "saved": saved,
        "out": config.out,
    }
    return Result(_text(config, found, options, chosen=keep is not None, saved=saved), document)


def _log_header(
    config: ReduceConfig, model: nn.Module, preprocess: Preprocess, dataset: ImageDataset | None
) -> None:
    """Log what is measured, unless stderr is a terminal."""
    size = f"{preprocess.size[0]}×{preprocess.size[1]}"
    rows = {"model": f"{config.model}, {parameters(model)}, input {size}", "method": config.method}
    if dataset is not None:
        number = min(config.images or len(dataset), len(dataset))
        classes = count(len(dataset.classes), "class")
        rows["data"] = f"{config.data}, split {config.split}, {count(number, 'image')}, {classes}"
    header(rows | {"device": hardware(next(model.parameters()).device)})


def _requested(
    config: ReduceConfig,
    model: nn.Module,
    *,
    size: tuple[int, int],
    batch: int,
    photos: Tensor | None,
    options: dict[str, Any],
) -> tuple[str, Any, Plan | None]:
    """Return the requested schedule: its name in the table, the schedule, and the plan of a budget."""
    from visualtokens.tune.planning import plan

    if config.keep is not None:
        return f"keep {config.keep}"[:24], parse_keep(config.keep), None
    method: Any = config.method
    if config.macs is not None:
        found = plan(model, macs=config.macs, images=photos, method=method, size=size, options=options)
        return f"macs {config.macs:g}", found.keep, found
    if config.speedup is None and config.latency is None:
        return "", None, None
    found = plan(
        model,
        speedup=config.speedup,
        latency_ms=config.latency,
        images=photos,
        method=method,
        size=size,
        batch=batch,
        rounds=config.rounds,
        options=options,
    )
    if config.speedup is not None:
        return f"speedup {config.speedup:g}", found.keep, found
    return f"latency {config.latency:g} ms", found.keep, found


def parse_keep(keep: str | float | int) -> Any:
    """Return the ``keep`` argument of ``reduce`` from a command-line value."""
    if not isinstance(keep, str) or "/" in keep or keep.endswith(".json"):
        return keep
    try:
        numbers = [float(part) if "." in part else int(part) for part in keep.split(",")]
    except ValueError as error:
        raise UserError(
            f"keep={keep!r} is not valid; give 0.5, -13, deit_small/3 or one number per block: 196,150,…"
        ) from error
    return numbers if "," in keep else numbers[0]


def _check_out(config: ReduceConfig) -> None:
    """Refuse an output folder without a schedule to save, or with something else in it."""
    if config.out is None:
        return
    if all(getattr(config, name) is None for name in ("keep", "macs", "speedup", "latency")):
        raise UserError(f"--out {config.out}: nothing to save; give --keep, --macs, --speedup or --latency")
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{config.out!r} exists already; give an --out that does not exist, or remove it")


def _input_files(config: ReduceConfig, dataset: ImageDataset | None) -> Iterator[str | Path]:
    """Yield the files that are read."""
    yield from checkpoint_files(config.model)
    if config.weights is not None:
        yield config.weights
    if dataset is not None:
        yield from map(dataset.path, range(len(dataset)))


def _text(
    config: ReduceConfig, found: Tradeoff, options: dict[str, Any], *, chosen: bool, saved: str | None
) -> str:
    lines = [found.table()]
    if config.weights is None and not Path(config.model).exists():
        lines.append("The weights are random: only speed and memory are meaningful; see --weights.")
    if chosen:
        keep = list(found.rows[1].keep)
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        call = f"visualtokens.reduce(model, {config.method!r}, keep={keep}{given})"
        lines += ["", f"{found.rows[1].name}: {call}"]
    if saved:
        lines += ["", f"curve saved as {saved}"]
    if config.out is not None:
        lines += ["", f"saved in {config.out}; try: vtok predict photo.jpg --checkpoint {quote(config.out)}"]
    return "\n".join(lines)


def _search(config: ReduceConfig, reduction: dict[str, Any]) -> Result:
    from visualtokens.checkpoint import load_checkpoint
    from visualtokens.reduce.schedule import macs
    from visualtokens.train import CannotSave, Diverged
    from visualtokens.tune.search import Interrupted, finetune, search

    for name in ("lambda_", "data", "out"):
        if getattr(config, name) is None:
            raise UserError(f"--search needs --{name.removesuffix('_')}; --help shows an example")
    if not Path(config.model).exists():
        raise UserError(f"--search starts from a checkpoint folder, and {config.model!r} does not exist")
    out, data, price = str(config.out), str(config.data), float(config.lambda_ or 0)
    options = config.train | ({"data_args": config.data_options} if config.data_options else {})
    try:
        found = search(
            config.model,
            data=data,
            out=out,
            price=price,
            options=options | {"epochs": config.search_epochs},
        )
        tuned = finetune(
            found.start,
            data=data,
            out=Path(out) / config.method,
            method=config.method,
            keep=found.keep,
            reduction=reduction,
            options=options | {"epochs": config.epochs},
        )
    except Interrupted as stop:
        return Result(str(stop), {"signal": stop.signal}, code=128 + stop.signal)
    except (CannotSave, Diverged) as error:
        raise Failure(str(error)) from error
    warn_unreadable(tuned.unreadable)
    whole = macs(load_checkpoint(config.model).model).total
    cost = macs(load_checkpoint(tuned.out).model).total
    text = (
        f"lambda {price:g} keeps {list(found.keep)}\n"
        f"{cost / 1e9:.3f} GMACs, {cost / whole:.0%} of the whole model's\n"
        f"accuracy {found.soft.accuracy or 0:.1%} with soft extraction, "
        f"{tuned.accuracy or 0:.1%} with {config.method} after fine-tuning\n"
        f"saved in {tuned.out}; try: vtok eval --checkpoint {quote(tuned.out)} {data_arguments(data, config)}"
    )
    document = {
        "lambda": price,
        "keep": list(found.keep),
        "mass": list(found.mass),
        "macs": cost,
        "full_macs": whole,
        "soft_accuracy": found.soft.accuracy,
        "accuracy": tuned.accuracy,
        "out": tuned.out,
        "unreadable": unreadable_as_json(tuned.unreadable),
    }
    return Result(text, document, silent=not tuned.is_main)


GROUPS = {
    "model": ("model", "weights", "size"),
    "reduction, by one of keep, macs, speedup and latency": ("method", "keep", "macs", "speedup", "latency"),
    "clustering": ("init", "iterations", "as_published"),
    "data": ("data", "split", "images"),
    "measurement": ("batch", "rounds", "save"),
    "search for a schedule": ("search", "lambda_", "out", "search_epochs", "epochs", "train"),
}
VERB = Verb(
    config=ReduceConfig,
    run=run,
    groups=GROUPS,
    example="vtok reduce deit_small_patch16_224 --speedup 2 --data folder:photos --save curve.png",
    positional="model",
)
