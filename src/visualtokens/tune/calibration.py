"""Where a model can best lose its tokens, measured on a few unlabelled images.

A schedule is described by the drop rate of every block, u_l = −log(k_l / n_l) for n_l tokens before its pool
and k_l after it. At the best schedule of a cost, one more token dropped changes the output equally much per
multiply-add saved, whichever block drops it. :func:`calibrate` measures that exchange rate block by block and
shifts drops from blocks where it is high to blocks where it is low. A :class:`Profile` holds the result; it
is scaled to meet other budgets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.grouping import record_groupings
from visualtokens.modes import eval_mode
from visualtokens.reduce.encoder import Encoder
from visualtokens.reduce.families import encoder_of
from visualtokens.reduce.methods import DEFAULT_METHOD, LEAST_SHARE, find_method
from visualtokens.reduce.reduction import reduce, restore
from visualtokens.reduce.schedule import macs as formula_macs
from visualtokens.reduce.state import State

ROUNDS = 3  # shifts of the drops between blocks
STEP = 0.25  # increase of a block's drop rate in a measurement: 22 % of its tokens
PACE = 0.5  # exponent of the exchange rate in one shift
MOST_SHIFT = 1.5  # factor by which a shift raises or lowers a rate at most
LEAST_RATE = 0.02  # of a block, so that a block that drops nothing can start to


@dataclass(frozen=True)
class Profile:
    """Relative drop rates of the blocks; the largest is 1."""

    rates: tuple[float, ...]

    def keep(self, scale: float, patches: int, *, fewest: int) -> tuple[int, ...]:
        """Tokens after each block if block l drops by the rate ``scale · rates[l]``.

        The last blocks need a few tokens: below a sixteenth of the patches, only a scale above 1 goes.
        ``fewest`` is the smallest number: 0 if the head reads prefix tokens only, and then the last block,
        whose patches nothing reads, keeps none; else 1.
        """
        total, counts = 0.0, []
        least = patches * min(LEAST_SHARE, LEAST_SHARE / max(scale, 1e-9))
        for rate in self.rates:
            total += scale * rate
            counts.append(max(1, math.ceil(max(least, patches * math.exp(-total)) - 1e-9)))
        return (*counts[:-1], counts[-1] if fewest else 0)

    def scaled(
        self, cost: Callable[[Sequence[int]], float], limit: float, patches: int, fewest: int
    ) -> float:
        """The smallest scale whose schedule costs at most ``limit``, by bisection."""
        low, high = 0.0, 64.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            if cost(self.keep(middle, patches, fewest=fewest)) <= limit:
                high = middle
            else:
                low = middle
        return high


# Between a constant rate, which is best for the lowest budgets, and the rates of a ViT-B/16 on ImageNet,
# calibrated at 0.4 of its multiply-adds; for blocks at equal steps.
TYPICAL = (0.03, 0.68, 0.73, 0.77, 0.77, 0.86, 1.0, 0.96, 0.83, 0.73, 0.68, 0.0)


def default_profile(blocks: int) -> Profile:
    """The drop rates of a model that was not calibrated: those of a typical one, interpolated."""
    if blocks < 3:
        return Profile((1.0,) * blocks)
    rates = []
    for i in range(blocks):
        place = i * (len(TYPICAL) - 1) / (blocks - 1)
        low = min(int(place), len(TYPICAL) - 2)
        rates.append(TYPICAL[low] + (place - low) * (TYPICAL[low + 1] - TYPICAL[low]))
    return Profile(tuple(rate / max(rates) for rate in rates))


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`."""

    profile: Profile
    method: str
    keep: tuple[int, ...]  # the schedule at the budget of the calibration
    macs: int
    full_macs: int
    change: float  # of the output by this schedule, see `output_change`
    default_change: float  # by the default profile at the same cost
    images: int


