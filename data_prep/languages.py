"""The words that decide sentence borders in each language: words that take a full stop, and words that begin sentences.

The lists are made by hand from common running text, in lower case. `common` holds the most frequent words of a
language: they identify the language of a text, and with a capital letter they indicate a new sentence.
"""

from typing import NamedTuple


class Language(NamedTuple):
    """Words by the meaning of a full stop after them."""

    common: frozenset[str]
    never: frozenset[str]  # the full stop never ends a sentence: titles before names
    counted: frozenset[str]  # it does not end a sentence before a number: No. 5
    may: frozenset[str]  # it ends one if a common word follows
    last: frozenset[str]  # it ends one before anything but a lower-case letter, however short the word
    known: frozenset[str]  # all of these
    ordinals: bool  # whether a number with a full stop is an ordinal: der 4. Mai


TITLES = frozenset(("mr", "mrs", "dr", "prof", "rev", "st"))  # known in every language


def _language(common: str, never: str, counted: str, may: str, last: str = "", ordinals: bool = False) -> Language:
    """Makes a Language of word lists; `last` keeps case, by which Greek tells "for example" from "before Christ"."""
    parts = (part for word in f"{never} {counted} {may} {last}".split() for part in (word, *word.lower().split(".")))
    words = [frozenset(listed.split()) for listed in (common, never, counted, may, last)]
    return Language(words[0], words[1], words[2], words[3], words[4], TITLES.union(parts), ordinals)


