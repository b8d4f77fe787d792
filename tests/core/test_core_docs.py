"""The docstrings of the core: every example runs, and everything has one."""

from __future__ import annotations

import doctest
import inspect

import pytest

from meshverse import _core

CLASSES = [value for value in vars(_core).values() if inspect.isclass(value)]
MEMBERS = {
    f"{cls.__name__}.{name}": member
    for cls in CLASSES
    for name, member in vars(cls).items()
    if not name.startswith("_")
}
DOCUMENTED = {cls.__name__: cls for cls in CLASSES} | MEMBERS


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_and_their_examples(name):
    text = inspect.getdoc(DOCUMENTED[name])
    assert text
    examples = doctest.DocTestParser().get_doctest(text, dict(vars(_core)), name, None, None)
    failures = []
    doctest.DocTestRunner().run(examples, out=failures.append)
    assert not failures, "".join(failures)


def test_there_are_examples():
    texts = [inspect.getdoc(value) or "" for value in DOCUMENTED.values()]
    assert sum(">>>" in text for text in texts) >= 15
