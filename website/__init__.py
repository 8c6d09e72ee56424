"""The documentation site (`make docs`): generated reference pages, hooks of MkDocs, the code blocks of documents."""
