"""Dumps of wikis: which pages are documents, and what of their markup is text."""

import bz2
import gzip
import xml.sax.saxutils
from pathlib import Path

import pytest

from bert_jax.errors import UserError
from bert_jax.storage import files
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import Omission, text, wiki
from data_prep.readers.corpus import Corpus, Reading, find_sources, read

mwparserfromhell = pytest.importorskip("mwparserfromhell")

NAMESPACES = {
    "-2": "Medium",
    "-1": "Spezial",
    "0": "",
    "1": "Diskussion",
    "6": "Datei",
    "10": "Vorlage",
    "14": "Kategorie",
}


def revision(text: str, model: str = "wikitext") -> str:
    return (
        "    <revision>\n      <id>1</id>\n      <timestamp>2024-01-01T00:00:00Z</timestamp>\n      <contributor>"
        "<username>A</username><id>2</id></contributor>\n      <comment>a comment</comment>\n      <origin>1</origin>\n"
        f"      <model>{model}</model>\n      <format>text/x-wiki</format>\n"
        f'      <text bytes="{len(text.encode())}" xml:space="preserve">{xml.sax.saxutils.escape(text)}</text>\n'
        "      <sha1>x</sha1>\n    </revision>\n"
    )


def page(title: str, *revisions: str, namespace: int = 0, redirect: str = "") -> str:
    there = f'    <redirect title="{redirect}" />\n' if redirect else ""
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{namespace}</ns>\n    <id>7</id>\n{there}"
        f"{''.join(revisions)}  </page>\n"
    )


def head(version: str = "0.11", language: str = "de") -> str:
    namespaces = "".join(
        f'      <namespace key="{key}" case="first-letter">{name}</namespace>\n' for key, name in NAMESPACES.items()
    )
    return (
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-{version}/" version="{version}" '
        f'xml:lang="{language}">\n'
        "  <siteinfo>\n    <sitename>Wikipedia</sitename>\n    <dbname>dewiki</dbname>\n    <namespaces>\n"
        f"{namespaces}    </namespaces>\n  </siteinfo>\n"
    )


END = "</mediawiki>\n"


def items(tmp_path: Path, content: str | bytes, name: str = "a.xml") -> list:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read(str(tmp_path / name)))


def text_of(tmp_path: Path, markup: str, language: str = "de") -> str:
    (found,) = items(tmp_path, head(language=language) + page("A", revision(markup)) + END)
    return found.decode()


