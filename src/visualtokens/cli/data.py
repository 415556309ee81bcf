"""``vtok data``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visualtokens.cli.output import refuse_overwriting
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError, unknown
from visualtokens.tasks.options import DataOptions

ACTIONS = ("check",)


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """Check a dataset before training: splits, classes, sizes, bad files and likely mistakes."""

    action: str
    """What to do: check."""

    data: str
    """Dataset, as for `vtok train`: folder:PATH, masks:PATH, yolo:PATH and so on."""

    task: Literal["classify", "segment", "detect"] | None = None
    """Task that the data are for; by default that of the dataset, and classify if there are several."""

    limit: int | None = None
    """Images of each split to decode, evenly spread; of the others only the header is read. By default
    all."""

    out: str | None = None
    """PNG file for a contact sheet: images of every split with their labels, boxes or masks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action not in ACTIONS:
            raise unknown("action", self.action, ACTIONS)
        if self.out is not None and Path(self.out).suffix.lower() != ".png":
            raise UserError(f"out={self.out!r} is not the name of a PNG file; end it in .png")


def run(config: DataConfig) -> Result:
    """Check the dataset. The exit code is 1 if there are bad files."""
    from visualtokens.data import check, open_splits
    from visualtokens.files import write_atomically

    splits = open_splits(config.data, task=config.task, **config.data_options)
    if config.out is not None:
        files = (d.path(i) for d in splits.datasets.values() for i in range(len(d)))
        refuse_overwriting([Path(config.out)], files)
    report = check(splits, limit=config.limit)
    text, document = report.text(), report.to_dict()
    if config.out is not None:
        from visualtokens.tasks.contact_sheet import contact_sheet

        sheet = contact_sheet(splits)
        write_atomically(Path(config.out), lambda temporary: sheet.save(temporary, format="PNG"))
        text += f"\n\ncontact sheet: {config.out}"
        document["sheet"] = config.out
    return Result(text, document, code=1 if report.bad else 0)


VERB = Verb(
    config=DataConfig,
    run=run,
    example="vtok data check yolo:fruit/ --out sheet.png",
    positional=("action", "data"),
)
