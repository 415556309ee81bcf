"""The page of the studio: its controls, and which action each of them starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from visualtokens.reduce.methods import DEFAULT_METHOD, METHODS
from visualtokens.studio.actions import NO_OTHER, PREDICTED, WHOLE, Actions, explained

QUEUE = 64  # requests that may wait; more are refused with a message
# All work with the models shares one queue.
WORK: dict[str, Any] = dict(concurrency_id="model", concurrency_limit=1)
SHOWN: dict[str, Any] = WORK | dict(api_visibility="private")
# What the slider of "Faster" sets: its range, step and default.
BUDGETS = {
    "multiply-adds": (0.25, 1.0, 0.05, 0.5),
    "tokens kept": (0.05, 1.0, 0.05, 0.5),
    "speed-up": (1.0, 4.0, 0.1, 1.5),
}
HIDES = [
    ("their mean colour", "mean"),
    ("black", "black"),
    ("blurred", "blur"),
    ("painted over from around", "inpaint"),
    ("tokens that are removed", "tokens"),  # for vision transformers
]
COLUMNS = ("photo", "left", "probability", "right", "probability ", "same")
THEME = gr.themes.Default(
    font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],  # nothing is fetched
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
    primary_hue="blue",
).set(  # Gradio's own grey and blue are too pale to read on white
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    color_accent="*primary_600",
)
WELCOME = """# visualtokens studio
Give a photo, and see what the model answers and which tokens it makes of the photo; why it answers so; and
how much faster it runs with fewer tokens."""

# Gradio's buttons with example pictures have no names.
NAME_EXAMPLES = """() => {
    const names = %s;
    document.querySelectorAll("button.gallery-item").forEach((button, i) => {
        button.setAttribute("aria-label", `Example: ${names[i]}`);
    });
}"""


def photo_input(folder: Path) -> gr.Image:
    """Return an image component that hands the uploaded file over as it is: our own reader decodes it."""

    def path_of(payload: Any) -> str | None:
        if payload is None or payload.path is None:
            return None
        path = Path(payload.path).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise gr.Error("This file was not uploaded to the studio.", print_exception=False)
        return str(path)

    photo = gr.Image(
        type="filepath",
        label="Photo",
        sources=["upload", "webcam", "clipboard"],
        height=320,
        buttons=[],
        elem_id="photo",
    )
    # not a subclass, for which Gradio would write a stub file into this package
    photo.preprocess = path_of  # type: ignore[method-assign]
    return photo


def build(actions: Actions, *, examples: Sequence[Path]) -> gr.Blocks:
    """Return the page."""
    names = list(actions.workbench.models)
    with gr.Blocks(title="visualtokens studio", analytics_enabled=False) as page:
        gr.Markdown(WELCOME)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                photo = photo_input(actions.folder)
                model = gr.Dropdown(
                    choices=names, value=names[0], label="Model", visible=len(names) > 1, filterable=False
                )
                gr.Examples([[str(file)] for file in examples], inputs=[photo], label="Examples")
            with gr.Column(scale=3, min_width=320), gr.Tabs():
                target, against = _look_and_why(actions, photo, model)
                _faster(actions, photo, model)
                _compare(actions, photo, names)
        _programs(actions, photo, model, target, against)
        page.unload(actions.forget)
        page.load(None, js=NAME_EXAMPLES % json.dumps([file.stem for file in examples]))
    page.queue(max_size=QUEUE, default_concurrency_limit=1)
    return page


def _look_and_why(actions: Actions, photo: gr.Image, model: gr.Dropdown) -> tuple[gr.Dropdown, gr.Dropdown]:
    bench = actions.workbench
    with gr.Tab("Look", id="look"):
        answer = gr.HTML(elem_id="answer", min_height=60)
        view = gr.HTML(elem_id="tokens")
        save = gr.DownloadButton("Download the page of the tokens", size="sm", elem_id="save-tokens")
    with gr.Tab("Why", id="why"):
        with gr.Row():
            target = gr.Dropdown(
                [(PREDICTED, -1)], value=-1, label="Explain", elem_id="target", min_width=200
            )
            against = gr.Dropdown(
                [(NO_OTHER, -1)], value=-1, label="Compared with", elem_id="against", min_width=200
            )
            hides = HIDES if all(bench.reducible(name) is None for name in bench.models) else HIDES[:-1]
            start = bench.default_hide(next(iter(bench.models)))
            hide = gr.Dropdown(
                hides, value=start, label="Hidden regions become", filterable=False, min_width=200
            )
        with gr.Row():
            budget = gr.Slider(32, 512, 128, step=32, label="Forward passes", info="More: smaller errors")
        explain = gr.Button("Explain", variant="primary", elem_id="explain")
        explanation = gr.HTML(elem_id="explanation")
        regions = gr.CheckboxGroup([], label="Only these regions, and without them", visible=False)
        variants = gr.HTML(elem_id="variants")
        page = gr.DownloadButton("Download the page of the explanation", size="sm", elem_id="save-page")

    looked = dict(inputs=[photo, model], outputs=[answer, view, target, against], **SHOWN)
    for event in (photo.change, model.change):
        event(explained(actions.look), **looked, trigger_mode="always_last")
    save.click(explained(actions.look_page), [photo, model], save, **SHOWN)
    asked = [photo, model, target, against, hide, budget]
    explain.click(explained(actions.why), asked, [explanation, regions, variants, page], **SHOWN)
    regions.input(
        explained(actions.what_if), [*asked, regions], variants, **SHOWN, trigger_mode="always_last"
    )
    return target, against


def _faster(actions: Actions, photo: gr.Image, model: gr.Dropdown) -> None:
    with gr.Tab("Faster", id="faster") as tab:
        with gr.Row():
            method = gr.Dropdown(METHODS, value=DEFAULT_METHOD, label="Method", filterable=False)
            budget = gr.Radio(list(BUDGETS), value="multiply-adds", label="What the slider sets")
        low, high, step, start = BUDGETS["multiply-adds"]
        value = gr.Slider(low, high, start, step=step, label="Share of the multiply-adds", elem_id="budget")
        facts = gr.HTML(elem_id="facts")
        answer = gr.HTML(elem_id="reduced-answer")
        pictures = gr.HTML(elem_id="mosaic")
        curve = gr.HTML(elem_id="curve")
        with gr.Accordion("The same in Python and on the command line", open=False):
            # without colours, which are hard to read here
            code = gr.Code(language=None, label="Python", interactive=False, wrap_lines=True)
            shell = gr.Code(language=None, label="Command", interactive=False, wrap_lines=True, lines=2)

    chosen = [model, method, budget, value]
    outputs = [facts, answer, pictures, curve, code, shell]

    def start_work(event: Callable[..., Any]) -> None:
        # Not queued: it tells work that is under way that something else is wanted.
        event(actions.note, chosen, None, queue=False, api_visibility="private", show_progress="hidden")
        event(explained(actions.faster), [photo, *chosen], outputs, **SHOWN, trigger_mode="always_last")

    def slider(name: str) -> gr.Slider:
        low, high, step, start = BUDGETS[name]
        label = {"speed-up": "Speed-up", "tokens kept": "Share of the patches kept as tokens"}.get(
            name, "Share of the multiply-adds"
        )
        return gr.Slider(low, high, start, step=step, label=label)

    changed = budget.input(slider, budget, value, queue=False, api_visibility="private")
    for event in (tab.select, method.input, value.input, changed.then):
        start_work(event)


def _compare(actions: Actions, photo: gr.Image, names: list[str]) -> None:
    methods = [WHOLE, *METHODS]
    with gr.Tab("Compare", id="compare"):
        with gr.Row():
            with gr.Column(min_width=240):
                left = gr.Dropdown(names, value=names[0], label="Left: model", filterable=False)
                left_method = gr.Dropdown(methods, value=WHOLE, label="Left: tokens", filterable=False)
            with gr.Column(min_width=240):
                right = gr.Dropdown(names, value=names[-1], label="Right: model", filterable=False)
                other = len(names) > 1 or actions.workbench.reducible(names[0]) is not None
                start = WHOLE if other else DEFAULT_METHOD
                right_method = gr.Dropdown(methods, value=start, label="Right: tokens", filterable=False)
        share = gr.Slider(0.25, 1.0, 0.5, step=0.05, label="Share of the multiply-adds of reduced models")
        compare = gr.Button("Compare on the photo", variant="primary", elem_id="compare-photo")
        with gr.Row():
            with gr.Column(min_width=280):
                left_side = gr.HTML(elem_id="left")
            with gr.Column(min_width=280):
                right_side = gr.HTML(elem_id="right")
        files = gr.File(
            file_count="directory", label="Or on a folder of photos", height=140, elem_id="folder"
        )
        table_button = gr.Button("Compare on the folder", elem_id="compare-folder")
        table = gr.Dataframe(
            headers=list(COLUMNS),
            datatype=["str", "str", "number", "str", "number", "str"],
            label="Answers; a click on a heading sorts",
            interactive=False,
            elem_id="table",
        )
    sides = [left, left_method, right, right_method, share]
    compare.click(explained(actions.compare), [photo, *sides], [left_side, right_side], **SHOWN)
    table_button.click(explained(actions.table), [files, *sides], table, **SHOWN)


def _programs(
    actions: Actions, photo: gr.Image, model: gr.Dropdown, target: gr.Dropdown, against: gr.Dropdown
) -> None:
    """The named endpoints for ``gradio_client``."""
    with gr.Row(visible=False):
        start, found = gr.Button(), gr.JSON()
        budget, macs = gr.Number(128), gr.Number(0.5)
        method = gr.Dropdown(METHODS, value=DEFAULT_METHOD)
    endpoints: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "predict": (actions.predict, [photo, model]),
        "tokens": (actions.tokens, [photo, model]),
        "explain": (actions.explain, [photo, model, target, against, budget]),
        "reduce": (actions.reduce, [photo, model, method, macs]),
    }
    for name, (function, inputs) in endpoints.items():
        start.click(
            explained(function), inputs, found, api_name=name, api_description=function.__doc__, **WORK
        )
