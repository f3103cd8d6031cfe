"""The site of the documents, built by `make docs`.

Sphinx reads the Markdown files where they lie, from the root of the project, so that their links lead to the same
places on the site as they do among the files. What can be read from the code (commands, settings, the Python API) is
read from it: see reference.py. The site asks for nothing from the network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rung.spec.version import VERSION

project = "Rung"
author = "The Rung authors"
copyright = "2026 The Rung authors"
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "reference"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "examples/**.md", "benchmarks/*.md"]
exclude_patterns = [".*", "runs", "build", "dist", "site", "src", "tests", "benchmarks/results"]
templates_path = ["_site"]

myst_heading_anchors = 4
smartquotes = False  # two dashes begin a flag
default_role = "code"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
highlight_language = "none"  # a block without a language is a console

html_theme = "furo"
html_title = f"Rung {VERSION}"
html_static_path = ["_site"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "first.html"}
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#7c3f00", "color-brand-content": "#8a4a08"},
    "dark_css_variables": {"color-brand-primary": "#f0b070", "color-brand-content": "#f0b070"},
    "navigation_with_keys": True,
}
