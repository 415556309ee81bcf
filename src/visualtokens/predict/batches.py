"""Prediction in batches: images are decoded ahead in threads, results come in the order of the images."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from PIL import Image

from visualtokens.data.decode import BadImage
from visualtokens.errors import UserError
from visualtokens.predict.images import Images
from visualtokens.tasks.prediction import Prediction

if TYPE_CHECKING:
    from visualtokens.tasks import Checkpoint

MAX_THREADS = 8  # by default; each may hold a decoded image


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one image: a prediction, or the reason why it cannot be read."""

    position: int
    name: str
    result: Prediction | BadImage
    image: Image.Image | None = None  # the decoded image, if it was asked for


def predict_images(
    checkpoint: Checkpoint,
    images: Images,
    positions: Iterable[int] | None = None,
    *,
    batch: int | None = None,
    workers: int | None = None,
    keep_images: bool = False,
    stop: Callable[[], bool] = bool,
    **options: Any,
) -> Iterator[Outcome]:
    """Yield the outcome of every image, or of those at ``positions``, in order.

    ``batch`` images (by default as many as the task evaluates at once) pass the model together, while
    ``workers`` threads (by default as many as torch uses, at most 8) decode and prepare the next ones, at
    most as many as a batch has or there are threads. Between two batches, ``stop()`` ends the work.
    ``options`` are those of the task's ``predict``.
    """
    task = checkpoint.task
    if batch is None:
        batch = task.eval_batch if task.predicts_batches else 1
    threads = min(_threads(), MAX_THREADS) if workers is None else workers
    if batch < 1:
        raise UserError(f"batch={batch} is not a number of images; give at least 1")
    if threads < 1:
        raise UserError(f"workers={workers} is not a number of threads; give at least 1")
    return _outcomes(
        checkpoint,
        images,
        iter(range(len(images)) if positions is None else positions),
        batch=batch,
        threads=threads,
        keep_images=keep_images,
        stop=stop,
        options=options,
    )


def _threads() -> int:
    """Return the number of threads that torch uses; where it is not imported, that of the processors."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else os.cpu_count() or 1


def _outcomes(
    checkpoint: Checkpoint,
    images: Images,
    positions: Iterator[int],
    *,
    batch: int,
    threads: int,
    keep_images: bool,
    stop: Callable[[], bool],
    options: dict[str, Any],
) -> Iterator[Outcome]:
    def load(position: int) -> tuple[Any, Image.Image | None] | BadImage:
        try:
            image = images.read(position)
            return checkpoint.task.prepare(checkpoint, image), image if keep_images else None
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds the decoded pixels

    ahead = max(batch, threads)
    waiting: deque[tuple[int, Future[tuple[Any, Image.Image | None] | BadImage]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="predict")
    try:
        while not stop():
            for position in islice(positions, ahead - len(waiting)):
                waiting.append((position, pool.submit(load, position)))
            if not waiting:
                return
            taken = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            loaded = [future.result() for _, future in taken]
            for position in islice(positions, ahead - len(waiting)):  # decoded while the model computes
                waiting.append((position, pool.submit(load, position)))
            readable = [each[0] for each in loaded if not isinstance(each, BadImage)]
            predictions = iter(
                checkpoint.task.predict_batch(checkpoint, readable, **options) if readable else ()
            )
            for (position, _), each in zip(taken, loaded, strict=True):
                if isinstance(each, BadImage):
                    yield Outcome(position, images[position], each)
                else:
                    yield Outcome(position, images[position], next(predictions), each[1])
    finally:
        pool.shutdown(cancel_futures=True)
