"""Documents of MediaWiki's XML dumps: the articles as a reader sees them, without their markup."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from bert_jax.storage.files import OnRead, ignore_progress
from data_prep import processes
from data_prep.readers import Item, Items, Omission, Refusal, check, text
from data_prep.readers.text import HEAD_BYTES, check_head, damaged, file_blocks, split_head

# The text of pages in MediaWiki's markup, as a reader sees it, without templates, tables and references.
#
# mwparserfromhell parses the markup; this module decides what of it is text. Templates are programs in other pages of
# the wiki, so whatever they would print (conversions of units, phrases in other languages) is left out with them.


_HIDDEN_NAMESPACES = frozenset(("file", "image", "media", "category"))
# The types of files that Commons accepts, apart from those of data and of three dimensions. The name of the namespace
# before such a file may be an alias, which dumps do not list. Two colons make it a link to a file of another wiki.
_MEDIA = re.compile(
    r"[^:]+:[^:]*\.(?:apng|djvu|flac|gif|jpe?g|midi?|mp3|mpe?g|og[agv]|opus|pdf|png|svg|tiff?|wav|web[mp]|xcf)\s*\Z",
    re.IGNORECASE | re.DOTALL,
)
_HIDDEN_TAGS = frozenset(
    ("ref", "references", "table", "gallery", "math", "chem", "ce", "score", "timeline", "graph", "imagemap", "hiero")
    + ("categorytree", "inputbox", "templatedata", "section", "mapframe", "maplink", "style", "script")
    + ("source", "syntaxhighlight", "indicator")
)
_BREAKS = frozenset(("br", "hr"))
_QUOTES = re.compile(r"'{5}|'{2,3}")  # bold and italic
_SWITCH = re.compile(r"__[A-Z]+__")  # __NOTOC__
_LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:")  # [[de:Paris]] in old dumps
# The languages that MediaWiki converts between scripts or regions (includes/Language/LanguageConverterFactory.php).
_CONVERTED = "ban|crh|gan|iu|ku|mni|sh|shi|sr|tg|tly|uz|wuu|zgh|zh"
_CONVERSION = re.compile(r"(-\{|\}-)")
_DEEPEST_CONVERSION = 10  # as MediaWiki's; deeper ones are text
_FLAGS = re.compile(r"([\w\s;+-]*)\|", re.ASCII)
_HIDING_FLAGS = frozenset("HTD+-")
_VARIANT = rf"(?:[^;:=]*+=>\s*+)?(?:{_CONVERTED}|ike)(?:-[a-z]+)*+\s*+:"
_FIRST_VARIANT = re.compile(rf"\s*+{_VARIANT}(.*?)(?:;\s*+(?:(?={_VARIANT})|\Z)|\Z)", re.DOTALL)
_LINK = re.compile(r"\[\[:?+(?:[^\[\]|\n]*+\|)?+([^\[\]|\n]*+)\]\]")
# What templates leave behind: "Paris ( ; ) is", "Paris (, French) is", "born on , in".
# Not those of main() or x[]. Possessive, and begun only where white space does, so that the work is linear.
_EMPTY_BRACKETS = re.compile(r"(?<!\s)\s++(?:\([,;:\s]*+\)|\[\s*+\])")
_EMPTY_FIRST = re.compile(r"\(\s*[,;]\s*")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")


class WikitextReader:
    """Turns markup into text, with the namespaces of one wiki."""

    def __init__(self, hidden_namespaces: frozenset[str] = frozenset(), language: str = "") -> None:
        """Takes what differs between wikis.

        hidden_namespaces   lower-case names whose links are no text, in addition to the English ones
        language            such as zh, whose text MediaWiki converts between scripts
        """
        self._hidden = _HIDDEN_NAMESPACES | hidden_namespaces
        self._is_converted = language in _CONVERTED.split("|")

    def text(self, markup: str, where: str) -> str | Refusal:
        """The text of a page: paragraphs, headings and items of lists, each on a line; a Refusal names `where`."""
        import mwparserfromhell
        from mwparserfromhell.parser import ParserError

        try:
            # Quotes are removed below: the parser gives up on those that do not match.
            text = self._rendered(mwparserfromhell.parse(markup, skip_style_tags=True).nodes)
        except (ParserError, RecursionError) as error:
            what = f"markup that mwparserfromhell cannot parse ({type(error).__name__})"
            return Refusal("bad_page", where, what, "Remove the page")
        if self._is_converted:
            # The parser takes no link whose target has braces.
            text = _LINK.sub(r"\1", _first_variants(text))
        text = _SWITCH.sub("", _QUOTES.sub("", text))
        text = _EMPTY_FIRST.sub("(", _EMPTY_BRACKETS.sub("", text))
        lines = [_SPACES.sub(" ", line).strip() for line in text.split("\n")]
        return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")

    def _rendered(self, nodes: Iterable[Any]) -> str:
        return "".join(map(self._node, nodes))

    def _node(self, node: Any) -> str:
        match type(node).__name__:
            case "Text":
                return str(node.value)
            case "HTMLEntity":
                return str(node.normalize())
            case "Wikilink":
                return self._link(node)
            case "ExternalLink":
                shown = node.title if node.brackets else node.url
                return self._rendered(shown.nodes) if shown is not None else ""
            case "Heading":
                return f"\n{self._rendered(node.title.nodes)}\n"
            case "Tag":
                return self._tag(node)
        return ""  # a template, an argument of one, or a comment

    def _link(self, link: Any) -> str:
        title = str(link.title).strip()
        namespace = title.partition(":")[0].strip().lower().replace("_", " ") if ":" in title else ""
        if namespace in self._hidden or _MEDIA.match(title) or (link.text is None and _LANGUAGE_LINK.match(title)):
            return ""
        return self._rendered(link.text.nodes) if link.text is not None else title.removeprefix(":")

    def _tag(self, tag: Any) -> str:
        name = str(tag.tag).strip().lower()
        if name in _BREAKS:
            return "\n"
        if name in _HIDDEN_TAGS or tag.contents is None:
            return ""
        return self._rendered(tag.contents.nodes)


def _first_variants(text: str) -> str:
    """The text with the first variant of what is written in several, -{zh-hans:...;zh-hant:...}-, in linear time.

    https://www.mediawiki.org/wiki/Writing_systems/Syntax describes the markup.
    """
    outer: list[list[str]] = []  # of each -{ that is open, the text before it
    parts: list[str] = []
    for piece in _CONVERSION.split(text):
        if piece == "-{" and len(outer) < _DEEPEST_CONVERSION:
            outer.append(parts)
            parts = []
        elif piece == "}-" and outer:
            inner = "".join(parts)
            parts = outer.pop()
            parts.append(_first_variant(inner))
        else:
            parts.append(piece)
    return "".join("".join([*before, "-{"]) for before in outer) + "".join(parts)


def _first_variant(content: str) -> str:
    if flags := _FLAGS.match(content):
        if not _HIDING_FLAGS.isdisjoint(map(str.strip, flags[1].split(";"))):
            return ""
        content = content[flags.end() :]
    variant = _FIRST_VARIANT.match(content)
    return variant[1].strip() if variant else content


# Documents of MediaWiki's XML dumps, such as those of Wikipedia: the articles, without their markup.
#
# https://www.mediawiki.org/xml/export-0.11.xsd describes the format. A multistream dump is one XML document in several
# .bz2 streams.


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
    return _Article(where, markup) if len(markup) <= text.MAX_DOCUMENT_BYTES else text.too_long(where)


def _items(batch: _Batch) -> list[Item]:
    """The documents of a batch, which any process may compute."""
    reader = WikitextReader(batch.hidden, batch.language)
    return [_document(page, reader) if isinstance(page, _Article) else page for page in batch.pages]


def _document(article: _Article, reader: WikitextReader) -> Item:
    text = reader.text(article.markup, article.where)
    return check(text.encode("utf-8", "replace"), article.where) if isinstance(text, str) else text
