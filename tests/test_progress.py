"""Bars, log lines and headers, with a clock that the tests move."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from visualtokens import progress
from visualtokens.progress import (
    Counted,
    Progress,
    bars_hidden,
    count,
    duration,
    hardware,
    header,
    on_terminal,
    one_image,
    parameters,
    rate,
    track,
)


@dataclass
class Clock:
    """A clock that moves on request."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A terminal that remembers what it showed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="visualtokens.progress")
    return caplog


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr; not in a fixture, because pytest sets stderr between fixtures and tests."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def test_a_line_every_30_seconds(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with Progress("epoch 2/3", total=100, unit="step", later=100, clock=clock) as report:
        for step in range(7):
            clock.now += 10  # the lines are due after steps 3 and 6
            report.advance(images=64, note=lambda step=step: f"loss {10 - step}.000")
    assert log.messages == [
        "epoch 2/3: 3 of 100 steps, 6.4 images/s, loss 8.000, 16 min left (33 min in all)",
        "epoch 2/3: 6 of 100 steps, 6.4 images/s, loss 5.000, 16 min left (32 min in all)",
    ]


def test_slow_steps_get_one_line_each(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    for _ in track([1, 2, 3], "read", unit="image", images=one_image, clock=clock):
        clock.now += 100
    assert log.messages == [
        "read: 1 of 3 images, 0.01 images/s, 3 min left",
        "read: 2 of 3 images, 0.01 images/s, 2 min left",
        "read: 3 of 3 images, 0.01 images/s, 0 s left",
    ]


def test_the_rate_is_that_of_this_process(log: pytest.LogCaptureFixture) -> None:
    """A resumed epoch does not count the steps before as its own."""
    clock = Clock()
    with Progress("epoch 1/1", total=100, done=90, unit="step", clock=clock) as report:
        assert report.line() == "epoch 1/1: 90 of 100 steps, — images/s"
        clock.now += 40
        report.advance(images=100)
    assert log.messages == ["epoch 1/1: 91 of 100 steps, 2.5 images/s, 6 min left"]


def test_notes_are_made_only_when_they_are_shown(log: pytest.LogCaptureFixture) -> None:
    report = Progress("x", total=2, unit="step", clock=Clock())
    report.advance(note=lambda: pytest.fail("not shown"))
    hidden = Progress("x", total=2, unit="step", shown=False)
    hidden.advance(note=lambda: pytest.fail("not shown"))
    assert log.messages == []


@pytest.mark.parametrize(
    ("items", "line"),
    [
        ([[1, 2], [3]], "evaluate: 1 of 2 batches, 0.05 images/s, 40 s left"),
        (Counted(iter([[1, 2], [3]]), 5), "evaluate: 1 of 5 batches, 0.05 images/s, 3 min left"),
        (iter([[1, 2], [3]]), "evaluate: 1 batch, 0.05 images/s"),
    ],
    ids=["list", "counted", "iterator"],
)
def test_items_with_and_without_a_length(
    log: pytest.LogCaptureFixture, items: list[list[int]], line: str
) -> None:
    clock, seen = Clock(), []
    for batch in track(items, "evaluate", clock=clock):
        clock.now += 40
        seen.append(batch)
    assert seen == [[1, 2], [3]]
    assert log.messages[0] == line


def test_an_error_in_the_items_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)

    def items() -> Iterator[list[int]]:
        yield [1]
        raise KeyError("x")

    with pytest.raises(KeyError):
        list(track(items(), "evaluate"))
    assert terminal.getvalue().endswith("\r"), "the bar is cleared"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    terminal, clock = open_terminal(monkeypatch), Clock()
    with Progress("epoch 1/2", total=4, unit="step", later=4, clock=clock) as report:
        assert "epoch 1/2:   0%" in terminal.getvalue()
        assert "0/4 [00:00<?, — images/s]" in terminal.getvalue()
        for _ in range(4):
            clock.now += 40
            report.advance(images=80, note=lambda: "loss 1.000")
    shown = terminal.getvalue()
    assert "4/4 [" in shown
    assert "2 images/s, loss 1.000]" in shown
    assert "\n" not in shown
    assert log.messages == []


def test_text_is_written_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with Progress("epoch 1/2", total=4, unit="step"):
        drawn = terminal.getvalue()
        with bars_hidden():
            assert terminal.getvalue()[len(drawn) :].strip("\r ") == "", "the bar is cleared"
            terminal.write("skipped a step\n")
        assert "\nepoch 1/2:" in terminal.getvalue().replace("\r", "")


def test_a_terminal_of_no_width_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert not on_terminal()
        termios.tcsetwinsize(theirs, (25, 80))
        assert on_terminal()
    os.close(ours)


@pytest.mark.parametrize(("shown", "bar"), [(True, True), (False, False), (None, False)])
def test_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: bool | None, bar: bool
) -> None:
    """Without a terminal; nothing is ever written to stdout, and a log that nobody shows is silent."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert list(track([[1]], "evaluate", shown=shown)) == [[1]]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("evaluate" in captured.err) == bar


def test_header(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    open_terminal(monkeypatch)
    rows = {"model": "resnet18", "seed": "0"}
    header(rows)
    assert log.messages == [], "the command line on a terminal"
    header(rows, shown=True)
    assert log.messages == ["model  resnet18", "seed   0"]
    log.clear()
    header(rows, shown=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    header(rows, shown=False)
    assert log.messages == []
    header(rows)
    assert log.messages == ["model  resnet18", "seed   0"]


@pytest.mark.parametrize(
    ("images", "seconds", "text"),
    [
        (0, 0.0, "— images/s"),
        (0, 5.0, "— images/s"),
        (5, 0.0, "— images/s"),
        (1, 300.0, "0.0033 images/s"),
        (1, 3.0, "0.33 images/s"),
        (19, 2.0, "9.5 images/s"),
        (12345, 10.0, "1234 images/s"),
    ],
)
def test_rates_are_never_zero(images: int, seconds: float, text: str) -> None:
    assert rate(images, seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (5969, "99 min"),
        (5971, "1 h 40 min"),
        (7200, "2 h 0 min"),
        (47.99 * 3600, "47 h 59 min"),
        (51 * 3600, "2 d 3 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_counts_and_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (count(1, "class"), count(2, "class")) == ("1 class", "2 classes")
    assert count(1437, "image") == "1,437 images"
    assert parameters(nn.Linear(999, 10)) == "0.01 M parameters"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    cpu = torch.device("cpu")
    assert hardware(cpu) == "cpu, 3 cores, 1 thread, 1 process"
    assert hardware(cpu, processes=2, workers=4) == (
        "cpu, 3 cores, 1 thread, 2 processes, 4 workers for loading in each"
    )
