"""Reads articles in MediaWiki's XML dumps, as people see them, without markup."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from bert_jax.storage.files import OnRead, ignore_progress
from data_prep import processes
from data_prep.readers import CONTROLS, Item, Items, Omission, Refusal, check, text
from data_prep.readers.text import checked_blocks, damaged

# MediaWiki's markup as text, without templates, tables and references.
#
# mwparserfromhell parses the markup; this module decides which parts are text. Templates are programs in other pages of
# the wiki, so their output (unit conversions, phrases in other languages) is lost with them.

_HIDDEN_NAMESPACES = frozenset(("file", "image", "media", "category"))
# The file types that Commons accepts, apart from data and 3D files. The namespace before such a file may be an alias,
# which dumps do not list. Two colons make it a link to another wiki's file.
_MEDIA = re.compile(
    r"[^:]+:[^:]*\.(?:apng|djvu|flac|gif|jpe?g|midi?|mp3|mpe?g|og[agv]|opus|pdf|png|svg|tiff?|wav|web[mp]|xcf)\s*\Z",
    re.IGNORECASE | re.DOTALL,
)
_HIDDEN_TAGS = frozenset(
    ("ref", "references", "table", "gallery", "math", "chem", "ce", "score", "timeline", "graph", "imagemap", "hiero")
    + ("categorytree", "inputbox", "templatedata", "section", "mapframe", "maplink", "style", "script")
    + ("source", "syntaxhighlight", "indicator", "includeonly")
)
_BREAKS = frozenset(("br", "hr"))
_BLOCK_NAMES = "blockquote caption center dd div dl dt h1 h2 h3 h4 h5 h6 li ol p poem pre table td th tr ul"
_BLOCKS = frozenset(_BLOCK_NAMES.split())
# The other tags that MediaWiki knows (includes/parser/Sanitizer.php, and extensions on Wikimedia's wikis). It shows
# tags of other names as they are written, and closes HTML that its author did not close.
_OTHER_NAMES = """
    abbr b bdi bdo big charinsert cite code col colgroup data del dfn em font i ins kbd langconvert languages link mark
    meta noinclude nowiki onlyinclude phonos q rb rp rt rtc ruby s samp small span strike strong sub sup tbody
    templatestyles tfoot thead time translate tt tvar u var wbr
"""
_TAGS = _HIDDEN_TAGS | _BREAKS | _BLOCKS | frozenset(_OTHER_NAMES.split())
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)(?:[\s/][^<>]*)?>")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)  # as in MediaWiki, one that does not end hides the rest
# Markup has no control characters, so these can stand for others until the markup is gone: characters that the author
# marked as text, and the borders of HTML blocks, which separate words that nothing else separates.
_CONTROL = re.compile(f"[{re.escape(CONTROLS.decode())}]")
_AS_TEXT = str.maketrans("<'_{}[", "\1\2\3\4\5\6")
_FROM_TEXT = str.maketrans("\1\2\3\4\5\6", "<'_{}[")
_BORDER = "\x0e"
_BETWEEN_WORDS = re.compile(r"(?<=[^\s\x0e])\x0e++(?=\S)")
_QUOTES = re.compile(r"'{5}|'{2,3}")  # bold and italic
# Behavior switches such as __NOTOC__: MediaWiki's, those of extensions on Wikimedia's wikis, and the translations of
# large wikis (languages/messages). Nobody writes other words with letters beyond ASCII between double underscores.
_SWITCH_WORDS = """
    archivedtalk disambig expected_unconnected_page expectunusedcategory expectunusedtemplate expectwithoutscans
    forcetoc hiddencat index newsectionlink nocc nocontentconvert noeditsection nogallery noglobal noindex
    nonewsectionlink notalk notc notitleconvert notoc staticredirect toc
    abschnitte_nicht_bearbeiten inhaltsverzeichnis inhaltsverzeichnis_erzwingen kein_index kein_inhaltsverzeichnis
    kein_neuer_abschnittslink kein_plus_link keine_galerie keine_inhaltskonvertierung keine_titelkonvertierung
    keinegalerie keininhaltsverzeichnis neuer_abschnittslink nicht_indexieren nicht_indizieren permanente_weiterleitung
    plus_link versteckte_kategorie wartungskategorie indexieren indizieren
    aucunegalerie aucunindex aucunliennouvellesection aucunsommaire aucuntdm forcersommaire forcertdm
    liennouvellesection redirectionstatique sanscc sansconversioncontenu sansconversiontitre sansct sectionnoneditable
    sommaire tdm
    categoriaoculta desambiguacion forzartdc forzartoc forzar_tdc noconvertircontenido noconvertirtitulo noeditarseccion
    nogaleria noindexar noindice notdc sin_tdc vincularanuevaseccion novincularanuevaseccion
    forcarsumario forcartdc naoeditarsecao naoindexar semconverterconteudo semconvertertitulo semeditarsecao semgaleria
    semtdc sumario nonindicizzare indicizzare
    dwingio forceerinhoud geengalery geenindex geeninhoud geeninhoudconversie geennieuwesectielink inhoud_dwingen
    nietbewerkbaresectie nieuwesectielink verborgencat statischedoorverwijzing statischeredirect
    bezedycjisekcji bezgalerii bezspisu indeksuj kategoriaukryta linknowejsekcji nieindeksuj spis zespisem
    bezobsahu neindexovat indexovat obsah jogaleri tanpadaftarisi paksadaftarisi daftarisi paksadasi tanpagaleri
    ingainnhaldsliste ingeninnholdsfortegnelse ingeninnholdsliste ingenseksjonsredigering innholdsfortegnelse
    inteindexera interedigerasektion indexera skjultkategori piiloluokka sisluett sisluettpakotus eisisluett faracuprins
    cuprins farageralie farageditsectiune nincstj nincsszerk legyentj notaula capdetaula forcataula
    bezsadrzaja sadrzaj brezkazala brezkazalavsebine
