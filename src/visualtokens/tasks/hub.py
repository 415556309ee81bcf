"""Weights from the Hugging Face Hub: timm's pretrained ones, and repositories in timm's layout."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import (
    errors,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from torch import nn

from visualtokens.errors import UserError
from visualtokens.files import CONFIG, MAX_JSON, WEIGHTS, one_line
from visualtokens.tasks.schema import BUILD_ERRORS

HUB, LOCAL = "hf-hub:", "local-dir:"  # timm's prefixes
MAX_WEIGHTS = 32 * 2**30  # bytes; the largest models of timm have about 24 GB
# What the Hub's library raises: its connection errors are no OSError.
HUB_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, errors.HTTPError, errors.EntryNotFoundError)
_COMMIT = re.compile("[0-9a-f]{40}")
_ERRORS: tuple[type[Exception], ...] = (OSError, errors.HTTPError, *BUILD_ERRORS)


def checkpoint_folder(source: str | Path, *, instead: str = "--checkpoint FOLDER") -> Path:
    """Return the folder of a checkpoint: a path, ``local-dir:PATH``, or ``hf-hub:ORGANIZATION/NAME``.

    Of a repository, ``config.json`` and ``model.safetensors`` are downloaded unless they are in the cache.
    In errors, ``instead`` is the option that takes a downloaded folder.
    """
    text = str(source)
    if not text.startswith(HUB):
        return Path(text.removeprefix(LOCAL))
    return download(text.removeprefix(HUB), CONFIG, (WEIGHTS,), instead=instead)[0].parent


def download(
    repository: str, config: str, weights: Sequence[str], *, instead: str = "--init FOLDER"
) -> tuple[Path, Path]:
    """Return the file ``config`` of a repository and the first of ``weights`` that it has, from the cache or
    the network.

    ``repository`` is ``organization/name``, with ``@revision`` for another than the newest.
    """
    name, _, revision = repository.partition("@")
    try:
        with _quiet():
            described = Path(_fetch(name, config, revision or None, limit=MAX_JSON))
            if _COMMIT.fullmatch(described.parent.name):  # both files are of one commit
                revision = described.parent.name
            *others, last = weights
            for file in others:
                with contextlib.suppress(_Absent):
                    return described, Path(_fetch(name, file, revision or None, limit=MAX_WEIGHTS))
            return described, Path(_fetch(name, last, revision or None, limit=MAX_WEIGHTS))
    except HUB_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"the repository {repository!r} cannot be fetched: {_reason(error, name, instead)}"
        ) from error


class _Absent(errors.EntryNotFoundError):
    """The repository does not have a file of this name."""


def _fetch(repository: str, name: str, revision: str | None, *, limit: int) -> str:
    """Download a file of at most ``limit`` bytes, unless it is in the cache."""
    size = _size(repository, name, revision)
    if size is not None and size > limit:
        raise UserError(
            f"{name} of the repository {repository!r} has {size / 2**20:,.0f} MB, more than the "
            f"{limit / 2**20:,.0f} MB that are loaded; give another repository"
        )
    try:
        return hf_hub_download(repository, name, revision=revision)
    except errors.LocalEntryNotFoundError:
        raise
    except errors.EntryNotFoundError as error:
        raise _Absent(one_line(error)) from error


def _size(repository: str, name: str, revision: str | None) -> int | None:
    """Return the size of a file on the Hub; None if it is in the cache or the Hub does not tell."""
    try:
        if _COMMIT.fullmatch(revision or "") and isinstance(
            try_to_load_from_cache(repository, name, revision=revision), str
        ):
            return None
        return get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), token=get_token()).size
    except HUB_ERRORS:  # downloading it then states why, or finds it in the cache
        return None


def pretrained_model(
    name: str, *, origin: str, instead: str, model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Return a model with timm's pretrained weights, from the cache or the network.

    In errors, ``origin`` names the weights, and ``instead`` is the option that takes others.
    """
    try:
        with _quiet():
            return timm.create_model(name, pretrained=True, **(model_args or {}))
    except UserError:
        raise
    except _ERRORS as error:
        raise UserError(f"{origin} {_problem(name, error, instead)}") from error


def _problem(name: str, error: Exception, instead: str) -> str:
    cfg = timm.get_pretrained_cfg(name)
    if isinstance(error, OSError | errors.HTTPError):
        return f"cannot be fetched: {_reason(error, cfg.hf_hub_id if cfg else None, instead)}"
    if "loading state_dict" in str(error):
        return f"do not fit its model_args: {one_line(error)}; leave these arguments out"
    if cfg is not None and cfg.has_weights:
        return f"cannot be loaded: {one_line(error)}"
    tagged = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    others = f"those of {' or '.join(tagged[:3])}" if tagged else f"others: {instead}"
    return f"do not exist in timm; give {others}"


def _reason(error: Exception, repository: str | None, instead: str) -> str:
    """Return why a repository cannot be read, and what to do."""
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face Hub has no such repository, or it needs a login: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; leave out what follows the @"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError) or is_offline(error):
        return (
            "the Hugging Face Hub cannot be reached, and they are not in its cache on this machine; "
            f"download {repository or 'them'} where there is a network and give its folder: {instead}, "
            "or set HF_HOME to a cache that has them"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return "it has no config.json and model.safetensors in timm's layout; give another one"
    return one_line(error)


def is_offline(error: Exception) -> bool:
    """Return whether the Hub did not answer at all."""
    return isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the Hub's warnings about every failed attempt; the error after the last one says it all."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
