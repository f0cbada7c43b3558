"""Check a built site: every local link has its file and anchor, and no page loads anything from elsewhere.

python docs/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
}
_LOADED_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
_FROM_ELSEWHERE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")


class Page(HTMLParser):
    """The anchors of a page, the links on it, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names."""
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and _LOADED_LINKS & set(found.get("rel", "").split()):
            self.loaded.append(found["href"])
        if tag in _LOADED and _LOADED[tag] in found:
            self.loaded.append(found[_LOADED[tag]])


def problems_of(site: Path) -> list[str]:
    """Return one line per broken link and per request that would leave the site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme == "data" or (link in page.links and (parts.scheme or parts.netloc)):
                continue
            if parts.scheme or parts.netloc:
                found.append(f"{where}: loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.exists():
                found.append(f"{where}: {link} leads to no file")
            elif parts.fragment and target.suffix == ".html":
                anchors = pages[site / target.relative_to(site.resolve())].anchors
                if unquote(parts.fragment) not in anchors:
                    found.append(f"{where}: {link} leads to no heading")
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(
            r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", path.read_text()
        ):
            found.append(f"{path.relative_to(site)}: loads {address}")  # noqa: PERF401
    return found


def main() -> int:
    """Print the problems of a site; return 1 if there are any."""
    site = Path(sys.argv[1])
    found = problems_of(site)
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, all links lead somewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
