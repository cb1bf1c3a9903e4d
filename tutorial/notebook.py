"""Make tutorial.ipynb from README.md beside it: python tutorial/notebook.py

A block of Python becomes a code cell, and what stands between two blocks becomes a Markdown cell.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent

FIND_THE_CLONE = """\
# A notebook runs in its own folder. If hardneg is not installed, Python finds it one folder up.
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("hardneg") is None:
    sys.path.insert(0, str(Path.cwd().parent))"""


def make_cell(kind, number, text):
    """Make a cell. Its id is its number, so the same page gives the same notebook."""
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    cell["source"] = text.splitlines(keepends=True)
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell


def make_notebook(page):
    """Make the text of the notebook from the text of the page."""
    title, rest = page.split("\n", 1)
    # Markdown and code take turns. A cell cannot fold other cells, so the answers are not folded.
    parts = re.split(r"```python\n(.*?)```", rest, flags=re.S)
    contents = [("markdown", title), ("code", FIND_THE_CLONE)]
    for k, part in enumerate(parts):
        kind = ("markdown", "code")[k % 2]
        text = re.sub(r"<details><summary>(.*)</summary>", r"## \1", part)
        contents.append((kind, text.replace("</details>", "").strip()))

    cells = []
    for kind, text in contents:
        if text:
            cells.append(make_cell(kind, len(cells), text))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    text = make_notebook((HERE / "README.md").read_text(encoding="utf-8"))
    (HERE / "tutorial.ipynb").write_text(text, encoding="utf-8")