"""
_SWITCHES = frozenset(_SWITCH_WORDS.split())
_SWITCH = re.compile(r"__([^\s<>|(){}\[\]]{1,64}?)__")
# The switches whose case does not matter.
_ANY_CASE = frozenset(
    ("forcetoc", "nocontentconvert", "nocc", "noeditsection", "nogallery", "notitleconvert", "notc", "notoc", "toc")
)
_ALLOWED = re.compile("[\t\n -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # Sanitizer::validateCodepoint
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
# But main() and x[] stay. Possessive, and tried only at the first of several spaces, so that the work is linear.
_EMPTY_BRACKETS = re.compile(r"(?<!\s)\s++(?:\([,;:\s]*+\)|\[\s*+\])")
_EMPTY_FIRST = re.compile(r"\(\s*[,;]\s*")
_SPACES = re.compile(r"[^\S\n]+")
_BLANK_LINES = re.compile(r"\n{3,}")


class WikitextReader:
    """Turns one wiki's markup into text.

    Args:
        hidden_namespaces: Lower-case names whose links are not text, in addition to the English ones.
        language: A code such as zh. MediaWiki converts text between scripts in some languages.
    """

    def __init__(self, hidden_namespaces: frozenset[str] = frozenset(), language: str = "") -> None:
        self._hidden = _HIDDEN_NAMESPACES | hidden_namespaces
        self._is_converted = language in _CONVERTED.split("|")

    def text(self, markup: str, place: str) -> str | Refusal:
        """Returns a page's text, with a line per paragraph, heading and list item; a Refusal names `place`."""
        import mwparserfromhell
        from mwparserfromhell.parser import ParserError

        markup = _CONTROL.sub("", markup)
        try:
            # Quotes for bold and italic are removed below, because the parser gives up on unmatched ones.
            text = self._rendered(mwparserfromhell.parse(markup, skip_style_tags=True).nodes)
        except (ParserError, RecursionError) as error:
            problem = f"markup that mwparserfromhell cannot parse ({type(error).__name__})"
            return Refusal("bad_page", place, problem, "Remove the page")
        text = without_open_tables(without_open_tags(_COMMENT.sub("", text)))
        if self._is_converted:
            # The parser leaves links whose target has braces; after the conversion they can be resolved.
            text = _LINK.sub(r"\1", _first_variants(text))
        text = _SWITCH.sub(_without_switch, _QUOTES.sub("", text)).translate(_FROM_TEXT)
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
                # MediaWiki shows references to characters that XML or HTML does not allow as they are written.
                character = str(node.normalize())
                return character.translate(_AS_TEXT) if _ALLOWED.fullmatch(character) else str(node)
            case "Wikilink":
                title = str(node.title).strip()
                namespace = title.partition(":")[0].strip().lower().replace("_", " ") if ":" in title else ""
                # [[:Category:X]] has no namespace here: the colon in front makes it an ordinary link.
                is_language = node.text is None and _LANGUAGE_LINK.match(title)
                if namespace in self._hidden or _MEDIA.match(title) or is_language:
                    return ""
                return self._rendered(node.text.nodes) if node.text is not None else title.removeprefix(":")
            case "ExternalLink":
                shown = node.title if node.brackets else node.url
                return self._rendered(shown.nodes) if shown is not None else ""
            case "Heading":
                return f"\n{self._rendered(node.title.nodes)}\n"
            case "Tag":
                name = str(node.tag).strip().lower()
                if name in _BREAKS:
                    return "\n"
                if name in _HIDDEN_TAGS or node.contents is None:
                    return ""
                content = self._rendered(node.contents.nodes)
                if name in ("nowiki", "pre"):
                    content = content.translate(_AS_TEXT)
                return f"{_BORDER}{content}{_BORDER}" if name in _BLOCKS else content
        return ""  # a template, an argument of one, or a comment


