"""Run the notebooks and save their outputs: ``python docs/run_notebooks.py [NAME …]``.

Each notebook runs in an empty folder. Logs on stderr, counters and times are not saved, so that a new run
changes only what is shown.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).with_name("notebooks")
TIMEOUT = 600  # seconds per cell


def run(path: Path) -> Any:
    """The notebook after running all its cells in an empty folder; an error of a cell is raised."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
    return notebook


def clean(notebook: Any) -> Any:
    """The notebook with only what a reader sees."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(output for output in cell.outputs if output.get("name") != "stderr")
            for output in cell.outputs:
                output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """Outputs with successive texts joined: how a text is divided depends on the timing."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main(names: list[str]) -> None:
    """Run the named notebooks, by default all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            path.write_text(nbformat.writes(clean(run(path))) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
