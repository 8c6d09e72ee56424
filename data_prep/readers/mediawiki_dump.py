"""Documents of MediaWiki's XML dumps, such as those of Wikipedia: the articles, without their markup.

https://www.mediawiki.org/xml/export-0.11.xsd describes the format. A multistream dump is one XML document in several
.bz2 streams.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers import plain_text
from data_prep.readers.file_blocks import damaged, file_blocks, split_head
from data_prep.readers.input_format import HEAD_BYTES, check_head
from data_prep.readers.refusal import Items, Omission, check
from data_prep.readers.wikitext import WikitextReader

_NOT_AN_ARTICLE = Omission("not_an_article")
# Namespaces whose links are no text: media, files and categories.
_HIDDEN = ("-2", "6", "14")


def article_documents(path: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a dump: the newest text of each article, that is of a page in namespace 0 that is no redirect.

    Other pages, and those that are not wikitext, are omitted. Raises Refusal for XML that is no dump, and where a dump
    is damaged.
    """
    head, blocks = split_head(file_blocks(path, on_read), HEAD_BYTES)
    check_head(path, head, "mediawiki")
    reader = WikitextReader()
    try:
        for element in _elements(blocks):
            match _name(element):
                case "siteinfo":
                    reader = WikitextReader(_hidden_namespaces(element))
                case "page":
                    yield from _article(element, path, reader)
    except ElementTree.ParseError as error:
        raise damaged(path, error) from None


def _elements(blocks: Iterator[bytes]) -> Iterator[Element]:
    """The children of the root, each page with its last revision only. What was yielded is dropped."""
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    path: list[Element] = []  # from the root to the element that has begun last
    is_empty = True
    for block in blocks:
        is_empty = False
        parser.feed(block)
        for event, element in parser.read_events():
            if event == "start":
                path.append(element)
                continue
            path.pop()
            if len(path) == 2 and _name(element) == "revision":
                revisions = [child for child in path[1] if _name(child) == "revision"]
                for older in revisions[: revisions.index(element)]:
                    path[1].remove(older)
            elif len(path) == 1:
                yield element
                path[0].clear()
    if not is_empty:
        parser.close()


def _name(element: Element) -> str:
    """The name without the namespace, which differs between versions of the format."""
    return element.tag.rpartition("}")[2]


def _child(element: Element, *names: str) -> Element | None:
    found: Element | None = element
    for name in names:
        found = None if found is None else next((child for child in found if _name(child) == name), None)
    return found


def _text(element: Element, *names: str) -> str:
    found = _child(element, *names)
    return "" if found is None else found.text or ""


def _hidden_namespaces(siteinfo: Element) -> frozenset[str]:
    namespaces = _child(siteinfo, "namespaces")
    return frozenset(
        (space.text or "").lower()
        for space in (namespaces if namespaces is not None else ())
        if space.get("key") in _HIDDEN
    )


def _article(page: Element, path: str, reader: WikitextReader) -> Items:
    model = _text(page, "revision", "model") or "wikitext"
    if _text(page, "ns") not in ("", "0") or _child(page, "redirect") is not None or model != "wikitext":
        yield _NOT_AN_ARTICLE
        return
    where = f"{path}, page {_text(page, 'title')!r}"
    markup = _text(page, "revision", "text")
    if len(markup) > plain_text.MAX_DOCUMENT_BYTES:
        yield plain_text.too_long(where)
        return
    text = reader.text(markup, where)
    yield check(text.encode("utf-8", "replace"), where) if isinstance(text, str) else text