def _without_switch(match: re.Match[str]) -> str:
    word = match[1]
    is_upper = word == word.upper()
    is_switch = word.lower() in (_SWITCHES if is_upper else _ANY_CASE) or (is_upper and not word.isascii())
    return "" if is_switch else match[0]


def without_open_tags(text: str) -> str:
    """Removes the tags that the parser left, because they are not closed, or closed in another order.

    What stands between hidden tags, such as <ref> and </ref>, goes with them.
    """
    pieces: list[str] = []
    opened: list[tuple[str, int]] = []  # hidden tags that are still open, with the number of pieces before each
    depths: Counter[str] = Counter()  # how many of them have a name
    end = 0
    for tag in _TAG.finditer(text):
        name = tag[2].lower()
        if name not in _TAGS:
            continue
        pieces.append(text[end : tag.start()])
        end = tag.end()
        if name in _BREAKS:
            pieces.append("\n")
        elif name in _BLOCKS:
            pieces.append(_BORDER)
        if name not in _HIDDEN_TAGS or tag[0].endswith("/>"):
            continue
        if not tag[1]:
            opened.append((name, len(pieces)))
            depths[name] += 1
        elif depths[name]:
            inner = ""
            while inner != name:  # tags that are open inside of this one are never closed
                inner, begin = opened.pop()
                depths[inner] -= 1
            del pieces[begin:]
    text = "".join([*pieces, text[end:]])
    return _BETWEEN_WORDS.sub("\n", text).replace(_BORDER, "")


def without_open_tables(text: str) -> str:
    """Removes the tables that the parser left, because they are indented or not closed."""
    if "{|" not in text:
        return text
    lines: list[str] = []
    opened: list[int] = []  # the numbers of lines before each table that is still open
    for line in text.split("\n"):
        mark = line.lstrip(" \t:*#;")
        if mark.startswith("{|"):
            opened.append(len(lines))
        if opened and mark.startswith("|}"):
            del lines[opened.pop() :]
            line = mark[2:]
        lines.append(line)
    # Of a table that is not closed, what does not look like one is text.
    begin = opened[0] if opened else len(lines)
    lines[begin:] = [line for line in lines[begin:] if not line.lstrip(" \t:*#;").startswith(("{|", "|", "!"))]
    return "\n".join(lines)


def _first_variants(text: str) -> str:
    """Keeps the first variant in -{zh-hans:a;zh-hant:b}- (https://www.mediawiki.org/wiki/Writing_systems/Syntax)."""
    # A stack instead of nested regular expressions, so that the time is linear.
    outer: list[list[str]] = []  # the text before each open -{
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


# XML dumps (https://www.mediawiki.org/xml/export-0.11.xsd). A multistream dump is one XML document in several .bz2
# streams. In paths, {*} stands for the XML namespace, which differs between versions of the format.

# Wiki namespaces whose links are not text: media, files and categories.
_HIDDEN = ("-2", "6", "14")
# Dumps before version 0.6 of the format (2012) name a page's namespace only in its title, and those before 0.4 mark
# redirects only in their text. Every wiki knows the English names.
_ENGLISH_NAMESPACES = frozenset(
    f"{name}{talk}"
    for name in ("user", "project", "wikipedia", "file", "image", "mediawiki", "template", "help", "category")
    for talk in ("", " talk")
).union(("media", "special", "talk"))
_REDIRECT = re.compile(r"\s*#\s?((?i:redirect)|[^\s:\[#]+)\s*:?\s*\[\[")
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
# A worker's batch: markup for about a fifth of a second, or this many pages if most are not articles.
BATCH_CHARACTERS, BATCH_PAGES = 1 << 18, 1000


