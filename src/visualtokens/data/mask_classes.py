"""What the numbers and colours in mask files mean: the class of each, as options merge and ignore them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from visualtokens.data.base import brief, is_int
from visualtokens.data.decode import BadAnnotation
from visualtokens.data.segmentation import IGNORE, Colour, Mask
from visualtokens.errors import UserError, unknown
from visualtokens.tables import printable

MAX_NUMBER = 65_535  # in a mask of 16 bits
STRIP = 256  # rows of a mask whose colours are looked up at once, which bounds the memory
SHOWN = 12  # classes or colours in a message
OPTION = "--data_args."  # how options are given on the command line
_HEX = re.compile(r"#([0-9a-fA-F]{6})")
_DECIMAL = re.compile(r"[(\[]?\s*([0-9]{1,3})[\s,]+([0-9]{1,3})[\s,]+([0-9]{1,3})\s*[)\]]?")


class Label(NamedTuple):
    """What marks the pixels of one kind in mask files, and their class; pixels without a name are ignored."""

    name: str | None
    number: int | None = None
    colour: Colour | None = None


@dataclass(frozen=True, eq=False)
class Legend:
    """The class of every number and every colour in the masks of a dataset."""

    classes: list[str]
    colours: list[Colour] | None  # of the classes, in pictures
    numbers: NDArray[np.int16]  # (numbers,): class, IGNORE, or -1 where a number has no class
    codes: NDArray[np.int32]  # (n,): colours as 0xRRGGBB, ascending; none where masks hold numbers only
    code_classes: NDArray[np.int16]  # (n,): class or IGNORE

    @property
    def in_colour(self) -> bool:
        """Whether masks may hold colours."""
        return len(self.codes) > 0

    def to_mask(self, values: NDArray[np.integer], *, path: str, image_id: str) -> Mask:
        """The class of every pixel ``(H, W)`` of numbers ``(H, W)`` or colours ``(H, W, 3)``.

        A number or colour without a class raises :class:`BadAnnotation`.
        """
        classes = self._of_numbers(values) if values.ndim == 2 else self._of_colours(values)
        missing = classes < 0
        if missing.any():
            row, column = np.argwhere(missing)[0].tolist()
            place = f"the first at row {row}, column {column}"
            describe = self._wrong_numbers if values.ndim == 2 else self._wrong_colours
            raise BadAnnotation(path, image_id, "pixels", describe(values, missing, place))
        return classes.astype(np.uint8)

    def _of_numbers(self, values: NDArray[np.integer]) -> NDArray[np.int16]:
        inside = (values >= 0) & (values < len(self.numbers))
        return np.where(inside, self.numbers[np.where(inside, values, 0)], np.int16(-1))

    def _of_colours(self, pixels: NDArray[np.integer]) -> NDArray[np.int16]:
        out = np.empty(pixels.shape[:2], np.int16)
        for top in range(0, len(pixels), STRIP):
            code = _codes(pixels[top : top + STRIP])  # (rows, W)
            place = np.searchsorted(self.codes, code).clip(max=len(self.codes) - 1)
            known = self.codes[place] == code
            out[top : top + STRIP] = np.where(known, self.code_classes[place], np.int16(-1))
        return out

    def _wrong_numbers(self, values: NDArray[np.integer], missing: NDArray[np.bool_], place: str) -> str:
        wrong, pixels = np.unique(values[missing]).tolist(), int(missing.sum())
        held = ranges(np.unique(values).tolist())
        hint = f"; add {wrong[0]} to {OPTION}ignore or {OPTION}mapping" if 0 <= wrong[0] <= MAX_NUMBER else ""
        return (
            f"the mask holds {held}, but {ranges(wrong)} {'have' if len(wrong) > 1 else 'has'} no class "
            f"({_count(pixels)}, {place}); expected {self._expected_numbers()}{hint}"
        )

    def _expected_numbers(self) -> str:
        ignored = np.flatnonzero(self.numbers == IGNORE).tolist()
        valid = np.flatnonzero((self.numbers >= 0) & (self.numbers != IGNORE)).tolist()
        names = (f"{number} {printable(self.classes[self.numbers[number]])}" for number in valid)
        text = ", ".join(names) if len(valid) <= SHOWN else ranges(valid)
        return f"{text} and, ignored, {ranges(ignored)}" if ignored else text

    def _wrong_colours(self, pixels: NDArray[np.integer], missing: NDArray[np.bool_], place: str) -> str:
        codes, counts = np.unique(_codes(pixels[missing]), return_counts=True)
        most = int(counts.argmax())
        text = f"the colour {_colour_text(int(codes[most]))} has no class ({_count(int(counts[most]))}"
        text += f"; {_count(int(counts.sum()))} of {len(codes)} such colours" if len(codes) > 1 else ""
        known = [(c, k) for c, k in zip(self.codes.tolist(), self.code_classes.tolist(), strict=True)]
        shown = ", ".join(f"{_colour_text(code)} {self._class_text(k)}" for code, k in known[:SHOWN])
        more = f" and {len(known) - SHOWN} others" if len(known) > SHOWN else ""
        return f"{text}, {place}); expected {shown}{more}; give it a class or add it to {OPTION}ignore"

    def _class_text(self, index: int) -> str:
        return "(ignored)" if index == IGNORE else printable(self.classes[index])


def _codes(pixels: NDArray[np.integer]) -> NDArray[np.int32]:
    """Colours ``(…, 3)`` as numbers 0xRRGGBB ``(…)``."""
    wide = pixels.astype(np.int32)
    return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]


def _colour_text(code: int) -> str:
    return f"{code >> 16},{code >> 8 & 255},{code & 255}"


def _count(pixels: int) -> str:
    return f"{pixels:,} pixel{'' if pixels == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text, such as ``0 to 20, 255``; at most 12 ranges."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found[:SHOWN])
    return f"{text}, …" if len(found) > SHOWN else text


def parse_colour(value: Any) -> Colour | None:
    """The colour that ``[128, 64, 128]``, ``"128,64,128"`` or ``"#804080"`` stands for; None for others."""
    if isinstance(value, str):
        if match := _HEX.fullmatch(value.strip()):
            value = list(bytes.fromhex(match[1]))
        elif match := _DECIMAL.fullmatch(value.strip()):
            value = [int(part) for part in match.groups()]
    if not isinstance(value, list | tuple) or len(value) != 3:
        return None
    red, green, blue = value
    return (red, green, blue) if all(is_int(part) and 0 <= part <= 255 for part in value) else None


def parse_number(value: Any) -> int | None:
    """The number in a mask that an integer or its digits stand for; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        value = int(value)
    return value if is_int(value) and 0 <= value <= MAX_NUMBER else None