LANGUAGES = {
    "en": _language(
        """the a an he she it they we you i this that these those there here in on at as by for from with after
        before during when while although though if but and or so then however since until because what who why
        how where his her its their our my your one some many most all both each another other not no yes of to is
        was were are be have had which""",
        """mr mrs ms mx dr drs prof ste mt rev hon fr sr sra sen rep gov pres gen maj col lt capt cpt cmdr cdr adm sgt
        cpl pvt brig supt insp messrs mme mlle mgr msgr esq vs v viz cf eg e.g ie i.e ca approx ed eds trans ibid
        univ dept assn bros""",
        "no nos nr fig figs eq sec ch chap p pp op vol vols bk pt art par",
        """st jr inc ltd co corp plc llc etc al a.m p.m b.c a.d bc u.s u.k u.s.a u.n e.u d.c ph.d m.d b.a m.a jan feb
        mar apr jun jul aug sept oct nov dec ave blvd rd sq ft lb lbs oz est""",
    ),
    "de": _language(
        """der die das den dem des ein eine einen einem einer er sie es wir ich ihr im in am an auf aus bei mit nach vor
        von zu zum zur für aber und oder doch denn als wenn da dann so auch diese dieser dieses seine ihre man nur
        noch jetzt hier was wer wie wo warum nun durch seit während nicht ist war sich hat hatte alle""",
        """dr prof hr hrn fr frl st bzw ca vgl sog evtl ggf inkl exkl zzgl max min gegr geb gest allg bes insb dipl
        ing med phil jur rer nat hl mag z.b d.h m.e u.a.m i.d.r v.a sr jr bspw einschl""",
        "nr bd bde s abb tab kap art abs ziff aufl jg sp anm",
        """usw etc u.a u.ä o.ä jh jhd jhdt jahrh mio mrd tsd str tel hrsg vers co n.chr v.chr chr uvm jan feb apr aug
        sept okt nov dez""",
        ordinals=True,
    ),
    "fr": _language(
        """le la les l un une des du de et il elle ils elles on nous vous je ce cette ces cet son sa ses leur leurs dans
        en à au aux par pour sur avec sans sous mais ou où donc or ni car quand comme si puis alors après avant depuis
        pendant selon que qui est était pas plus tout tous""",
        """m mm mme mmes mlle mlles mgr dr drs pr me st ste cf ex p.ex éd av apr env boul col gén lt cap adj""",
        "no nos n art chap fig vol p pp t tom pl §",
        "etc jr cie hab sq déc janv févr juill sept oct nov",
        "j.-c av.j.-c",
    ),
    "es": _language(
        """el la los las un una unos unas de del y e o en a al por para con sin sobre entre desde hasta que se su sus es
        era fue son lo le les me mi yo él ella ellos no sí pero cuando como si también este esta estos estas ese esa
        aquel tras según durante así ya más muy""",
        """sr sra sres srta dr dra d dña dn ud uds vd vds lic ing prof profa gral cnel cap tte mons fr sto sta ee ff rr
        ej p.ej aprox avda vda fray excmo ilmo""",
        "núm núms n nº no art arts cap pág págs p pp vol fig t",
        "etc cía ltda s.a jr a.m p.m uu ee.uu tel",
        "a.c d.c a.de.c",
    ),
    "pt": _language(
        """o a os as um uma uns umas de do da dos das e ou em no na nos nas ao à aos às por pelo pela para com sem sobre
        entre desde até que se seu sua seus suas é era foi são não sim mas quando como também este esta esse essa
        aquele após segundo durante assim já mais muito ele ela eles elas eu""",
        """sr sra srs sras dr dra d prof profa eng arq exmo exma ex v.ex sto sta gen cel cap ten alm pe fr av aprox""",
        "n nº núm art arts cap pág págs p pp vol fig",
        "etc cia ltda s.a jr tel",
        "a.c d.c",
    ),
    "it": _language(
        """il lo la i gli le l un uno una di del dello della dei degli delle e o ed in nel nella nei a al alla ai da dal
        dalla per con su sul sulla tra fra che si suo sua suoi è era fu sono non ma quando come se anche questo questa
        questi quel quella dopo prima durante così già più egli ella lui lei io""",
        """sig sigg sig.ra sig.na dott dott.ssa dr prof prof.ssa ing avv on rev mons gen col cap ten s ss cfr es p.es
        geom arch comm cav""",
        "n nn num art artt cap capp pag pagg p pp vol fig tav",
        "ecc etc s.p.a s.r.l jr tel",
        "a.c d.c",
    ),
    "pl": _language(
        """i w we z ze na do od po o u a ale nie to jest są był była było się że który która które jak tak co gdy kiedy
        jeśli jego jej ich ten ta te tego tej on ona ono oni ja my dla przez przed przy pod nad bez lub oraz także też
        już tylko więc czy""",
        """dr mgr inż prof hab lek med ks bp abp kard św gen płk mjr kpt por ppor sierż red ob al ul pl os woj pow gm
        m.in np tzn tzw tj wg zob ok im tow ww""",
        "nr nry str s t poz pkt ust art rozdz rys tab",
        "itd itp godz min mln mld tys zł gr cd jr ha km",
        "r n.e p.n.e",
    ),
    "cs": _language(
        """a i v ve na s se z ze do od po o u k ke že to je jsou byl byla bylo byli který která které jak tak co když
        aby ale nebo ani jeho její jejich ten ta tento tato on ona oni já my pro při před pod nad bez podle také už jen
        tedy však si není""",
        """dr mudr judr rndr phdr ing mgr bc prof doc p sv tzv tzn tj např resp cca kpt gen plk npor por pplk mjr vs ul
        nám zvl event""",
        "č čís str s odst roz obr tab",
        "atd apod aj mj kol stol tis mil mld jr ml st př",
        "n.l př.n.l",
        ordinals=True,
    ),
    "hu": _language(
        """a az és hogy nem is egy ez azt ezt de meg csak volt van lesz már még mint ha akkor mert vagy aki ami amely
        minden sem majd most itt ott úgy így nagyon ő ők én mi ti el ki be le fel után előtt között szerint""",
        "dr prof id ifj özv ún pl kb ill br gr szt ker u uo vö st",
        "sz old o bek fej köt p",
        "stb kft bt rt nyrt zrt kr sz.m",
        "i.e i.sz",
        ordinals=True,
    ),
    "ro": _language(
        """și în la de din cu pe pentru că să nu este sunt era a au o un unei unui cel cea cei cele care ce mai fost
        prin dar sau dacă când cum după înainte între spre fără el ea ei ele eu noi lui ale al ai acest această
        aceste se s-a într-o într-un""",
        "dl dna dra d-l d-na dr prof ing av sf pr gen col cpt lt str bd jud ex",
        "nr art alin lit pag p vol cap fig pct",
        "etc ș.a ș.a.m.d jr mil mld",
        "î.hr d.hr",
    ),
    "tr": _language(
        """ve bir bu da de için ile o olarak olan çok daha en gibi kadar sonra ama ancak ne ki her ya ise değil var yok
        idi oldu şu ben sen biz siz onlar onun bunun göre karşı önce""",
        "dr prof doç yrd av mah sok cad apt alb gen org tuğg müh öğr gör hz örn bkz yy st m.ö m.s",
        "no s sf c bl md",
        "vb vs vd a.ş ltd şti",
        ordinals=True,
    ),
    "vi": _language(
        """và của là các có được trong cho không một những với người này đã khi để từ ở ra năm đến cũng như về theo tại
        vào nhưng sau trên ông bà nó họ""",
        "tp ts ths gs pgs bs ks tx",
        "tr đ",
        "v.v",
    ),
    "ru": _language(
        """и в во не на с со что он она оно они я мы вы по к ко из у за от о об для но а как так это все его ее их был
        была было были бы же то или если когда при до также после этот эта эти только уже ещё еще чтобы который
        однако потом там тут теперь тогда где кто почему есть нет""",
        """г-н г-жа гр проф акад доц инж ген полк кап лейт св им ул пл пр-т пер просп оз напр см ср тов тел т.е т.к т.н
        т.ч рт ред изд""",
        "рис табл гл ст с стр п пп т тт кн вып",
        "г гг в вв др руб коп тыс млн млрд долл н.э чел",
        "т.д т.п н.э до.н.э",
    ),
    "uk": _language(
        """і й в у та не на з зі із що він вона воно вони я ми ви по до від за о об для але а як так це все його її їх
        був була було були б би ж то або якщо коли при також після цей ця ці тільки вже ще щоб який яка які проте
        потім там тут тепер тоді де хто чому є""",
        """п проф акад доц інж ген полк кап св ім вул пл пров просп оз напр див пор тов тел т.зв т.ч ред вид обл м с""",
        "рис табл гл ст стор п пп т ч",
        "р рр в вв ін грн коп тис млн млрд н.е",
        "т.д т.п н.е до.н.е",
    ),
    "el": _language(
        """και το η ο τα οι τον την του της των τους τις στο στη στην στον στα στις με σε για από που να δεν είναι ήταν
        ότι θα μια ένα ένας αλλά ή αν όταν όπως μετά πριν κατά αυτό αυτή αυτός ως""",
        "κ κα κος κ.κ δρ καθ βλ π.χ λ.χ δηλ αγ",
        "αρ αριθ σελ τ παρ αρθ άρθρ",
        "κ.λπ κλπ κ.ά κ.α κτλ χλμ μ.μ π.μ",
        "π.Χ μ.Χ",
    ),
    "hi": _language(
        "के का की में है और को से पर ने यह वह कि एक हैं था थी थे इस उस नहीं भी लिए तो ही कर जो", "डॉ प्रो श्री श्रीमती सु", "सं", ""
    ),
}
