"""Extensions that live outside the package and use only its public names; docs/extending.md walks through them."""