def create_legend(
    labels: Sequence[Label] | None,
    *,
    in_colour: bool = False,
    ignored: Iterable[int] = (IGNORE,),
    mapping: Any = None,
    ignore: Any = (),
) -> Legend:
    """The legend of masks with these labels, whose classes are in the order of the labels.

    ``mapping`` gives labels another class: from the name of a class, or from a number in the masks. In the
    second case it has to give all numbers, and ``labels`` may be None. ``ignore`` leaves out classes,
    numbers or colours. The numbers ``ignored`` are left out unless they have a class. With ``in_colour``,
    masks hold colours, or numbers if they are grey.
    """
    mapped = _map(labels, mapping)
    dropped = _Ignored(ignore, labels or (), mapped, in_colour=in_colour)
    kept = [label._replace(name=None) if dropped.drops(label, before) else label for before, label in mapped]
    classes = list(dict.fromkeys(label.name for label in kept if label.name is not None))
    if not 1 <= len(classes) <= IGNORE:
        raise UserError(f"the masks have {len(classes)} classes; give from 1 to {IGNORE}")
    index = {None: IGNORE} | {name: i for i, name in enumerate(classes)}
    of_colour: dict[int, int] = {}
    if in_colour:
        of_colour = {_code(colour): IGNORE for colour in dropped.colours}
        for label in kept:
            if label.colour is None:
                raise UserError(f"the class {label.name!r} has no colour, but others have one; add it")
            known = of_colour.setdefault(_code(label.colour), index[label.name])
            if known != index[label.name]:
                other = "ignored pixels" if known == IGNORE else f"the class {classes[known]!r}"
                text = _colour_text(_code(label.colour))
                raise UserError(f"{other} and {label.name!r} have the same colour, {text}; change one")
    numbers = np.full(MAX_NUMBER + 1, -1, np.int16)
    numbers[[*ignored, *dropped.numbers]] = IGNORE
    if of_colour and all(len(set(code.to_bytes(3))) == 1 for code in of_colour):
        for code, number in of_colour.items():  # all are grey: these are the numbers
            numbers[code & 255] = number
    else:
        for label in kept:
            if label.number is not None:
                numbers[label.number] = index[label.name]
    codes = sorted(of_colour)
    return Legend(
        classes,
        _picture_colours(classes, [before for before, _ in mapped], kept),
        numbers,
        np.array(codes, np.int32),
        np.array([of_colour[code] for code in codes], np.int16),
    )


def _code(colour: Colour) -> int:
    return colour[0] << 16 | colour[1] << 8 | colour[2]


