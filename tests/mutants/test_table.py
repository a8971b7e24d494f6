"""The table of mutants fits the library, and the tests that are there.

Any line of the library may be written in other words, and `make mutants` says so too.
"""

import pytest

from .__main__ import ROOT, folders_for, mutated
from .table import MUTANTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file)
def test_a_mutant_changes_its_file_in_one_place(mutant):
    text = (ROOT / "jpipe" / mutant.file).read_text()
    assert mutated(mutant, text) != text
    for folder in folders_for(mutant.file):
        assert (ROOT / folder).exists()


def test_text_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="has 'x = 1' 0 times; needs 1"):
        mutated(MUTANTS[0]._replace(old="x = 1"), "y = 1")