def calibrate(
    model: nn.Module,
    images: Tensor,
    *,
    share: float = 0.5,
    method: str,
    rounds: int = ROUNDS,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find drop rates that change the model's output least at ``share`` of its multiply-adds.

    ``images (n, 3, H, W)`` are preprocessed; labels are not needed. ``model`` is not changed. ``progress``
    is called with the number of batches done and their total.
    """
    if not 0 < share < 1:
        raise UserError(f"share={share} must be between 0 and 1")
    if find_method(method)[1] is not None:
        raise UserError(f"{method} cannot keep any number of tokens, so there is nothing to calibrate")
    encoder = encoder_of(plain_copy(model))
    patches = math.prod(encoder.grid((images.shape[2], images.shape[3])))
    full = formula_macs(encoder.root, patches=patches).total
    with eval_mode(encoder.root), torch.inference_mode():
        like = next(encoder.root.parameters())
        batches = [part.to(like) for part in images.split(batch)]
        whole = [encoder.output(part) for part in batches]
        reduce(encoder.root, method, keep=1.0)
        meter = _Meter(encoder, patches, batches, whole, progress, rounds)
        return _shift(meter, share * full, full, method, rounds)


def _shift(meter: _Meter, limit: float, full: int, method: str, rounds: int) -> Calibration:
    """Equalise the exchange rates in ``rounds`` steps; return the schedule that changed the output least."""
    fewest = 0 if meter.encoder.reads_prefix_only else 1
    profile = default_profile(len(meter.encoder.blocks))
    tried: list[tuple[float, Profile, tuple[int, ...]]] = []
    for index in range(rounds + 1):
        scale = profile.scaled(meter.macs, limit, meter.patches, fewest)
        keep = profile.keep(scale, meter.patches, fewest=fewest)
        last = index == rounds
        steps = [] if last else _neighbours(profile, scale, meter.patches, fewest)
        change, *changes = meter(keep, steps)  # (images,) each
        tried.append((change.mean().item(), profile, keep))
        if not last:
            saved = [meter.macs(keep) - meter.macs(step) for step in steps]
            rates = [scale * rate for rate in profile.rates]
            profile = _shifted(rates, [each - change for each in changes], saved)
    least, profile, keep = min(tried, key=lambda each: each[0])
    return Calibration(
        profile=profile,
        method=method,
        keep=keep,
        macs=int(meter.macs(keep)),
        full_macs=full,
        change=least,
        default_change=tried[0][0],
        images=sum(map(len, meter.batches)),
    )


def _neighbours(profile: Profile, scale: float, patches: int, fewest: int) -> list[tuple[int, ...]]:
    """The schedules in which one block drops at a higher rate; the last block is left out."""
    rates = [scale * rate for rate in profile.rates]
    raised = (Profile((*rates[:i], rates[i] + STEP, *rates[i + 1 :])) for i in range(len(rates) - 1))
    return [each.keep(1.0, patches, fewest=fewest) for each in raised]


def _shifted(rates: Sequence[float], changes: Sequence[Tensor], saved: Sequence[float]) -> Profile:
    """Lower the rates where the output changes much per multiply-add saved, raise the others.

    ``changes[l] (images,)`` are those of the output when block l drops more. A mean below its standard error
    is noise, and so are large differences between neighbouring blocks: the exchange rates are smoothed.
    """
    exchange = [
        math.log(max(_mean_or_error(change), 1e-9) / max(gain, 1.0))
        for change, gain in zip(changes, saved, strict=True)
    ]
    padded = [exchange[0], *exchange, exchange[-1]]
    smooth = [(padded[i] + 2 * padded[i + 1] + padded[i + 2]) / 4 for i in range(len(exchange))]
    mean = sum(smooth) / len(smooth)
    limit = math.log(MOST_SHIFT)
    new = [
        max(rate, LEAST_RATE) * math.exp(min(limit, max(-limit, PACE * (mean - value))))
        for rate, value in zip(rates[:-1], smooth, strict=True)
    ]
    highest = max(new)
    return Profile((*(rate / highest for rate in new), 0.0))


def _mean_or_error(change: Tensor) -> float:
    """The mean, or its standard error if that is larger."""
    error = change.std(correction=0).item() / max(1, len(change) - 1) ** 0.5
    return max(change.mean().item(), error)


class _Meter:
    """Measures how much schedules change the output of a model, which is reduced, on some images."""

    def __init__(
        self,
        encoder: Encoder,
        patches: int,
        batches: Sequence[Tensor],
        whole: Sequence[Tensor],
        progress: Callable[[int, int], None] | None,
        rounds: int,
    ) -> None:
        self.encoder, self.patches, self.batches, self.whole = encoder, patches, batches, whole
        self._progress, self._done, self._total = progress, 0, (rounds + 1) * len(batches)

    def macs(self, keep: Sequence[int]) -> float:
        return formula_macs(self.encoder.root, patches=self.patches, keep=keep).total

    def __call__(self, keep: Sequence[int], steps: Sequence[Sequence[int]]) -> list[Tensor]:
        """The change of the output of every image by ``keep``, and by each of ``steps``: ``(images,)`` each.

        Step i differs from ``keep`` from block i on, so it starts there from the tokens of ``keep``.
        """
        changes: list[list[Tensor]] = [[] for _ in range(1 + len(steps))]
        for images, whole in zip(self.batches, self.whole, strict=True):
            x, state, positions = self.encoder.embed(images)
            before: list[tuple[Tensor, State]] = []
            for i, k in enumerate(keep):
                before.append((x, state))
                x, state = self.encoder.run_block(i, x, state, k, positions)
            changes[0].append(output_change(whole, self.encoder.read_out(images, x, state)))
            for first, step in enumerate(steps):
                x, state = before[first]
                for i in range(first, len(step)):
                    x, state = self.encoder.run_block(i, x, state, step[i], positions)
                changes[1 + first].append(output_change(whole, self.encoder.read_out(images, x, state)))
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
        return [torch.cat(parts) for parts in changes]


def find_thresholds(
    model: nn.Module,
    images: Tensor,
    *,
    macs: float,
    method: str = DEFAULT_METHOD,
    profile: Profile | None = None,
    steps: int = 8,
) -> tuple[float, ...]:
    """The ``threshold`` of :func:`visualtokens.reduce` for a mean share ``macs`` of the multiply-adds.

    Block by block, the threshold with which ``images (n, 3, H, W)``, preprocessed and run one by one, keep on
    average as many tokens as the schedule of this cost; ``profile`` is that of the schedule, by default
    :func:`default_profile`. Each block runs ``steps`` times. ``model`` is not changed.
    """
    if not 0 < macs < 1:
        raise UserError(f"macs={macs} must be between 0 and 1, a share of the whole model's")
    encoder = encoder_of(plain_copy(model))
    blocks, patches = len(encoder.blocks), math.prod(encoder.grid((images.shape[2], images.shape[3])))
    full = formula_macs(encoder.root, patches=patches).total
    profile = profile or default_profile(blocks)
    fewest = 0 if encoder.reads_prefix_only else 1

    def cost(keep: Sequence[int]) -> float:
        return formula_macs(encoder.root, patches=patches, keep=keep).total

    found: list[float] = []
    with eval_mode(encoder.root), torch.inference_mode():
        reduce(encoder.root, method, threshold=1.0)
        scale = profile.scaled(cost, macs * full, patches, fewest)
        wanted = profile.keep(scale, patches, fewest=fewest)
        like = next(encoder.root.parameters())
        steps_before = [encoder.embed(image.to(like)) for image in images.split(1)]
        least = encoder.module.reduction.schedule.tokens(patches)
        for i in range(blocks):
            own: Any = encoder.blocks[i]
            low, high = 1e-4, 8.0
            for step in range(steps + 1):
                middle = high if step == steps else math.sqrt(low * high)
                own.reduction.pool.threshold = middle
                after = [encoder.run_block(i, x, state, least[i], at) for x, state, at in steps_before]
                mean = sum(x.shape[1] - encoder.prefix for x, _ in after) / len(after)
                low, high = (low, middle) if mean < wanted[i] else (middle, high)
            found.append(middle)
            steps_before = [(*pair, at) for pair, (_, _, at) in zip(after, steps_before, strict=True)]
    return tuple(found)


def tokens_of(encoder: Encoder, image: Tensor) -> tuple[int, ...]:
    """The tokens after each block of a reduced model for ``image (1, 3, H, W)``."""
    with record_groupings(encoder.root) as groupings:
        encoder.root(image)
    return tuple(grouping.tokens for grouping in groupings.values())


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of the model without reduction that shares its weights."""
    shared = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    other: nn.Module = copy.deepcopy(model, shared)
    return restore(other) if encoder_of(other).reduced else other


def output_change(whole: Tensor, reduced: Tensor) -> Tensor:
    """The relative squared error ‖z − z'‖² / ‖z‖² of centred logits or features ``(B, D)``: ``(B,)``.

    It is less noisy than a distance between the predicted distributions, which depends on few images near a
    decision boundary.
    """
    z, other = (out.float() - out.float().mean(1, keepdim=True) for out in (whole, reduced))
    return (z - other).square().sum(1) / z.square().sum(1).clamp_min(1e-12)
