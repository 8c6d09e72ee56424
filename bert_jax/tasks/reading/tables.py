"""Reads tables: TSV, CSV, JSON lines, Parquet, TFDS, plain or compressed. Every error names file and line.

Other modules call `read_records`, at the end; above it is a reader for each format.
"""

import ast
import contextlib
import csv
import functools
import glob
import io
import itertools
import json
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_jax.data.shards import open_tfds
from bert_jax.errors import UserError
from bert_jax.storage.files import SUFFIXES as COMPRESSED
from bert_jax.storage.files import DamagedFile, decompressed, field_separator
from bert_jax.storage.remote import first_line


@dataclass(frozen=True)
class Columns:
    """The columns with texts and labels: header names, or numbers from 0 (a negative number counts from the end).

    marks is for a task that asks about one word in each text (labelled.mark_words): the columns with the word's first
    character and its exclusive end, first for text and then for text_pair.
    """

    text: str = ""
    text_pair: str = ""
    label: str = ""
    marks: tuple[str, ...] = ()

    def filled(self, default: "Columns") -> "Columns":
        """The columns, with `default` in place of empty ones."""
        return Columns(*(mine or other for mine, other in zip(astuple(self), astuple(default), strict=True)))


@dataclass(frozen=True)
class Column:
    """A column to read: its header name or number, and the key under `task` that selects it (its role)."""

    name: str
    role: str
    required: bool = True


class TableRow(NamedTuple):
    """An example's values, one per requested column; None if it has none."""

    line: int  # in the file, from 1; the row, from 1, in Parquet and prepared data
    values: tuple[Any, ...]  # texts from TSV and CSV; values of any type from other formats


class Table(NamedTuple):
    """A file's records and the properties of their columns."""

    records: list[TableRow]
    present: tuple[bool, ...]  # for each requested column, whether the file has it
    class_names: tuple[tuple[str, ...], ...]  # by column; empty unless the file names the classes
    left_out: int = 0  # skipped lines with an unexpected number of fields


def is_number(name: str) -> bool:
    """Whether a column is given by its number."""
    return name.removeprefix("-").isdecimal()


def _advice(role: str) -> str:
    """How to select another column, for an error message."""
    flags = f" (in predict, evaluate and embed: --{role})" if role in ("text", "text_pair", "label") else ""
    return (
        f"Name another one with --config.task.{role}{flags}; a named task reads only the columns of its published files"
    )


def _has_column(names: list[str], width: int, name: str) -> bool:
    return name != "" and (name in names or (is_number(name) and -width <= int(name) < width))


def column_index(path: Path, names: list[str], width: int, name: str, role: str) -> int:
    """Finds a column's index, from 0, in a table with `width` columns and the header `names`, which may be empty.

    Raises:
        UserError: The column is missing, or several have this name.
    """
    if not _has_column(names, width, name):
        known = f"its columns are: {', '.join(names)}" if names else f"it has columns 0 to {width - 1} and no header"
        raise UserError(f"{path} has no column {name!r}; {known}. {_advice(role)}")
    if names.count(name) > 1:
        raise UserError(f"{path} has {names.count(name)} columns named {name!r}. Rename all but one")
    # A name in the header comes first, because a column may itself be called 2. The remainder turns a number that
    # counts from the end into an index.
    return names.index(name) if name in names else int(name) % width


# Reads the lines of a plain or compressed text file, and detects the kind of a file from its name.


TFDS = "tfds:"
KIND_OF_ENDING = {".conllu": "conllu", ".json": "squad", **dict.fromkeys((".conll", ".iob", ".iob2", ".bio"), "conll")}


def plain_name(path: Path) -> str:
    """Returns a file's name without the ending for its compression."""
    return path.name.removesuffix(path.suffix) if path.suffix.lower() in COMPRESSED else path.name


def ending(path: Path) -> str:
    """Returns the ending of plain_name, in lower case, such as .csv."""
    return Path(plain_name(path)).suffix.lower()