class _Article(NamedTuple):
    """An article whose markup is still to be removed."""

    place: str
    markup: str


_Batch = tuple[WikitextReader, list[_Article | Item]]  # some pages, in the order of the dump


def article_documents(path: str, on_read: OnRead = ignore_progress, workers: int = 1) -> Items:
    """Yields a dump's documents: the newest text of articles (pages in namespace 0 that are no redirect).

    Omits other pages, and pages that are not wikitext. If a dump is damaged, yields a Refusal at the end.

    Args:
        workers: If more than one, processes that remove the markup, while this one parses the XML. Documents and their
            order stay the same.

    Raises:
        Refusal: The XML is not a dump.
    """
    blocks = checked_blocks(path, "mediawiki", on_read)
    for items in processes.map_in_order(_items, _batches(path, blocks), workers):
        yield from items


def _batches(path: str, blocks: Iterator[bytes]) -> Iterator[_Batch]:
    """Yields a dump's pages, and at the end a Refusal if it is damaged."""
    language, hidden, names = "", frozenset[str](), _ENGLISH_NAMESPACES
    pages: list[_Article | Item] = []
    size = 0
    try:
        for element in _elements(blocks):
            name = _name(element)
            if name == "page":
                pages.append(_page(element, path, names))
                size += len(pages[-1].markup) if isinstance(pages[-1], _Article) else 0
            # The language and namespaces come before the pages, and a batch has one reader for them all.
            is_full = size >= BATCH_CHARACTERS or len(pages) >= BATCH_PAGES
            if pages and (is_full or name != "page"):
                yield WikitextReader(hidden, language), pages
                pages, size = [], 0
            if name == "mediawiki":
                language = element.get(_LANGUAGE, "")
            if name == "siteinfo":
                namespaces = element.findall("{*}namespaces/*")
                names |= {(space.text or "").lower() for space in namespaces if space.get("key") != "0"}
                hidden = frozenset((space.text or "").lower() for space in namespaces if space.get("key") in _HIDDEN)
    except ElementTree.ParseError as error:
        pages.append(damaged(path, error))
    except Refusal as refusal:
        pages.append(refusal)
    if pages:
        yield WikitextReader(hidden, language), pages


def _elements(blocks: Iterator[bytes]) -> Iterator[Element]:
    """Yields the root when it begins, then its children, which it drops afterwards. Pages keep one revision."""
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    path: list[Element] = []  # from the root to the element that has begun last
    is_empty = True
    for block in blocks:
        is_empty = False
        try:
            # XML allows no control characters, which some wikis' pages have; all later pages would be lost.
            parser.feed(block.translate(None, CONTROLS))
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
                # Drops older revisions to save memory. A block may hold newer ones, which are in the page already.
                revisions = path[1].findall("{*}revision")
                for older in revisions[: revisions.index(element)]:
                    path[1].remove(older)
            elif len(path) == 1:
                yield element
                path[0].clear()
    if not is_empty:
        parser.close()


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _page(page: Element, path: str, names: frozenset[str]) -> _Article | Item:
    """Returns a page's markup, or an Omission; `names` are the lower-case names of all namespaces but the articles'."""
    model = page.findtext("{*}revision/{*}model") or "wikitext"
    title, markup = page.findtext("{*}title", ""), page.findtext("{*}revision/{*}text", "")
    is_article = page.find("{*}redirect") is None and model == "wikitext"
    if namespace := page.findtext("{*}ns", ""):
        is_article &= namespace == "0"
    else:
        prefix = title.partition(":")[0].strip().lower().replace("_", " ") if ":" in title else None
        redirect = _REDIRECT.match(markup)
        is_redirect = redirect and (redirect[1].lower() == "redirect" or redirect[1] == redirect[1].upper())
        is_article &= prefix not in names and not is_redirect
    if not is_article:
        return Omission("not_an_article")
    place = f"{path}, page {title!r}"
    return _Article(place, markup) if len(markup) <= text.MAX_DOCUMENT_BYTES else text.too_long(place)


def _items(batch: _Batch) -> list[Item]:
    """Returns a batch's documents, which any process may compute."""
    reader, pages = batch
    items: list[Item] = []
    for page in pages:
        if isinstance(page, _Article):
            content = reader.text(page.markup, page.place)
            page = check(content.encode("utf-8", "replace"), page.place) if isinstance(content, str) else content
        items.append(page)
    return items
