"""The text of pages in MediaWiki's markup, as a reader sees it, without templates, tables and references.

mwparserfromhell parses the markup; this module decides what of it is text. Templates are programs in other pages of
the wiki, so whatever they would print (conversions of units, phrases in other languages) is left out with them.
"""

import re
from collections.abc import Iterable
from typing import Any

from data_prep.readers.refusal import Refusal

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