MARKUP = {
    "emphasis": ("'''Paris''' is ''not'' '''''here'''''. L''''''amour'''''' wins", "Paris is not here. L'amour' wins"),
    "links": (
        "The [[capital city|capital]] of [[France]]s, [[:Kategorie:Stadt]]",
        "The capital of Frances, Kategorie:Stadt",
    ),
    "files and categories": (
        "One [[Datei:x.jpg|mini|A [[caption]] here]]two [[file:y.png]]three\n[[Kategorie:Stadt|P]]\n[[category:City]]",
        "One two three",
    ),
    "files under an alias of their namespace": (
        "One [[Bild:x.JPG|mini|A [[caption]]]]two [[Imagen:Una calle.svg |thumb|x]]three [[画像:音.ogg]]four "
        "[[:Bild:x.png]] and [[Star Wars: A New Hope|film]], [[ASP.svg]], [[commons:File:x.jpg|photograph]]",
        "One two three four Bild:x.png and film, ASP.svg, photograph",
    ),
    "links to other languages": ("Paris\n[[de:Paris]]\n[[zh-min-nan:Paris]]", "Paris"),
    "external links": (
        "See [https://a.org the site], [https://b.org] and https://c.org now",
        "See the site, and https://c.org now",
    ),
    "templates": ("Born {{birth|1879|{{month|3}}}} in {{lang|de|Ulm\n|x}}Ulm. {{{argument}}}", "Born in Ulm."),
    "what templates leave": (
        "Paris ({{IPA|x}}; {{lang|fr}}) is, ({{x}}, French) ( {{y}} ) so",
        "Paris is, (French) so",
    ),
    "brackets of the article": ("call main() or a[] {{x}}({{y}})", "call main() or a[]"),
    "references": (
        'A fact.<ref name="a">{{cite|x}} Page 3.</ref> And<ref name="a" /> more.\n<references/>',
        "A fact. And more.",
    ),
    "tables": ('One\n{| class="wikitable"\n! a !! b\n|-\n| [[c]] || d\n{|\n| nested\n|}\n|}\ntwo', "One\n\ntwo"),
    "headings": (
        "One.\n\n== History ==\nTwo.\n=== ''Old'' [[times]] ===\nThree.",
        "One.\n\nHistory\n\nTwo.\n\nOld times\n\nThree.",
    ),
    "lists": ("* one\n** two\n# three\n: four\n; five : six", "one\ntwo\nthree\nfour\nfive six"),
    "comments and switches": ("__NOTOC__One<!-- a\ncomment --> two{{DEFAULTSORT:x}}__FORCETOC__", "One two"),
    "entities": ("2&nbsp;km &ndash; 5&#160;&lt;b&gt; &amp;amp; &#x3b1;", "2 km – 5 <b> &amp; α"),
    "tags of text": (
        "H<sub>2</sub>O <small>small</small> <div class='x'>block</div> <b>bold</b>",
        "H2O small block bold",
    ),
    "tags without text": (
        "a <math>x^2 < 3</math>b <gallery>\nx.jpg|y\n</gallery>c <syntaxhighlight>d</syntaxhighlight>e",
        "a b c e",
    ),
    "nowiki": ("<nowiki>[[not a link]] {{not}}</nowiki> here", "[[not a link]] {{not}} here"),
    "line breaks": ("one<br>two<br />three<br/>four", "one\ntwo\nthree\nfour"),
    "blank lines": ("one\n\n\n\n{{x}}\n\n\ntwo\n", "one\n\ntwo"),
    # The rest by MediaWiki's Sanitizer, Preprocessor and BlockLevelPass, and by its list of magic words.
    "HTML that is not closed": (
        '<p>One.\n<p>Two <span style="color:{{x}}">three <FONT\nsize=2>four</p></p> five<br/ >six</small>',
        "One.\nTwo three four five\nsix",
    ),
    "crossed tags": ("<div><b><i>one</b></i> <ref>hidden</div></ref>two</span>", "one two"),
    "blocks that touch": (
        "<ul><li>one<li>two</li></ul>three<p>four</p><div>five</div> six",
        "one\ntwo\nthree\nfour\nfive six",
    ),
    "tags over several lines": (
        "one<ref\n name='a'>\nhidden\n</ref\n>, two<ref\nname=b />, <br\n>three",
        "one, two,\nthree",
    ),
    "nested hidden tags": ("a<ref\n>b<ref\n>c</ref>d</ref>e<ref\n><table></ref>f</table>g <ref>h", "aef\ng h"),
    "tags that MediaWiki does not know": ("C: #include <stdio.h> <vector> a<b", "C: #include <stdio.h> <vector> a<b"),
    "a comment that does not end": ("one <!-- two --> three <!-- four\n\nfive", "one three"),
    "indented tables": ("One\n:{| a\n| b\n|}\n::{|\n! c\n:{|\n| d\n|}\n|} two\n* {|\n|}\nthree", "One\n\ntwo\n\nthree"),
    "a table that does not end": ("One\n{| class=x\n|-\n! a || b\n| c\ntwo", "One\ntwo"),
    "switches": ("a__NOTOC__b __notoc__ __Toc__ __HIDDENCAT__ __NOGLOBAL__ __EXPECTUNUSEDCATEGORY__", "ab"),
    "switches of other languages": (
        "__KEIN_INHALTSVERZEICHNIS__ __SANSTITRE__ __AUCUNSOMMAIRE__ __БЕЗ_ОГЛ__ __目次非表示__ "
        "__अनुक्रम_दिखाएँ__ __بی\u200cبخش__",
        "__SANSTITRE__",
    ),
    "words that are no switch": (
        "__FILE__ __init__ __LINE__ __hiddencat__ __ __a b__ ____ __gänge__ <nowiki>__TOC__</nowiki> &#95;_TOC__",
        "__FILE__ __init__ __LINE__ __hiddencat__ __ __a b__ ____ __gänge__ __TOC__ __TOC__",
    ),
    "references to no character": (
        "a&#8;b &#x1F; &#0; &#xD800; &#xFFFE; &#150; &#9999999; &nosuch; &#x1F600; &#9;c",
        "a&#8;b &#x1F; &#0; &#xD800; &#xFFFE; &#150; &#9999999; &nosuch; 😀 c",
    ),
    "markup that is text": (
        "&#39;&#39;a'' <nowiki>''<b>[[x]]</nowiki> <pre>{|\n<i></pre> &lt;ref>b&lt;/ref>",
        "''a ''<b>[[x]] {|\n<i> <ref>b</ref>",
    ),
    "text for other pages": ("a<includeonly>b</includeonly><noinclude>c</noinclude>", "ac"),
    "control characters": ("a\x7fb", "ab"),
    "what does not end": ("'''bold and [[link|text", "bold and [[link|text"),
}