def kind_of_file(path: Path) -> str:
    """`conllu`, `conll`, `squad` (.json, unless it has rows) or `table`, by the ending of the name."""
    return "table" if json_form(path) in ("lines", "rows") else KIND_OF_ENDING.get(ending(path), "table")


def json_form(path: Path) -> str:
    """Recognizes what a JSON file holds: `lines`, `rows` (a list of objects) or `squad`; empty for other files.

    A .json file may hold any of these: the scripts of transformers and `to_json` of `datasets` and pandas write lines
    or rows, also rows under the key `data`.
    """
    if ending(path) in JSON_LINES:
        return "lines"
    if ending(path) != ".json" or not path.is_file():
        return "squad" if ending(path) == ".json" else ""
    # The time and the size are part of the cache's key, so that a file that has changed is read again.
    stat = path.stat()
    return _json_form(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _json_form(path: Path, changed: int, size: int) -> str:
    # One line usually decides, so that a large file is not parsed as a whole: an object without `data`, or one that
    # further lines follow, is a row.
    lines = (line for _, line in numbered_lines(path) if line.strip())
    first = next(lines, "")
    content = _json_value(first)
    if isinstance(content, dict) and ("data" not in content or next(lines, None)):
        return "lines" if content else "squad"
    if content is None:
        content = _json_value("\n".join((first, *lines)))
    rows = content.get("data") if isinstance(content, dict) else content
    # An article of SQuAD has paragraphs. A damaged list is read as rows, whose reader names the line.
    articles = isinstance(rows, list) and any(isinstance(row, dict) and "paragraphs" in row for row in rows)
    return "rows" if (rows and not articles) or (content is None and first.lstrip().startswith("[")) else "squad"


def _json_value(text: str) -> Any:
    """Parses a text as JSON; returns None if it is not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a file of JSON, numbered from 1: by line, or in a list.

    An item [TEXT, {...}], as in spaCy's training data, is the object with this `text`. A task of Label Studio is its
    data, with the results of the first annotation as `label`.
    """
    if json_form(path) != "rows":
        yield from json_lines(path)
        return
    try:
        content = json.loads("\n".join(line for _, line in numbered_lines(path)))
    except (ValueError, RecursionError) as error:
        # Nesting that is too deep and integers that are too long raise errors without a line.
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path} line {line} is not JSON ({first_line(error)}). Correct the file") from error
    for number, row in enumerate(content["data"] if isinstance(content, dict) else content, 1):
        row = _plain_row(row)
        if not isinstance(row, dict):
            raise UserError(f"{path}: item {number} of the list is {row!r:.60}; expected an object. Correct the file")
        yield number, row


def _plain_row(row: Any) -> Any:
    if isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict):
        return {"text": row[0], **row[1]}
    if isinstance(row, dict) and isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list):
        valid = [each for each in row["annotations"] if isinstance(each, dict) and not each.get("was_cancelled")]
        return {**row["data"], "label": valid[0].get("result") if valid else None}
    return row


def check_file(path: Path) -> None:
    """Raises UserError for a missing file and for a folder."""
    if not path.exists():
        raise UserError(f"no such file: {path}. Check its name and folder")
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file. Name a file in it")


def decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields a text file's line numbers, from 1, and its lines with their ends.

    Only a line feed ends a line (texts hold U+2028 and the like); a byte-order mark is dropped.

    Raises:
        UserError: The file is missing, a folder, damaged, or not UTF-8.
    """
    check_file(path)
    number = 0
    try:
        # In binary, because text mode would also end lines at a lone carriage return. Each line is decoded on its own,
        # so that an error can name it.
        with path.open("rb") as stored:
            suffix = path.suffix.lower()
            stream = decompressed(stored, suffix) if suffix in COMPRESSED else stored
            for number, line in enumerate(stream, start=1):
                # Only the first line may begin with a byte-order mark; elsewhere U+FEFF is part of the text.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} line {number} is not UTF-8 ({error.reason}). Convert the file to UTF-8") from error
    except DamagedFile as error:
        raise UserError(f"{path} is cut short or damaged after line {number}: {error}. Download it again") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of decoded_lines without their ends."""
    for number, line in decoded_lines(path):
        yield number, line.rstrip("\r\n")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode a text: an escape in JSON may give half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Finds the files of a data set in several Parquet files. The first file's name represents all.
