"""Lists and objects that a table of texts, such as CSV, holds as JSON, Python or NumPy writes them."""

import ast
import io
import itertools
import json
import tokenize
from typing import Any

_BRACKETS = ("[", "]"), ("{", "}"), ("set(", ")")  # those of lists, of objects and sets, and of an empty set


def opened(value: Any) -> Any:
    """The list or object that a text in brackets holds; any other value, and a text that holds neither, is unchanged.

    A set becomes a sorted list. `array([...], dtype=object)` and `np.int64(3)` within a list or an object are what they
    hold, and nan is None: so pandas writes the columns of data sets.
    """
    text = value.strip() if isinstance(value, str) else ""
    if not any(text.startswith(begin) and text.endswith(end) for begin, end in _BRACKETS):
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        if _joins_texts(text):
            return value
        found = ast.literal_eval(_AsLiterals().visit(ast.parse(text, mode="eval")))
        found = sorted(found, key=str) if isinstance(found, set) else found
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return value
    return found if isinstance(found, list | dict) else value


def _joins_texts(text: str) -> bool:
    """Whether texts have no comma between them, as NumPy writes a list: Python would join them to one text."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds)


class _AsLiterals(ast.NodeTransformer):
    """Replaces `array(VALUE, ...)` and `np.NAME(VALUE)` by VALUE, and `nan` by None."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id == "nan" else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_numpy = node.args and ast.unparse(node.func).split(".")[0] in ("array", "np")
        return node.args[0] if is_numpy else node
