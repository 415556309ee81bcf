"""What happens in the tabs of the studio: from the values of controls to those of outputs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from visualtokens.errors import UserError
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.hiding import Hide
from visualtokens.explain.page import explanation_page
from visualtokens.explain.view import view_document, view_frame
from visualtokens.files import one_line
from visualtokens.studio import parts
from visualtokens.studio.workbench import Photo, Setting, Source, Workbench, change

log = logging.getLogger(__name__)

MAX_FILES = 200  # of a compared folder
NO_PHOTO = "Give a photo first: drop one on the left, take one, or choose an example."
PREDICTED, NO_OTHER = "the predicted class", "no other class"
WHOLE = "whole model"


def explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show an error of the user as a sentence, and any other one without its details, which are logged."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Iterator[Any]:
        try:
            result = function(*args)
            if isinstance(result, Iterator):
                yield from result
            else:
                yield result
        except gr.Error:
            raise
        except UserError as error:
            raise gr.Error(sentence(str(error)), print_exception=False) from error
        except Exception as error:
            log.exception("the studio failed")
            text = f"This did not work ({type(error).__name__}). The terminal of the studio shows why."
            raise gr.Error(text, print_exception=False) from error

    return wrapper


def sentence(message: str) -> str:
    """Return a message as one sentence of plain text."""
    text = one_line(UserError(message))
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


class Actions:
    """What happens in the tabs; files to download are written to ``folder``."""

    def __init__(self, workbench: Workbench, sources: Mapping[str, Source], *, folder: Path) -> None:
        self.workbench, self.sources, self.folder = workbench, sources, folder
        self._latest: dict[str, tuple[Any, ...]] = {}  # what each session asked for last in "Faster"

    # Look.

    def look(self, file: str | None, name: str) -> Iterator[tuple[Any, ...]]:
        if file is None:
            yield "", "", gr.skip(), gr.skip()
            return
        photo = Photo.read(file)
        found = parts.answer(self.workbench.answer(name, photo))
        classes = self.workbench.checkpoint(name).classes
        choices = [(PREDICTED, -1), *((text, i) for i, text in enumerate(classes))]
        others = [(NO_OTHER, -1), *choices[1:]]
        yield found, gr.skip(), gr.Dropdown(choices=choices), gr.Dropdown(choices=others)
        tokens = self.workbench.tokens(name, photo)
        frame = view_frame(photo.image, tokens.layers, box=tokens.box, caption=tokens.title)
        yield gr.skip(), f"<p>{parts.escape(tokens.note)}</p>{frame}", gr.skip(), gr.skip()

    def look_page(self, file: str | None, name: str) -> str:
        photo = self._photo(file)
        tokens = self.workbench.tokens(name, photo)
        text = view_document(photo.image, tokens.layers, box=tokens.box, caption=tokens.title)
        return self._download("tokens.html", photo, text)

    # Why.

    def why(
        self, file: str | None, name: str, target: int, against: int, hide: Hide, budget: float
    ) -> Iterator[tuple[Any, ...]]:
        photo = self._photo(file)
        explanation = self._explanation(name, photo, target, against, budget, hide)
        page = explanation_page(explanation)
        numbers = [(str(i), k) for i, k in enumerate(explanation.listed, start=1)]
        chosen = (
            [] if explanation.only is None else [k for k in explanation.listed if k in explanation.only.kept]
        )
        regions = gr.CheckboxGroup(choices=numbers, value=chosen, visible=True)
        download = self._download("explanation.html", photo, page)
        yield (
            parts.explanation_frame(explanation),
            regions,
            self._variants(name, photo, explanation, chosen),
            download,
        )

    def what_if(
        self,
        file: str | None,
        name: str,
        target: int,
        against: int,
        hide: Hide,
        budget: float,
        chosen: list[int],
    ) -> str:
        photo = self._photo(file)
        explanation = self._explanation(name, photo, target, against, budget, hide)
        return self._variants(name, photo, explanation, chosen)

    def _explanation(
        self,
        name: str,
        photo: Photo,
        target: int,
        against: int,
        budget: float,
        hide: Hide | None = None,
    ) -> Explanation:
        return self.workbench.why(
            name,
            photo,
            target=None if target < 0 else int(target),
            against=None if against < 0 else int(against),
            budget=int(budget),
            hide=hide,
        )

    def _variants(self, name: str, photo: Photo, explanation: Explanation, chosen: Sequence[int]) -> str:
        if not chosen:
            return "<p>Choose one region or more to see the photo with only these, and without them.</p>"
        only, without = self.workbench.variants(name, photo, explanation, sorted(chosen))
        numbers = ", ".join(str(i) for i, k in enumerate(explanation.listed, start=1) if k in chosen)
        score = explanation.score_name
        return parts.pair(
            [
                (variant.picture, f"{word} {numbers}: {score} {variant.score:.2f}")
                for word, variant in (("Only", only), ("Without", without))
            ]
        )

    # Faster.

    def faster(
        self, file: str | None, name: str, method: str, budget: str, value: float, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        """Show the answer and the mosaic at once, then the curve, then the measured speed.

        The work ends early as soon as its session asks for something else.
        """
        reason = NO_PHOTO if file is None else self.workbench.reducible(name)
        if reason is not None:
            yield f"<p>{parts.escape(reason)}</p>", "", "", "", "", ""
            return
        photo, session = self._photo(file), request.session_hash or ""
        asked = (name, method, budget, value)
        self._latest.setdefault(session, asked)

        def stale() -> bool:
            return self._latest.get(session, asked) != asked

        bench = self.workbench
        setting = self._setting(name, method, budget, value)
        share, whole, now = (
            bench.share(name, setting),
            bench.answer(name, photo),
            bench.answer(name, photo, setting),
        )
        costs = [
            (
                "multiply-adds",
                f"{bench.macs(name, setting) / 1e9:.2f} of {bench.macs(name, None) / 1e9:.2f} G",
            ),
            ("tokens per block", " ".join(str(k) if k else "class token" for k in setting.keep)),
        ]
        tokens = bench.tokens(name, photo, setting)
        pictures = [(parts.seen(photo.image, tokens.box), "The photo, as the model sees it")]
        if tokens.layers:
            last = tokens.layers[-1]
            pictures.append(
                (parts.mosaic(photo.image, tokens.box, last), f"Its {last.tokens} tokens at the end")
            )
        answer = f"<p>{parts.escape(change(whole, now))}</p>" + parts.answer(now, before=whole)
        source = self.sources[name]
        code = parts.python_lines(source, setting, share)
        shell = parts.command(source, setting, share)
        yield parts.facts(costs), answer, parts.pair(pictures), gr.skip(), code, shell
        if stale():
            return
        label = f"Probability of “{whole.top[0][0]}” with fewer multiply-adds, {method}"
        drawn = parts.curve(bench.curve(name, photo, method), bench.point(name, photo, setting), label=label)
        yield gr.skip(), gr.skip(), gr.skip(), f"<p>{parts.escape(label)}:</p>{drawn}", gr.skip(), gr.skip()
        if stale():
            return
        plain, reduced = bench.speed(name, setting)
        rates = [each.images_per_second.median for each in (plain, reduced)]
        noisy = "" if reduced.quiet else " (on a busy machine)"
        measured = [
            (f"speed-up, measured here{noisy}", f"{reduced.speedup.median:.2f}×"),
            ("images per second", " → ".join(f"{rate:.1f}" for rate in rates)),
        ]
        yield parts.facts([*measured, *costs]), *(gr.skip(),) * 5

    def note(self, name: str, method: str, budget: str, value: float, request: gr.Request) -> None:
        """Remember what a session asks for; the work for anything else ends."""
        self._latest[request.session_hash or ""] = (name, method, budget, value)

    def forget(self, request: gr.Request) -> None:
        """Forget a session whose page was closed."""
        self._latest.pop(request.session_hash or "", None)

    def _setting(self, name: str, method: str, budget: str, value: float) -> Setting:
        if budget == "tokens kept":
            return self.workbench.setting(name, method, keep=value)
        if budget == "speed-up":
            value = self.workbench.speedup_share(name, method, value)
        return self.workbench.setting(name, method, macs=value)

    # Compare.

    def compare(
        self, file: str | None, left: str, left_method: str, right: str, right_method: str, share: float
    ) -> tuple[str, str]:
        photo = self._photo(file)
        return tuple(  # type: ignore[return-value]
            self._side(photo, name, method, share)
            for name, method in ((left, left_method), (right, right_method))
        )

    def _side(self, photo: Photo, name: str, method: str, share: float) -> str:
        setting = self._compared(name, method, share)
        tokens = self.workbench.tokens(name, photo, setting)
        kept = (
            "Every patch is a token."
            if self.workbench.reducible(name) is None
            else "This model has no tokens."
        )
        title, picture = name, (parts.seen(photo.image, tokens.box), kept)
        if setting is not None:
            title = f"{name}, {method} at {self.workbench.share(name, setting):.0%}"
        if tokens.layers and not tokens.note:
            last = tokens.layers[-1]
            picture = (parts.mosaic(photo.image, tokens.box, last), f"{last.tokens} tokens at the end")
        found = self.workbench.answer(name, photo, setting)
        return f"<h2>{parts.escape(title)}</h2>{parts.answer(found)}{parts.pair([picture])}"

    def _compared(self, name: str, method: str, share: float) -> Setting | None:
        return None if method == WHOLE else self.workbench.setting(name, method, macs=share)

    def table(
        self,
        files: list[str] | None,
        left: str,
        left_method: str,
        right: str,
        right_method: str,
        share: float,
    ) -> list[list[Any]]:
        if not files:
            raise UserError("there are no photos to compare; choose a folder first")
        if len(files) > MAX_FILES:
            raise UserError(f"the folder has {len(files)} files; the studio compares at most {MAX_FILES}")
        sides = [
            (name, self._compared(name, m, share)) for name, m in ((left, left_method), (right, right_method))
        ]
        rows: list[list[Any]] = []
        for file in sorted(files):
            try:
                photo = Photo.read(file)
            except UserError as error:
                rows.append([Path(file).name, sentence(str(error)), None, "", None, ""])
                continue
            found = [self.workbench.answer(name, photo, setting).top[0] for name, setting in sides]
            same = "yes" if found[0][0] == found[1][0] else "no"
            numbers = [value for text, p in found for value in (text, round(p, 3))]
            rows.append([Path(file).name, *numbers, same])
        return rows

    # The interface for programs.

    def predict(self, file: str | None, name: str) -> dict[str, Any]:
        """Return the most probable classes of a photo."""
        return self.workbench.answer(name, self._photo(file)).to_dict()

    def tokens(self, file: str | None, name: str) -> dict[str, Any]:
        """Return the token of every patch in every layer, -1 for dropped patches."""
        found = self.workbench.tokens(name, self._photo(file))
        layers = [
            {"name": layer.name, "tokens": layer.tokens, "assignment": layer.assignment.tolist()}
            for layer in found.layers
        ]
        return {"title": found.title, "note": found.note, "box": list(found.box), "layers": layers}

    def explain(
        self, file: str | None, name: str, target: int, against: int, budget: float
    ) -> dict[str, Any]:
        """Return the regions of a photo and their values; -1 stands for the predicted and for no class."""
        found = self._explanation(name, self._photo(file), int(target), int(against), budget)
        return {
            "class": found.class_name(found.target),
            "score": found.full,
            "hidden": found.empty,
            "regions": found.regions.tolist(),
            "values": found.values.tolist(),
            "errors": None if found.errors is None else found.errors.tolist(),
            "order": list(found.order),
        }

    def reduce(self, file: str | None, name: str, method: str, macs: float) -> dict[str, Any]:
        """Return the answer of the reduced model, its cost and its measured speed."""
        photo, setting = self._photo(file), self.workbench.setting(name, method, macs=macs)
        whole, reduced = self.workbench.speed(name, setting)
        return self.workbench.answer(name, photo, setting).to_dict() | {
            "keep": list(setting.keep),
            "macs": self.workbench.macs(name, setting),
            "speedup": reduced.speedup.median,
            "images_per_second": reduced.images_per_second.median,
            "images_per_second_whole": whole.images_per_second.median,
        }

    # Files.

    def _photo(self, file: str | None) -> Photo:
        if file is None:
            raise gr.Error(NO_PHOTO, print_exception=False)
        return Photo.read(file)

    def _download(self, name: str, photo: Photo, text: str) -> str:
        path = self.folder / photo.key[:16] / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)