#
# Hugging Face's `datasets` names them NAME-00000-of-00003.parquet. Earlier versions added 16 hexadecimal digits, which
# differ between the files.


_FIRST = re.compile(r"(?P<name>.+)-00000-of-(?P<count>\d{5})(?P<digits>-[0-9a-f]{16})?\.parquet")


def data_set_files(path: Path) -> list[Path]:
    """Lists the files of the data set whose first file is `path`, in order, existing or not; else `path` alone.

    Raises:
        UserError: Two files, which differ in their digits, have the same number.
    """
    match = _FIRST.fullmatch(path.name)
    if not match:
        return [path]
    files = [path]
    for number in range(1, int(match["count"])):
        start = f"{match['name']}-{number:05d}-of-{match['count']}"
        if not match["digits"]:
            files.append(path.with_name(start + ".parquet"))
            continue
        digits = "[0-9a-f]" * 16
        matches = sorted(path.parent.glob(f"{glob.escape(start)}-{digits}.parquet"))
        # A missing file keeps a name, by which its reader reports it.
        files.append(_only(matches) or path.with_name(start + match["digits"] + ".parquet"))
    return files


def first_file(folder: Path, name: str) -> Path | None:
    """Finds the file NAME-00000-of-....parquet in a folder; None if there is none.

    Raises:
        UserError: There are two, which belong to different data sets.
    """
    paths = folder.glob(name + "-00000-of-*.parquet")
    return _only(sorted(path for path in paths if _FIRST.fullmatch(path.name)))


def check_apart(files: Mapping[str, Path]) -> None:
    """Raises UserError if one split's file also belongs to another split that consists of several files."""
    for split, path in files.items():
        # By resolved paths, because a link or a relative path may name the same file.
        others = {file.resolve() for file in data_set_files(path)[1:]}
        for other, file in files.items():
            if file.resolve() in others:
                raise UserError(
                    f"{split} is {path}, which reads all {len(others) + 1} files of this data set, but {other} is one "
                    f"of them: {file.name}. To use them as separate splits, rename them, such as to {other}.parquet"
                )


def _only(paths: list[Path]) -> Path | None:
    if len(paths) > 1:
        raise UserError(f"{paths[0]} and {paths[1].name} belong to different data sets. Remove the files of one")
    return paths[0] if paths else None


# Lists and objects that a table of texts, such as CSV, holds as JSON, Python or NumPy writes them.


_BRACKETS = ("[", "]"), ("{", "}"), ("set(", ")")  # a list; an object or a set; an empty set


def opened(value: Any) -> Any:
    """The list or object in a text with brackets. Any other value, and a text with neither, is unchanged.

    A set becomes a sorted list. `array([...], dtype=object)` and `np.int64(3)` within a list or an object become their
    values, and nan becomes None, because pandas writes the columns of data sets so.
    """
    text = value.strip() if isinstance(value, str) else ""
    if not any(text.startswith(begin) and text.endswith(end) for begin, end in _BRACKETS):
        return value
    # JSON first, because Python has other names for null, true and false.
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # NumPy writes lists of texts without commas, which Python would join to one text.
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = [token.type for token in tokens if token.type != tokenize.NL]
        if (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds):
            return value
        content = ast.literal_eval(_AsLiterals().visit(ast.parse(text, mode="eval")))
        # The order of a set of texts differs between processes, because Python randomizes their hashes.
        content = sorted(content, key=str) if isinstance(content, set) else content
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return value
    return content if isinstance(content, list | dict) else value


class _AsLiterals(ast.NodeTransformer):
    """Replaces `array(VALUE, ...)` and `np.NAME(VALUE)` by VALUE, and `nan` by None."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id == "nan" else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_numpy = node.args and ast.unparse(node.func).split(".")[0] in ("array", "np")
        return node.args[0] if is_numpy else node


ROWS_AT_ONCE = 4096  # rows of Parquet in memory
LONGEST_FIELD = 2**31 - 1  # characters; the default limit of the csv module is 128 KiB
TSV_ADVICE = "Fields are separated by one tab and are never quoted"
CSV_ADVICE = 'Quote a field that contains commas, quotes or line ends, and double its quotes: "so ""quoted"""'


