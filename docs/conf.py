"""Sphinx configuration of the documentation site: ``make docs`` builds it offline into ``build/site``.

Generated pages (commands, equations, gallery) are written by ``generate.py`` before Sphinx reads them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import fedgmm  # noqa: E402
import generate  # noqa: E402

project = "fedgmm"
author = "the fedgmm developers"
version = release = fedgmm.__version__
project_copyright = f"{author}, licence Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "generated/README.md"]

# ---------------------------------------------------------------------- pages

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # blocks such as TOML with an ellipsis

# ---------------------------------------------------------------------- API

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False

# ---------------------------------------------------------------------- look: no request leaves the page

html_theme = "furo"
html_title = f"fedgmm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}

# ---------------------------------------------------------------------- links to the API

REFERENCE = re.compile(r"^([a-z0-9_/]+)\.py::([\w.]+)$")


class LinkReferences(SphinxPostTransform):
    """Turn literals such as ``core/em.py::responsibilities`` into links, if the API has the name."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Replace the literals of a page."""
        for literal in list(self.document.findall(nodes.literal)):
            found = REFERENCE.match(literal.astext())
            if not found or isinstance(literal.parent, (nodes.reference, addnodes.pending_xref)):
                continue
            target = f"fedgmm.{found[1].replace('/', '.')}.{found[2]}"
            entry = self.env.domains.python_domain.objects.get(target)
            if entry is not None:
                uri = self.app.builder.get_relative_uri(self.env.docname, entry.docname)
                link = nodes.reference("", "", refuri=f"{uri}#{entry.node_id}", internal=True)
                literal.replace_self(link)
                link += literal


def mark_as_orphan(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Leave the tables of single studies out of the navigation; the results page links to them."""
    if docname.startswith("results/") and docname != "results/README":
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def skip_routing(_app: Sphinx, _kind: str, name: str, *_: Any) -> bool | None:
    """Leave out scikit-learn's methods of metadata routing, which its own pages explain."""
    return True if re.fullmatch(r"set_\w+_request|get_metadata_routing", name) else None


def drop_links_back(
    _app: Sphinx, page: str, _template: str, context: dict[str, Any], _tree: Any
) -> None:
    """Drop viewcode's links from code to the API, which are wrong for names that are exported twice."""
    if page.startswith("_modules/fedgmm/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def setup(app: Sphinx) -> None:
    """Register the parts above."""
    generate.write_pages(HERE / "generated")
    app.add_post_transform(LinkReferences)
    app.connect("source-read", mark_as_orphan)
    app.connect("autodoc-skip-member", skip_routing)
    app.connect("html-page-context", drop_links_back)
