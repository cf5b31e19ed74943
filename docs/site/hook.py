"""What mkdocs does for our site beyond its own: pages from outside of docs/, links between languages, one last check.

README, CHANGELOG, CONTRIBUTING and the results of benchmarks are pages too, without a second copy of their text. Their
links are written for the repository, so links that pass from one folder to the other are rewritten. A page that exists
in both languages starts with a link to its twin. After the build, a page that would load anything from another host is
an error: the site works without a network.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ".zh-CN.md"
PAGES = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}
"""Files of the repository that have another path in the site. Others keep theirs, without docs/."""
FROM_OUTSIDE = (*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/*.md")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
HOST = r"(?:https?:)?//"
LOADED = re.compile(
    rf'<(?:script|img|iframe|video|source)\b[^>]*\ssrc="?{HOST}[^">]*'
    rf'|<link\b(?=[^>]*\srel="?(?:stylesheet|preconnect|preload|icon))[^>]*\shref="?{HOST}[^">]*'
    rf'|url\(["\']?{HOST}[^)]*'
    r'|class="mermaid"'  # the theme would get its script from another host
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files outside of docs/ become pages."""
    for pattern in FROM_OUTSIDE:
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            files.append(File.generated(config, site_path(path), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them, and above them one to the page in the other language."""
    own = repository_path(page.file)
    parts = FENCED.split(markdown)
    parts[::2] = [
        LINK.sub(lambda link: link[1] + site_link(link[2], own, files) + link[3], part) for part in parts[::2]
    ]
    return twin_link(page.file.src_uri, files) + "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings mark an example with two colons; Markdown shows both."""
    if page.file.src_uri.startswith("api/"):
        html = html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
    return html


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A browser chooses fonts, spelling and translation by the language of the page."""
    if page.file.src_uri.endswith(CHINESE):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
    return output


def on_post_build(config: MkDocsConfig) -> None:
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in (".html", ".css") and (loaded := LOADED.search(file.read_text())):
            raise PluginError(f"{file} loads something from another host: {loaded[0]}")


def site_path(path: str) -> str:
    """The path in the site of a file of the repository."""
    return PAGES.get(path) or path.removeprefix("docs/")


def repository_path(file: File) -> str:
    assert file.abs_src_path
    return Path(file.abs_src_path).relative_to(ROOT).as_posix()


def site_link(target: str, own: str, files: Files) -> str:
    """A link of the document ``own`` to another file of the repository, relative to its page in the site."""
    aim = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
    if "://" in target or files.get_file_from_path(site_path(aim)) is None:
        return target  # another host, or nothing of ours: mkdocs complains about the second
    return os.path.relpath(site_path(aim), posixpath.dirname(site_path(own)) or ".")


def twin_link(path: str, files: Files) -> str:
    """``[中文](...)`` or ``[English](...)`` where the page has a twin, else nothing."""
    is_chinese = path.endswith(CHINESE)
    twin = path.replace(CHINESE, ".md") if is_chinese else path.removesuffix(".md") + CHINESE
    if files.get_file_from_path(twin) is None:
        return ""
    return f"[{'English' if is_chinese else '中文'}]({posixpath.basename(twin)}){{ .twin }}\n\n"
