"""A MkDocs hook for links and the search.

Links from docs/ to files outside of it lead to the repository, and a broken one is a warning. Pages for maintainers are not
in the search, which answers users.

MkDocs only builds the pages of docs/. Those pages also link to code, configs and files at the top of the checkout, with
relative links that work on a forge such as GitHub.
"""

import logging
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^()\s#]+)(#[^()\s]*)?\)")
NOT_SEARCHED = ("design/", "checked.md", "tried-and-rejected.md", "where-is.md")
log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown, page, config, files):
    """Rewrites the links of a page that leave docs/. `mkdocs build --strict` fails on a warning."""
    if page.file.src_uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    folder = (pathlib.Path(config.docs_dir) / page.file.src_uri).parent

    def rewritten(link):
        target = pathlib.Path(os.path.normpath(folder / link[1]))
        if target.is_relative_to(config.docs_dir):
            return link[0]
        if not target.exists():
            log.warning("%s: %s does not exist", page.file.src_uri, link[1])
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(ROOT).as_posix()
        return f"]({config.repo_url.rstrip('/')}/{kind}/main/{place}{link[2] or ''})"

    return LINK.sub(rewritten, markdown)
