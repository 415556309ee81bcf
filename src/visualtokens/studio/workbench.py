"""What the studio computes: answers, tokens, explanations and measured speed of its models."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from visualtokens.data import BadImage, read_image
from visualtokens.errors import UserError, unknown
from visualtokens.explain import Explanation
from visualtokens.explain.explainer import variants
from visualtokens.explain.explanation import Variant
from visualtokens.explain.hiding import Hide
from visualtokens.explain.inputs import as_batch, prepare
from visualtokens.explain.layers import Layer, layers_of
from visualtokens.explain.regions import find_regions
from visualtokens.explain.render import Box
from visualtokens.grouping import Tap, record_groupings
from visualtokens.modes import eval_mode
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import DEFAULT_METHOD, METHODS
from visualtokens.reduce.reduction import reduce
from visualtokens.reduce.schedule import Schedule
from visualtokens.reduce.schedule import macs as macs_of
from visualtokens.studio.examples import is_of_digits
from visualtokens.tasks import Checkpoint
from visualtokens.tasks.prediction import Classification
from visualtokens.tune.calibration import plain_copy
from visualtokens.tune.planning import Measurement, Speedometer, input_size, ladder

LOOK = 0.5  # share of the multiply-adds at which the tokens of a plain ViT are shown
SHARES = (0.8, 0.65, 0.5, 0.4, 0.3)  # of the multiply-adds, for the trade-off curve
ROUNDS = 3  # of a speed measurement
REGIONS = 24  # of a model that groups nothing
ENTRIES, PIXELS = 256, 2**26  # results in the cache, and pixels of the photos that they hold
NOTHING_TO_REDUCE = (
    "This model groups its patches into a few tokens by itself, so there is nothing to reduce. "
    "A plain vision transformer can be made faster here: vtok studio --model deit_small_patch16_224"
)
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Photo:
    """An RGB image and a key of its content."""

    image: Image.Image
    key: str

    @staticmethod
    def of(image: Image.Image) -> Photo:
        return Photo(image, hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest())

    @staticmethod
    def read(path: str | Path) -> Photo:
        """Read a file; the error of an unreadable one has its name without its folder."""
        try:
            return Photo.of(read_image(path))
        except BadImage as error:
            raise BadImage(Path(error.path).name, error.reason.replace(str(path), Path(path).name)) from error


class Setting(NamedTuple):
    """How the tokens of a vision transformer are reduced."""

    method: str
    keep: tuple[int, ...]  # tokens after each block


class Source(NamedTuple):
    """Where a model of the studio came from."""

    name: str  # what `visualtokens.load` or `timm.create_model` takes
    is_checkpoint: bool
    weights: str = "pretrained"  # of a timm model, or their file


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of each layer on a photo."""

    layers: tuple[Layer, ...]
    box: Box  # of the photo that the model saw
    title: str
    note: str = ""  # what is shown if the model has no tokens of its own


@dataclass(frozen=True)
class Point:
    """A schedule on the trade-off curve: its cost, and its answer for one photo."""

    share: float  # of the multiply-adds
    probability: float  # of the class that the whole model predicts


class Cache:
    """The most recent results by key: at most ``entries``, and photos of at most ``pixels`` in all.

    The last result stays, whatever its size.
    """

    def __init__(self, entries: int = ENTRIES, pixels: int = PIXELS) -> None:
        self.entries, self.pixels = entries, pixels
        self._results: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def __call__(self, key: tuple[Any, ...], compute: Callable[[], V]) -> V:
        if key not in self._results:
            self._results[key] = compute()
        self._results.move_to_end(key)
        while len(self._results) > 1 and (len(self._results) > self.entries or self._held() > self.pixels):
            self._results.popitem(last=False)
        return self._results[key]

    def __len__(self) -> int:
        return len(self._results)

    def _held(self) -> int:
        images = (found.image for found in self._results.values() if isinstance(found, Explanation))
        return sum(image.width * image.height for image in images)