def delimited_records(
    path: Path, columns: Sequence[Column], quoted: bool, on_ragged: Callable[[UserError], None] | None = None
) -> tuple[tuple[bool, ...], Iterator[TableRow]]:
    """Reads CSV or TSV, record by record.

    The line of a CSV record is the one on which it ends, because a quoted field may contain line ends. An empty file
    has no records.

    Args:
        quoted: Whether the file is CSV; otherwise it is TSV.
        on_ragged: Gets the error for a record whose number of fields differs from the first line's; without it, the
            error is raised.

    Returns:
        Whether the file has each of the columns, and the records.
    """
    lines = _delimited_lines(path, quoted)
    first = next(lines, None)
    if first is None:
        return (False,) * len(columns), iter(())
    # Numbers of columns, unlike names, need no header.
    has_header = not all(is_number(column.name) for column in columns if column.name)
    names, width = first[1] if has_header else [], len(first[1])
    # None stands for an optional column that the file lacks.
    indices = [
        column_index(path, names, width, column.name, column.role)
        if column.required or _has_column(names, width, column.name)
        else None
        for column in columns
    ]

    def records() -> Iterator[TableRow]:
        for number, fields in lines if has_header else itertools.chain([first], lines):
            if len(fields) == width:
                yield TableRow(number, tuple(None if index is None else fields[index] for index in indices))
                continue
            error = UserError(
                f"{path} line {number} has {len(fields)} fields, but the first line has {width}. "
                f"{CSV_ADVICE if quoted else TSV_ADVICE}"
            )
            if on_ragged is None:
                raise error
            on_ragged(error)

    return tuple(index is not None for index in indices), records()


def first_fields(path: Path) -> list[str]:
    """Reads the first line's fields from CSV (by the ending) or TSV; an empty file has none."""
    return next((fields for _, fields in _delimited_lines(path, ending(path) == ".csv")), [])