def _picture_colours(
    classes: Sequence[str], before: Sequence[str | None], labels: Sequence[Label]
) -> list[Colour] | None:
    """The colour of each class: that of the label of the same name, or else of its first label."""
    own = {label.name: label.colour for name, label in zip(before, labels, strict=True) if name == label.name}
    first = {label.name: label.colour for label in reversed(labels)}
    found = [own.get(name) or first[name] for name in classes]
    return [colour for colour in found if colour] if all(found) else None


def _map(labels: Sequence[Label] | None, mapping: Any) -> list[tuple[str | None, Label]]:
    """Each label with its class by ``mapping``, and its name before."""
    if mapping is None:
        return [(label.name, label) for label in labels or ()]
    if not isinstance(mapping, Mapping) or not mapping:
        raise UserError(
            f"mapping={brief(mapping)} must give classes by name, such as {{truck: vehicle, bus: vehicle}}, "
            "or by number, such as {0: background, 255: object}"
        )
    names = list(dict.fromkeys(label.name for label in labels or () if label.name is not None))
    for key, target in mapping.items():
        if not isinstance(target, str) and not is_int(target):
            raise UserError(
                f"mapping: {brief(target)} of {brief(key)} is not the name of a class; to leave it out, add "
                f"{brief(key)} to {OPTION}ignore"
            )
    targets = {key: str(target).strip() for key, target in mapping.items()}
    by_name = {key: target for key, target in targets.items() if key in names}
    numbers = {parse_number(key): target for key, target in targets.items() if key not in by_name}
    if None in numbers:
        key = next(key for key in targets if key not in by_name and parse_number(key) is None)
        if labels is None:
            raise UserError(f"mapping names {brief(key)}, but no class has this name; give {OPTION}classes")
        raise unknown("class in mapping", str(key), names)
    if by_name and numbers:
        raise UserError(
            f"mapping={brief(dict(mapping))} mixes names and numbers; give the names of all classes that "
            "change, or the class of every number"
        )
    if by_name:
        return [
            (label.name, label._replace(name=by_name.get(label.name, label.name))) for label in labels or ()
        ]
    return _map_numbers(labels, {n: target for n, target in numbers.items() if n is not None})


def _map_numbers(
    labels: Sequence[Label] | None, targets: Mapping[int, str]
) -> list[tuple[str | None, Label]]:
    if labels is None:
        return [(target, Label(target, number)) for number, target in targets.items()]
    colours = {label.name: label.colour for label in labels if label.name is not None}
    for target in targets.values():
        if target not in colours:
            raise unknown("class in mapping", target, [name for name in colours if name])
    unreached = [name for name in colours if name not in targets.values()]
    if unreached:
        raise UserError(
            f"mapping has no number for {', '.join(map(repr, unreached[:3]))}"
            f"{', …' if len(unreached) > 3 else ''}; give the class of every number, or map names, such as "
            f"{{{unreached[0]}: {next(iter(targets.values()))}}}"
        )
    order = list(colours)
    ordered = sorted(targets.items(), key=lambda item: order.index(item[1]))
    return [(target, Label(target, number, colours[target])) for number, target in ordered]


class _Ignored:
    """The names, numbers and colours that the option ``ignore`` leaves out."""

    def __init__(
        self,
        ignore: Any,
        labels: Sequence[Label],
        mapped: Sequence[tuple[str | None, Label]],
        *,
        in_colour: bool,
    ) -> None:
        self.names: set[str] = set()
        self.numbers: set[int] = set()
        self.colours: set[Colour] = set()
        known = {label.name for label in labels} | {label.name for _, label in mapped}
        items = ignore if isinstance(ignore, list | tuple) else [ignore]
        if in_colour and parse_colour(items) is not None:
            red, green, blue = items
            raise UserError(
                f"ignore={brief(ignore)} may be three numbers or a colour; write '{red},{green},{blue}' for "
                "the colour"
            )
        for item in items:
            if isinstance(item, str) and item in known:
                self.names.add(item)
            elif (number := parse_number(item)) is not None:
                self.numbers.add(number)
            elif (colour := parse_colour(item)) is not None:
                if not in_colour:
                    raise UserError(
                        f"ignore={brief(ignore)}: {brief(item)} is a colour, but the classes have none; give "
                        f"them with {OPTION}colors"
                    )
                self.colours.add(colour)
            elif isinstance(item, str):
                raise unknown("class in ignore", item, [name for name in known if name])
            else:
                raise UserError(
                    f"ignore={brief(ignore)}: {brief(item)} is not a number from 0 to {MAX_NUMBER}, the name "
                    "of a class or a colour, which is written 128,64,128 because # begins a comment"
                )

    def drops(self, label: Label, before: str | None) -> bool:
        return (
            label.name in self.names
            or before in self.names
            or label.number in self.numbers
            or label.colour in self.colours
        )
