"""Documents of MediaWiki's XML dumps, such as those of Wikipedia: the articles, without their markup.

https://www.mediawiki.org/xml/export-0.11.xsd describes the format. A multistream dump is one XML document in several
.bz2 streams.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep import processes
from data_prep.readers import plain_text
from data_prep.readers.file_blocks import damaged, file_blocks, split_head
from data_prep.readers.input_format import HEAD_BYTES, check_head
from data_prep.readers.refusal import Item, Items, Omission, Refusal, check
from data_prep.readers.wikitext import WikitextReader

_NOT_AN_ARTICLE = Omission("not_an_article")
# Namespaces whose links are no text: media, files and categories.
_HIDDEN = ("-2", "6", "14")
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
# What a worker gets at once: markup for a fifth of a second, or so many pages, most of which are no articles.
BATCH_CHARACTERS, BATCH_PAGES = 1 << 18, 1000


class _Article(NamedTuple):
    """An article whose markup is still to be removed."""

    where: str
    markup: str


class _Batch(NamedTuple):
    """Some pages, in the order of the dump, the language of the wiki, and the namespaces whose links are no text."""

    language: str
    hidden: frozenset[str]
    pages: list[_Article | Item]


def article_documents(path: str, on_read: OnRead = ignore_progress, workers: int = 1) -> Items:
    """The documents of a dump: the newest text of each article, that is of a page in namespace 0 that is no redirect.

    Other pages, and those that are not wikitext, are omitted. This process parses the XML, and `workers` others, if
    they are more than one, remove the markup; the documents and their order are the same. Raises Refusal for XML that
    is no dump, and where a dump is damaged.
    """
    head, blocks = split_head(file_blocks(path, on_read), HEAD_BYTES)
    check_head(path, head, "mediawiki")
    dump = _Dump(path, blocks)
    for items in processes.map_in_order(_items, dump.batches(), workers):
        yield from items
    if dump.damage is not None:
        raise dump.damage


class _Dump:
    """The pages of a dump up to its damage, if it has any."""

    def __init__(self, path: str, blocks: Iterator[bytes]) -> None:
        self.damage: Refusal | None = None  # once all batches have been taken
        self._path, self._blocks = path, blocks

    def batches(self) -> Iterator[_Batch]:
        language, hidden = "", frozenset[str]()
        pages: list[_Article | Item] = []
        size = 0
        try:
            for element in _elements(self._blocks):
                is_page = _name(element) == "page"
                if is_page:
                    pages.append(_page(element, self._path))
                    size += len(pages[-1].markup) if isinstance(pages[-1], _Article) else 0
                full = size >= BATCH_CHARACTERS or len(pages) >= BATCH_PAGES
                if pages and (full or not is_page):
                    yield _Batch(language, hidden, pages)
                    pages, size = [], 0
                if _name(element) == "mediawiki":
                    language = element.get(_LANGUAGE, "")
                if _name(element) == "siteinfo":
                    hidden = _hidden_namespaces(element)
        except ElementTree.ParseError as error:
            self.damage = damaged(self._path, error)
        except Refusal as refusal:
            self.damage = refusal
        if pages:
            yield _Batch(language, hidden, pages)


def _elements(blocks: Iterator[bytes]) -> Iterator[Element]:
    """The root when it begins, then its children, pages with their last revision only. What was yielded is dropped."""
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    path: list[Element] = []  # from the root to the element that has begun last
    is_empty = True
    for block in blocks:
        is_empty = False
        try:
            parser.feed(block)
        except (ValueError, LookupError) as error:  # an encoding that Python's parser does not read
            raise ElementTree.ParseError(str(error)) from error
        for event, element in parser.read_events():
            if event == "start":
                path.append(element)
                if len(path) == 1:
                    yield element
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


def _page(page: Element, path: str) -> _Article | Item:
    model = _text(page, "revision", "model") or "wikitext"
    if _text(page, "ns") not in ("", "0") or _child(page, "redirect") is not None or model != "wikitext":
        return _NOT_AN_ARTICLE
    where = f"{path}, page {_text(page, 'title')!r}"
    markup = _text(page, "revision", "text")
    return _Article(where, markup) if len(markup) <= plain_text.MAX_DOCUMENT_BYTES else plain_text.too_long(where)


def _items(batch: _Batch) -> list[Item]:
    """The documents of a batch, which any process may compute."""
    reader = WikitextReader(batch.hidden, batch.language)
    return [_document(page, reader) if isinstance(page, _Article) else page for page in batch.pages]


def _document(article: _Article, reader: WikitextReader) -> Item:
    text = reader.text(article.markup, article.where)
    return check(text.encode("utf-8", "replace"), article.where) if isinstance(text, str) else text