def _delimited_lines(path: Path, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    if not quoted:
        yield from ((number, line.split("\t")) for number, line in numbered_lines(path) if line)
        return
    csv.field_size_limit(LONGEST_FIELD)
    # Lines keep their ends, which belong to the text of a quoted field.
    lines = (line for _, line in decoded_lines(path))
    first = next(lines, "")
    reader = csv.reader(itertools.chain([first], lines), delimiter=field_separator(first), strict=True)
    while True:
        # csv.Error does not say on which line its record began.
        before = reader.line_num
        try:
            # In strict mode a quote that is never closed raises an error. Otherwise it would swallow the rest of the
            # file.
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{path} line {before + 1} is not CSV ({error}). {CSV_ADVICE}") from error
        if fields is None:
            return
        if fields:
            yield reader.line_num, fields


# Reads tables with named, typed columns: JSON lines, Parquet, and data prepared by TensorFlow Datasets.


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of equal keys, json.loads would silently keep the last value. KeyError, unlike ValueError, cannot be mistaken for
    # malformed JSON.
    value = dict(pairs)
    if len(value) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise KeyError(name)
    return value


def json_object(source: str, line: str) -> dict[str, Any]:
    """The object in a line of JSON. Raises UserError, which begins with `source`, for anything else."""
    try:
        value = json.loads(line, object_pairs_hook=_object)
    except KeyError as error:
        raise UserError(f"{source} has the key {error.args[0]!r} twice. Rename or remove all but one") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON ({first_line(error)}). Write one object per line") from error
    if not isinstance(value, dict):
        raise UserError(f"{source} is not a JSON object: {line:.40}. Write {{...}} per line, with columns as keys")
    # Only an escape can produce half of a surrogate pair, so most lines need no second pass.
    if "\\ud" in line.lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{source} contains half of a surrogate pair, which is not a character. Correct the line")
    return value


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the numbers, from 1, and the objects in the lines that are not blank."""
    for number, line in numbered_lines(path):
        if line.strip():
            yield number, json_object(f"{path} line {number}", line)


def check_single(source: Path | str, names: Sequence[Any]) -> None:
    """Raises UserError for a column that occurs twice, because only its last values would be read."""
    if len(names) > len(set(names)):
        name, count = Counter(names).most_common(1)[0]
        raise UserError(f"{source} has {count} columns named {name!r}. Rename all but one")


def _read_json(path: Path, columns: Sequence[Column]) -> Table:
    """Reads objects. A column exists if any object has it; its value is None in an object without it."""
    rows = []
    for number, row in json_rows(path):
        _check_columns(f"{path} line {number}", columns, row)
        rows.append((number, row))
    return _table(path, columns, rows, {name for _, row in rows for name in row}, {})


def parquet_schemas(path: Path, columns: Sequence[Column]) -> dict[Path, pa.Schema]:
    """The files of a data set (data_set_files) and their schemas. Raises UserError for a missing file or column."""
    files = data_set_files(path)
    for file in files:
        check_file(file)
    schemas = {}
    for file in files:
        with _parquet_file(file) as content:
            schemas[file] = content.schema_arrow
        _check_columns(str(file), columns, schemas[file].names)
        requested = {column.name for column in columns}
        check_single(file, [name for name in schemas[file].names if name in requested])
    return schemas


def parquet_rows(files: Iterable[Path], names: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of Parquet files with these columns, numbered through from 1. Only a part is in memory at a time."""
    numbers = itertools.count(1)
    for file in files:
        with _parquet_file(file) as content:
            for batch in content.iter_batches(ROWS_AT_ONCE, columns=sorted(names)):
                # Rows first: zip takes a number for each row, but none after the last one.
                yield from ((number, row) for row, number in zip(batch.to_pylist(), numbers, strict=False))


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        # The yield is inside, because some damage shows only when the caller reads the rows.
        with pq.ParquetFile(path) as content:
            yield content
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is damaged or not a Parquet file ({first_line(error)}). Create or download it again"
        ) from error


def _read_parquet(path: Path, columns: Sequence[Column]) -> Table:
    """Reads the rows in a Parquet file, or in all files of a data set, numbered through.

    Classes, single or in lists, have names if Hugging Face's `datasets` wrote them into the schema.
    """
    requested = {column.name for column in columns}
    schemas = parquet_schemas(path, columns)
    parts = [(requested & set(schema.names), _class_names(schema, requested)) for schema in schemas.values()]
    # All files of a data set must be alike, since the first one stands for all.
    for file, (names, class_names) in zip(schemas, parts, strict=True):
        if different := names ^ parts[0][0]:
            without, other = (path, file) if different & names else (file, path)
            raise UserError(
                f"{without} has no column {min(different)!r}, but {other.name} has it. Download or create both again"
            )
        if class_names != parts[0][1]:
            raise UserError(f"{file} names its classes differently from {path.name}. Download or create both again")
    return _table(path, columns, parquet_rows(schemas, parts[0][0]), *parts[0])


