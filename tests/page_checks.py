"""What holds for every page, by a parser alone: it is whole, by itself and accessible."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

_EMPTY = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.texts: dict[str, str] = {}
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag not in _EMPTY:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))

    def handle_endtag(self, tag: str) -> None:
        name, _ = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1][0] == "style":
            return
        if self.elements[-1][0] == "wbr":  # within a word
            self.words[-1] += data
        else:
            self.words.append(data)
        own = self.open[-1][1].get("id")
        if own:
            self.texts[own] = self.texts.get(own, "") + data


def check_page(html: str) -> str:
    """Refuse a page that needs anything from outside, or that leaves a reader out; returns its words."""
    page = _Page()
    page.feed(html)
    assert not page.open
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = 0
    for tag, attributes, parents in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "base"), tag
        assert not any(name.startswith("on") for name in attributes), attributes
        for name in ("src", "href", "xlink:href", "action", "poster", "srcset"):
            target = attributes.get(name)
            if target is not None:
                assert target.startswith(("#", "data:")), target
                assert not target.startswith("#") or target[1:] in ids, target
        for target in re.findall(r"url\(([^)]*)\)", " ".join(filter(None, attributes.values()))):
            assert target.lstrip("#") in ids, target
        if tag == "svg" and attributes.get("aria-hidden") != "true":
            pictures += 1
            assert attributes["role"] == "img"
            assert len(page.texts[attributes["aria-labelledby"] or ""]) > 20
        if tag == "img":
            assert attributes.get("alt")
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
        if tag == "table":
            assert "figure" in parents or "section" in parents
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert "@import" not in html
    assert "url(" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", html)), set(re.findall(r"(--[\w-]+):", style[1]))
    assert used <= defined
    assert '<html lang="en">' in html
    assert 'name="viewport"' in html
    assert "Content-Security-Policy" in html
    words = " ".join(" ".join(page.words).split())
    assert not re.search(r"\b(nan|None|inf)\b", words), re.findall(r".{30}\b(?:nan|None|inf)\b.{30}", words)[:3]
    assert html.count("<figure ") == pictures
    return words
