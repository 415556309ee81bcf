"""The description on the package index: the README without what only works in the repository.

Pictures and links with relative paths become their text. All other settings are in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

LINK = r"\[([^\]]*)\]\((?!https://|#)[^)]*\)"


def description(readme: str) -> str:
    """The Markdown of the README without relative pictures and links."""
    without_pictures = re.sub(rf"^!{LINK}\n+(?:\(Photos: .*\)\n+)?", "", readme, flags=re.MULTILINE)
    without_asides = re.sub(rf" \({LINK}\)", "", without_pictures)
    return re.sub(LINK, r"\1", without_asides)


setup(
    long_description=description((Path(__file__).parent / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