def _class_names(schema: pa.Schema, columns: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns, by column, the class names that `datasets` wrote into the schema for classes or lists of them."""

    def names(feature: Any) -> tuple[str, ...]:
        return tuple(feature.get("names") or names(feature.get("feature"))) if isinstance(feature, dict) else ()

    try:
        # Metadata of another form names no classes, but the rows can still be read.
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return {name: names(features[name]) for name in columns if name in features and names(features[name])}
    except (ValueError, AttributeError):
        return {}


def _read_prepared(address: str, columns: Sequence[Column]) -> Table:
    """Reads a split that TensorFlow Datasets has prepared (bert_jax/data/shards.py), without TensorFlow."""
    builder, split = open_tfds(address)
    features = builder.info.features
    _check_columns(address, columns, features)
    names = {column.name for column in columns} & set(features)
    class_names = {name: tuple(getattr(features[name], "names", None) or ()) for name in names}
    try:
        rows = [{name: plain_value(row[name]) for name in names} for row in builder.as_data_source(split)]
    except Exception as error:  # TFDS has no exception class for a missing or damaged file
        raise UserError(f"{address} cannot be read ({first_line(error)}). Prepare it again") from error
    return _table(address, columns, enumerate(rows, start=1), names, class_names)


def plain_value(value: Any) -> Any:
    """A value of prepared data as the JSON types: texts, numbers, lists and objects."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {name: plain_value(item) for name, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _check_columns(source: str, columns: Sequence[Column], names: Collection[str]) -> None:
    for column in columns:
        if column.required and column.name not in names:
            raise UserError(
                f"{source} has no column {column.name!r}; its columns are: {', '.join(names)}. {_advice(column.role)}"
            )


def _table(
    source: Path | str,
    columns: Sequence[Column],
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    names: Collection[str],
    class_names: Mapping[str, tuple[str, ...]],
) -> Table:
    records = [TableRow(number, tuple(row.get(column.name) for column in columns)) for number, row in rows]
    if not records:
        raise UserError(f"{source} has no examples; expected one in each line or row. Name another file")
    present = tuple(column.name in names for column in columns)
    return Table(records, present, tuple(class_names.get(column.name, ()) for column in columns))


JSON_LINES = (".jsonl", ".ndjson")


def whole_rows(path: Path, header: bool = True) -> list[dict[str, Any]]:
    """All columns of a table, row by row; without a header, their names are numbers from 0. Empty for prepared data."""
    if str(path).startswith(TFDS):
        return []
    if ending(path) == ".parquet":
        files = data_set_files(path)
        names = [column for schema in parquet_schemas(path, ()).values() for column in schema.names]
        return [row for _, row in parquet_rows(files, {*names})]
    if is_stored(path):
        return [row for _, row in json_rows(path)]
    lines = [fields for _, fields in _delimited_lines(path, quoted=ending(path) == ".csv")]
    if not lines:
        return []
    width = len(lines[0])
    names = lines[0] if header else list(map(str, range(width)))
    # A repeated name gets its column's number, so that the dictionary keeps every field.
    names = [f"{name} ({column})" if names.index(name) < column else name for column, name in enumerate(names)]
    return [dict(zip(names, fields, strict=True)) for fields in lines[header:] if len(fields) == width]


def is_stored(path: Path) -> bool:
    """Whether a file has named, typed columns (JSON, Parquet, prepared data), unlike TSV and CSV."""
    return str(path).startswith(TFDS) or ending(path) == ".parquet" or json_form(path) in ("lines", "rows")


def read_records(path: Path, columns: Sequence[Column], ragged_lines: bool = False) -> Table:
    """Reads these columns, example by example. The ending of the file name determines the format.

    .jsonl, .ndjson  one object on each line
    .json            the same, or a list of objects
    .parquet         the columns of the file, or of several (data_set_files)
    .csv             quoted as in RFC 4180; separated by commas, or as field_separator recognizes
    tfds:            data prepared by TensorFlow Datasets, tfds:NAME[:SPLIT]
    any other        TSV, never quoted

    Text files may be compressed (.gz, .xz, .zst). TSV and CSV have a header unless every column is given by a number.

    Args:
        ragged_lines: Whether to skip and count lines of TSV or CSV with another number of fields than the first line.

    Raises:
        UserError: The input is malformed, a required column is missing, or the file has no examples. The message names
            the line.
    """
    if str(path).startswith(TFDS):
        return _read_prepared(str(path), columns)
    if ending(path) == ".parquet":
        return _read_parquet(path, columns)
    if is_stored(path):
        return _read_json(path, columns)
    skipped: list[UserError] = []
    present, records = delimited_records(
        path, columns, quoted=ending(path) == ".csv", on_ragged=skipped.append if ragged_lines else None
    )
    table = Table(list(records), present, ((),) * len(columns), len(skipped))
    if not table.records:
        raise UserError(f"{path} has no examples; expected one in each line or row. Name another file")
    return table
