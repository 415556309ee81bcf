"""Weights from the Hugging Face Hub: timm's pretrained ones, and repositories in timm's layout."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import errors, hf_hub_download
from torch import nn

from visualtokens.errors import UserError
from visualtokens.files import one_line
from visualtokens.tasks.schema import BUILD_ERRORS

_ERRORS: tuple[type[Exception], ...] = (OSError, *BUILD_ERRORS)


def download(repository: str, config: str, weights: Sequence[str]) -> tuple[Path, Path]:
    """Return the file ``config`` of a repository and the first of ``weights`` that it has, from the cache or
    the network.

    ``repository`` is ``organization/name``, with ``@revision`` for another than the newest.
    """
    name, _, revision = repository.partition("@")
    first, *others = weights
    try:
        with _quiet():
            described = hf_hub_download(name, config, revision=revision or None)
            try:
                file = hf_hub_download(name, first, revision=revision or None)
            except errors.LocalEntryNotFoundError:
                raise
            except errors.EntryNotFoundError:
                if not others:
                    raise
                return download(repository, config, others)
    except (OSError, ValueError, errors.EntryNotFoundError) as error:
        raise UserError(
            f"the repository {repository!r} cannot be fetched: {_reason(error, name, '--init FOLDER')}"
        ) from error
    return Path(described), Path(file)


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
    if isinstance(error, OSError):
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
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError):
        return (
            "the Hugging Face Hub cannot be reached, and they are not in its cache on this machine; "
            f"download {repository or 'them'} where there is a network and give its folder: {instead}, "
            "or set HF_HOME to a cache that has them"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return "it has no config.json and model.safetensors in timm's layout; give another one"
    return one_line(error)


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