@pytest.mark.parametrize("markup, wanted", MARKUP.values(), ids=MARKUP)
def test_markup_is_removed(tmp_path, markup, wanted):
    assert text_of(tmp_path, markup) == wanted


CONVERSIONS = {
    "variants": ("用-{zh-hans:计算机; zh-hant:電腦;}-写的-{zh-cn:软件;zh-tw:軟體}-。", "用计算机写的软件。"),
    "what is not converted": ("-{范}-先生说 -{http://a.org; b}-", "范先生说 http://a.org; b"),
    "hidden rules": ("-{H|zh-cn:a;zh-tw:b}--{T|zh-cn:a;}--{D|zh:c}--{-|zh:d}-文", "文"),
    "rules that are shown": ("-{A|zh-cn:a;zh-tw:b}-文-{zh-hans;zh-hant|c}--{甲=>zh-cn:乙;丙=>zh-tw:丁}-", "a文c乙"),
    "rules in targets of links": ("[[-{zh-hans:甲;zh-hant:乙}-|机器]]是[[:-{zh-cn:丙;zh-tw:丁}-]]。", "机器是丙。"),
    "nested rules": ("-{zh-hans:一-{zh-hans:[[二|三]];zh-hant:四}-;zh-hant:五}-。", "一三。"),
    "links in rules": ("[[条目|-{zh-hans:甲;zh-hant:乙}-]]和-{zh-cn:''[[丙]]'';zh-tw:丁}-", "甲和丙"),
    "what does not begin or end": ("a}- -{b-{zh:c}-", "a}- -{bc"),
}


@pytest.mark.parametrize("markup, wanted", CONVERSIONS.values(), ids=CONVERSIONS)
def test_text_in_several_scripts_has_its_first_variant(tmp_path, markup, wanted):
    assert text_of(tmp_path, markup, "zh") == wanted


def test_a_wiki_of_one_script_has_no_conversion(tmp_path):
    assert text_of(tmp_path, "4-{[4-(x)]amino}-benzoic acid") == "4-{[4-(x)]amino}-benzoic acid"


