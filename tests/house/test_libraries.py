"""The programs of docs/libraries.md, one for each library."""

import re

import pytest

from ..programs import ROOT, run

PAGE = (ROOT / "docs" / "libraries.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
# The package that a section needs beside those of the tests.
PACKAGES = {
    "Equinox": "equinox",
    "Haiku": "haiku",
    "Keras": "keras",
    "Penzai": "penzai",
    "haliax and Levanter": "haliax",
    "numpyro": "numpyro",
    "diffrax": "diffrax",
}


def test_each_package_has_a_section():
    assert {*PACKAGES} < {*SECTIONS}


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_a_model_of_the_library_trains(title):
    """The programs compare themselves with one device."""
    if title in PACKAGES:
        pytest.importorskip(PACKAGES[title])
    program = "\n".join(re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL))
    assert "assert" in program
    run("-c", program, devices=2)