class Workbench:
    """The models of a studio by name, which all classify, and what it computes with them.

    Results are cached by the content of the photo and the options. A workbench serves one caller at a time.
    """

    def __init__(self, models: Mapping[str, Checkpoint]) -> None:
        for name, checkpoint in models.items():
            if checkpoint.task.name != "classify":
                raise UserError(
                    f"{name!r} is a model for the task {checkpoint.task.name!r}; the studio shows classifiers"
                )
        self.models = dict(models)
        self._cache = Cache()

    def checkpoint(self, name: str) -> Checkpoint:
        if name not in self.models:
            raise unknown("model", name, self.models)
        return self.models[name]

    # Answers and tokens.

    def answer(self, name: str, photo: Photo, setting: Setting | None = None) -> Classification:
        """Return the class probabilities, of the reduced model if there is a ``setting``."""

        def predict() -> Classification:
            found = self._reduced(name, setting).predict(photo.image)
            assert isinstance(found, Classification)
            return found

        return self._cache(("answer", name, photo.key, setting), predict)

    def tokens(self, name: str, photo: Photo, setting: Setting | None = None) -> Tokens:
        """Return the tokens of every layer of the model, reduced by ``setting``.

        A vision transformer that keeps all patches is shown with half of its multiply-adds, any other model
        without tokens with the regions of its features.
        """
        return self._cache(("tokens", name, photo.key, setting), lambda: self._tokens(name, photo, setting))

    def _tokens(self, name: str, photo: Photo, setting: Setting | None) -> Tokens:
        checkpoint, title, note = self._reduced(name, setting), "The tokens of every layer", ""
        if setting is None and not _has_taps(checkpoint.model) and self.reducible(name) is None:
            setting = self.setting(name, DEFAULT_METHOD, macs=LOOK)
            checkpoint = self._reduced(name, setting)
            title = f"Its tokens with half of the multiply-adds ({DEFAULT_METHOD})"
            note = "This model keeps every patch as a token; here it is shown with fewer."
        model = checkpoint.model
        given = prepare(model, photo.image, checkpoint.preprocess)
        x = as_batch(model, given.x)
        with eval_mode(model), torch.inference_mode():
            if _has_taps(model):
                with record_groupings(model) as groupings:
                    model(x)
                layers = tuple(layer for layer in layers_of(groupings) if layer.tokens)
            else:
                found = find_regions(model, x, {}, regions=REGIONS)
                layers = (Layer(found.source, "hard", found.count, found.labels),)
                title = "The regions of its features"
                note = "This model has no tokens; here its features are grouped into regions."
        return Tokens(layers, given.crop_box, title, note)

    # Explanations.

    def why(
        self,
        name: str,
        photo: Photo,
        *,
        target: int | None = None,
        against: int | None = None,
        budget: int,
        hide: Hide | None = None,
    ) -> Explanation:
        """Explain the probability of the class ``target``, by default the predicted one."""
        hide = hide or self.default_hide(name)
        options: dict[str, Any] = dict(target=target, against=against, budget=budget, hide=hide)
        return self._cache(
            ("why", name, photo.key, *options.values()),
            lambda: self.checkpoint(name).explain(photo.image, **options),
        )

    def default_hide(self, name: str) -> Hide:
        """Return what stands in for hidden regions: black for digits, which are white on black."""
        return "black" if is_of_digits(self.checkpoint(name)) else "mean"

    def variants(
        self, name: str, photo: Photo, explanation: Explanation, chosen: Sequence[int]
    ) -> tuple[Variant, Variant]:
        """Return the photo with only the ``chosen`` regions of an explanation, and without them."""
        checkpoint, asked = self.checkpoint(name), (explanation.target, explanation.against)

        def compute() -> tuple[Variant, Variant]:
            subject = checkpoint.task.subject(checkpoint, photo.image, target=asked[0], against=asked[1])
            return variants(subject, explanation, chosen)

        return self._cache(("variants", name, photo.key, asked, explanation.hide, tuple(chosen)), compute)

    # Fewer tokens.

    def reducible(self, name: str) -> str | None:
        """Return why the tokens of a model cannot be reduced, None if they can."""
        model = self.checkpoint(name).model
        try:
            encoder = encoder_of(model)
        except UserError as error:
            return NOTHING_TO_REDUCE if _has_taps(model) else str(error)
        return "This model is reduced already; open the whole model." if encoder.reduced else None

    def setting(
        self, name: str, method: str, *, macs: float | None = None, keep: float | None = None
    ) -> Setting:
        """Return the schedule with at most this share of the multiply-adds, or with this share of the tokens
        after the last block but one."""
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if keep is not None:
            encoder = encoder_of(self.checkpoint(name).model)
            return Setting(method, Schedule.of(keep, len(encoder.blocks)).tokens(encoder.patches))
        assert macs is not None
        rungs = self._ladder(name, method)
        rung = next((rung for rung in rungs if rung.macs <= macs * rungs[0].macs), rungs[-1])
        return Setting(method, rung.keep)

    def share(self, name: str, setting: Setting | None) -> float:
        """Return the multiply-adds of the model as a share of those of the whole model."""
        whole = self.macs(name, None)
        return self.macs(name, setting) / whole

    def macs(self, name: str, setting: Setting | None) -> int:
        """Return the multiply-adds per image."""
        return self._cache(("macs", name, setting), lambda: macs_of(self._reduced(name, setting).model).total)

    def speed(self, name: str, setting: Setting) -> tuple[Measurement, Measurement]:
        """Measure the whole and the reduced model in turns, image by image."""
        whole, reduced = self._speeds(name, setting.method, (setting.keep,))
        return whole, reduced

    def curve(self, name: str, photo: Photo, method: str) -> list[Point]:
        """Return the trade-off of a method for a photo, the whole model first."""
        settings = [None, *self._settings(name, method)]
        return [self.point(name, photo, setting) for setting in settings]

    def point(self, name: str, photo: Photo, setting: Setting | None) -> Point:
        """Return the place of a setting on the trade-off curve."""
        return Point(self.share(name, setting), self.probability(name, photo, setting))

    def _settings(self, name: str, method: str) -> list[Setting]:
        """Return the reduced models of the curve."""
        return list(dict.fromkeys(self.setting(name, method, macs=share) for share in SHARES))

    def speedup_share(self, name: str, method: str, speedup: float) -> float:
        """Return the share of the multiply-adds at which the curve reaches a speed-up, by interpolation."""
        settings = self._settings(name, method)
        speeds = self._speeds(name, method, tuple(setting.keep for setting in settings))
        gains = [1.0, *(speed.speedup.median for speed in speeds[1:])]
        shares = [1.0, *(self.share(name, setting) for setting in settings)]
        order = np.argsort(gains)
        return float(np.interp(speedup, np.array(gains)[order], np.array(shares)[order]))

    def probability(self, name: str, photo: Photo, setting: Setting | None) -> float:
        """Return the probability of the class that the whole model predicts."""
        predicted = int(np.asarray(self.answer(name, photo).probabilities).argmax())
        return float(np.asarray(self.answer(name, photo, setting).probabilities)[predicted])

    def _speeds(self, name: str, method: str, keeps: tuple[tuple[int, ...], ...]) -> list[Measurement]:
        def measure() -> list[Measurement]:
            model = self.checkpoint(name).model
            meter = Speedometer(model, method=method, size=input_size(model), batch=1, rounds=ROUNDS)
            return meter(list(keeps))

        return self._cache(("speed", name, method, keeps), measure)

    def _ladder(self, name: str, method: str) -> Sequence[Any]:
        model = self.checkpoint(name).model
        return self._cache(("ladder", name, method), lambda: ladder(model, method, size=input_size(model)))

    def _reduced(self, name: str, setting: Setting | None) -> Checkpoint:
        """Return a checkpoint with the same weights and fewer tokens."""
        checkpoint = self.checkpoint(name)
        if setting is None:
            return checkpoint
        reason = self.reducible(name)
        if reason is not None:
            raise UserError(reason)

        def make() -> Checkpoint:
            model = reduce(plain_copy(checkpoint.model), setting.method, keep=setting.keep)
            return replace(checkpoint, model=model)

        return self._cache(("reduced", name, setting), make)


def _has_taps(model: nn.Module) -> bool:
    return any(isinstance(module, Tap) for module in model.modules())


def change(before: Classification, after: Classification) -> str:
    """Return in a sentence how an answer changed."""
    (was, p), (now, q) = before.top[0], after.top[0]
    if was != now:
        return f"The answer changed from “{was}” ({p:.0%}) to “{now}” ({q:.0%})."
    distance = math.fsum(
        abs(np.asarray(before.probabilities, dtype=float) - np.asarray(after.probabilities, dtype=float))
    )
    return (
        f"The answer is still “{now}”: {p:.0%} before, {q:.0%} now "
        f"({distance / 2:.1%} of the probability moved)."
    )