@pytest.mark.parametrize("repeated", ["-{", "}-", "-{zh:", "-{}-", "; ", "-{a;zh:b;", "[[", "[[-{a}-", "[[:", "|"])
def test_variants_are_found_in_linear_time(repeated):
    """Were it quadratic, this would take minutes."""
    reader = wiki.WikitextReader(language="zh")
    for first, last in (("", ""), ("-{zh:", "}-"), ("-{" * 9, "}-" * 9)):
        assert isinstance(reader.text(first + repeated * (200_000 // len(repeated)) + last, "a"), str)


def test_only_articles_are_documents_and_the_rest_is_counted(tmp_path):
    content = (
        head()
        + page("One", revision("The first article."))
        + page("Uno", revision("#WEITERLEITUNG [[One]]"), redirect="One")
        + page("Diskussion:One", revision("A talk."), namespace=1)
        + page("Vorlage:X", revision("A template."), namespace=10)
        + page("Data", revision("{}", model="json"))
        + page("Empty", revision("{{only a template}}"))
        + page("Two", revision("The second article."))
        + END
    )
    other = Omission("not_an_article")
    assert items(tmp_path, content) == [b"The first article.", *[other] * 4, b"", b"The second article."]
    corpus = Corpus(find_sources(f"{tmp_path}/a.xml"))
    assert list(corpus.documents()) == ["The first article.", "The second article."]
    assert corpus.refused == {"not_an_article": 4, "empty_text": 1}


@pytest.mark.parametrize("version", ["0.1", "0.3", "0.5"])
def test_pages_of_old_dumps_have_their_namespace_in_the_title(tmp_path, version):
    """Version 0.6 of the format added <ns>, 0.4 <redirect>, 0.3 the names of namespaces."""
    pages = {
        "Stadt": "Ein Artikel.",
        "Star Wars: Episode IV": "Ein Film.",
        "Dorf": "#REDIRECT [[Stadt]]",
        "Weiler": "#WEITERLEITUNG: [[Stadt]] {{x}}",
        "Liste": "#[[Eins]]\n#Zwei [[drei]]",
        "Talk:Stadt": "Eine Frage.",
        "User_talk:A": "Ein Gruß.",
        "template:X": "Eine Vorlage.",
        "Diskussion:Stadt": "Eine Frage.",
        "Kategorie:Ort": "Ein Ort.",
    }
    content = head(version) + "".join(page(title, revision(text)) for title, text in pages.items()) + END
    content = content.replace("    <ns>0</ns>\n", "").replace("      <model>wikitext</model>\n", "")
    articles = [b"Ein Artikel.", b"Ein Film.", b"Eins\nZwei drei"]
    if version == "0.1":
        content = content[: content.index("  <siteinfo>")] + content[content.index("</siteinfo>\n") + 12 :]
        articles += [b"Eine Frage.", b"Ein Ort."]  # nothing names German namespaces
    assert [item for item in items(tmp_path, content) if isinstance(item, bytes)] == articles


@pytest.mark.parametrize("control", ["\x00", "\x08", "\x1f", "\x7f"])
def test_control_characters_in_the_xml_end_no_dump(tmp_path, control):
    content = head() + page("A", revision(f"One{control}.")) + page("B", revision("Two.")) + END
    assert items(tmp_path, content) == [b"One.", b"Two."]


@pytest.mark.parametrize("repeated", ["<ref>", "</ref>", "<p>", "<!--", "<", "<b ", ":{|\n", "|}\n", "<ref><table>"])
def test_what_the_parser_leaves_is_removed_in_linear_time(repeated):
    for last in ("", "</ref>" * 60_000, "|}\n" * 60_000):
        text = "a" + repeated * (300_000 // len(repeated)) + last
        assert wiki.without_open_tables(wiki.without_open_tags(text)).startswith("a")


def test_the_newest_revision_is_read_whatever_the_blocks(tmp_path, monkeypatch):
    content = (
        head("0.10")
        + page("One", *(revision(f"Version {number}.") for number in range(9)))
        + page("Two", revision("Two."))
        + END
    )
    for size in (7, 300, 1 << 16):
        monkeypatch.setattr(files, "BLOCK_BYTES", size)
        assert items(tmp_path, content) == [b"Version 8.", b"Two."]


@pytest.mark.parametrize(
    "name", ["dewiki-20240101-pages-articles-multistream.xml.bz2", "dewiki-20240101-pages-articles1.xml-p1p297012.bz2"]
)
def test_multistream_dumps_are_read(tmp_path, name):
    """One stream for the beginning, one for every few pages, one for the end."""
    pages = [page(f"Page {number}", revision(f"Article {number}.")) for number in range(30)]
    streams = [head(), *("".join(pages[first : first + 10]) for first in range(0, 30, 10)), END]
    (tmp_path / name).write_bytes(b"".join(bz2.compress(stream.encode()) for stream in streams))
    corpus = Corpus(find_sources(f"{tmp_path}/{name}"))
    assert list(corpus.documents()) == [f"Article {number}." for number in range(30)]
    assert corpus.bytes_read == corpus.total_bytes and not corpus.refused


def test_a_dump_that_is_cut_anywhere_is_damaged(tmp_path):
    whole = (head() + page("One", revision("One.")) + page("Two", revision("Zwei \u00fc.")) + END).rstrip().encode()
    for size in range(1, len(whole), 13):
        *texts, last = items(tmp_path, whole[:size])
        assert last.reason == ("other_format" if size < 11 else "damaged_file"), size
        assert texts == [b"One.", "Zwei \u00fc.".encode()][: len(texts)]
    streams = bz2.compress(whole[:1800]) + bz2.compress(whole[1800:])
    for size in (30, len(streams) // 2, len(streams) - 3):
        *texts, last = items(tmp_path, streams[:size], "a.xml.bz2")
        assert last.reason == "damaged_file", size


@pytest.mark.parametrize("encoding", ["gb2312", "klingon"])
def test_a_dump_in_an_encoding_that_is_not_supported_is_damaged(tmp_path, encoding):
    content = f'<?xml version="1.0" encoding="{encoding}"?>\n' + head() + page("One", revision("One.")) + END
    [last] = items(tmp_path, content)
    assert last.reason == "damaged_file"


def test_bad_pages_are_refused_and_the_rest_is_read(tmp_path, monkeypatch):
    parse = mwparserfromhell.parse

    def fail(markup: str, **options: bool) -> object:
        if "unparsable" in markup:
            raise mwparserfromhell.parser.ParserError("a bug")
        return parse(markup, **options)

    monkeypatch.setattr(mwparserfromhell, "parse", fail)
    monkeypatch.setattr(text, "MAX_DOCUMENT_BYTES", 2000)
    content = head() + "".join(
        page(title, revision(text))
        for title, text in (("A", "One."), ("B", "unparsable"), ("C", "long " * 500), ("D", "Two."))
    )
    one, parsed, long, two = items(tmp_path, content + END)
    assert (one, two) == (b"One.", b"Two.")
    assert [item.reason for item in (parsed, long)] == ["bad_page", "document_too_long"]
    with pytest.raises(UserError, match=r"a\.xml, page 'B': markup that mwparserfromhell cannot parse"):
        list(Corpus(find_sources(f"{tmp_path}/a.xml")).documents())


def test_an_empty_dump_has_no_documents(tmp_path):
    assert items(tmp_path, b"") == []
    assert items(tmp_path, head() + END) == []


def test_entities_of_entities_do_not_fill_the_memory(tmp_path):
    """Each of ten entities is ten times the one before it."""
    entities = '<!ENTITY e0 "spam spam spam spam">' + "".join(
        f'<!ENTITY e{number} "{f"&e{number - 1};" * 10}">' for number in range(1, 10)
    )
    content = f"<!DOCTYPE mediawiki [{entities}]>" + head() + page("A", "<revision><text>&e9;</text></revision>") + END
    (refusal,) = items(tmp_path, content)
    assert refusal.reason in ("damaged_file", "other_format")


def test_other_processes_remove_markup_and_change_nothing(tmp_path, monkeypatch):
    """Articles, omitted and refused pages are the same and in the same order, also before damage."""
    monkeypatch.setattr(wiki, "BATCH_CHARACTERS", 40)
    monkeypatch.setattr(wiki, "BATCH_PAGES", 3)
    pages = "".join(
        page(f"Page {number}", revision(f"''Article'' [[Datei:x.jpg]]{number}." + " \x7f" * (number == 7)))
        + page("Talk", revision("Talk."), namespace=1) * (number % 5)
        for number in range(25)
    )
    whole = (head() + pages + END).encode()
    (tmp_path / "a.xml").write_bytes(whole)
    (tmp_path / "b.xml").write_bytes(whole[: len(whole) * 2 // 3])
    for name in ("a.xml", "b.xml"):
        one, three = (list(read(f"{tmp_path}/{name}", Reading(workers=workers))) for workers in (1, 3))
        assert [str(item) for item in one] == [str(item) for item in three]
        assert [type(item) for item in one] == [type(item) for item in three]
        assert one[0] == b"Article 0."
    assert one[-1].reason == three[-1].reason == "damaged_file" and len(one) > 30


def test_examples_are_built_from_a_dump(tmp_path, sample_text, vocab_dir):
    documents = sample_text.read_text().split("\n\n")
    pages = "".join(page(f"Page {number}", revision(text)) for number, text in enumerate(documents))
    (tmp_path / "a.xml.gz").write_bytes(gzip.compress((head() + pages + END).encode()))
    manifest = build(BuildOptions(tmp_path / "a.xml.gz", vocab_dir, tmp_path / "out", 64, workers=2))
    assert manifest["counts"]["used"] == manifest["counts"]["documents"] == len(documents)
    with pytest.raises(UserError, match="unknown --input_format 'xml'; choose from auto, text, jsonl, csv"):
        Reading(input_format="xml")


def test_empty_brackets_are_found_in_linear_time():
    """A page of templates alone leaves a long run of line ends; each of them once scanned all that follow."""
    reader = wiki.WikitextReader()
    assert reader.text("Paris ( ; ) is\u00a0[ ] a city (, France) of f() and x[].", "a") == (
        "Paris is a city (France) of f() and x[]."
    )
    assert reader.text("a" + "\n" * 300_000 + "(" + " " * 300_000 + "b", "a") == "a\n\n( b"
