"""What the site needs beyond the pages: README as its first page, and links that leave docs/."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as index.md."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_config(config: Any) -> Any:
    """Replace ``decisions/*.md`` in the navigation by the pages there are."""
    for section in config.nav:
        for pages in section.values():
            if isinstance(pages, list):
                pages[:] = [_spread(page) for page in pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to README to the first page, and show files that the site lacks as names."""
    home = page.file.src_uri == "index.md"
    folder = PurePosixPath("." if home else "docs") / PurePosixPath(page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        name, _, anchor = target.partition("#")
        if not name or "://" in name:
            return link[0]
        path = normpath(str(folder / name))
        inside = "index.md" if path == "README.md" else path.removeprefix("docs/")
        if inside != path and (ROOT / path).is_file():
            up = "../" * page.file.src_uri.count("/")
            return f"{image}[{text}]({up}{inside}{'#' * bool(anchor)}{anchor})"
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(shown, markdown)


def _spread(page: dict[str, Any]) -> dict[str, Any]:
    ((title, path),) = page.items()
    if not isinstance(path, str) or "*" not in path:
        return page
    return {title: [str(p.relative_to(ROOT / "docs")) for p in sorted((ROOT / "docs").glob(path))]}
