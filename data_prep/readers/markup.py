"""Recognizes HTML and XML without a declaration: all of the text is inside of elements, which are closed.

Tags alone prove nothing. Markdown and wikitext have elements of HTML, chats begin with <nick>, and text for language
models has <s> and <unk>. They differ in text outside of the elements, or in tags that nothing closes.
"""

import re

# A page may begin with elements that say that it is one, whatever follows.
_PAGE = re.compile(
    rb"<title>[^<]*</title>\s*<|<(script|style)\b[^<>]*>.*?</\1>|<(?:meta|link|base)\s[^<>]*=[^<>]*>", re.DOTALL
)
# HTML by the name of the first element alone; elements of other names are XML only if they have elements inside.
_HTML = frozenset(
    b"address article aside blockquote center dd div dl dt fieldset figure footer form frameset h1 h2 h3 h4 h5 h6 "
    b"header li main nav noscript ol p pre section span table tbody td th thead tr ul".split()
)
_VOID = frozenset(b"area base br col embed frame hr img input link meta param source track wbr".split())
_START = re.compile(rb"<(?:[a-z_]|!--)")
_NO_ELEMENT = re.compile(rb"<!--.*?-->|<!\[cdata\[.*?\]\]>|<[?!][^<>]*>", re.DOTALL)
_TAG = re.compile(rb"<(/?)([a-z_][\w.:-]*)(?:\s[^<>]*?)?(/?)>")


def recognize(text: bytes, cut: bool) -> str:
    """HTML, XML, or nothing for other text. The text is in lower case, and its end may be cut off."""
    if not _START.match(text):
        return ""
    text = _NO_ELEMENT.sub(b"", text).strip()
    if cut:
        text = text[: max(text.rfind(b"<"), 0)]
    first = _TAG.match(text)
    if first is None:
        return ""
    if _PAGE.match(text):
        return "HTML"
    is_html = first[2] in _HTML
    is_markup, is_nested = _structure(text, cut)
    return ("HTML" if is_html else "XML") if is_markup and (is_html or is_nested) else ""


def _structure(text: bytes, cut: bool) -> tuple[bool, bool]:
    """Whether all text is inside of elements that are closed, and whether one of them has an element inside.

    The last element may lack its end where the text is cut off, if it has no text of its own, as the root of a large
    file, or if most of the text is in the elements before it.
    """
    open_names: list[bytes] = []
    start = end = 0  # of the outermost element, and of the newest tag
    is_nested = has_text = False  # the outermost element has text of its own
    for tag in _TAG.finditer(text):
        is_text = bool(text[end : tag.start()].strip())
        if is_text and not open_names:
            return False, is_nested
        has_text |= is_text and len(open_names) == 1
        end = tag.end()
        closes, name, is_empty = tag.groups()
        if closes and name in open_names:
            depth = len(open_names) - 1 - open_names[::-1].index(name)
            is_nested |= depth > 0
            del open_names[depth:]
        elif not closes and is_empty:
            is_nested |= bool(open_names)
        elif not closes and name not in _VOID:
            if not open_names:
                start, has_text = tag.start(), False
            open_names.append(name)
    if not open_names:
        return not text[end:].strip(), is_nested
    return cut and (not has_text or start > len(text) / 2), is_nested
