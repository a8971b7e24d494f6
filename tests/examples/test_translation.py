"""The translation task: its split, its batches, its model, and a run that goes on."""

import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from ..programs import ROOT, run

# Of the extra `tasks`, which `make test-all` installs in an environment of its own.
for package in ("django", "plone", "polib", "sacrebleu", "sentencepiece"):
    pytest.importorskip(package)

EXAMPLES = ROOT / "examples"
PROGRAM = str(EXAMPLES / "translation.py")
TINY = {"languages": ("da", "fy"), "source_subwords": 800, "english_subwords": 500}


@pytest.fixture(scope="module")
def messages():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import messages  # pyright: ignore[reportMissingImports]

        yield messages
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def corpus(messages, tmp_path_factory):
    return messages.Corpus(tmp_path_factory.mktemp("corpus"), **TINY)


@pytest.mark.slow
def test_no_message_is_on_both_sides_of_the_split(corpus):
    texts = {
        part: {re.sub(r"[\W\d_]", "", text.lower()) for text in pairs.english}
        for part, pairs in corpus.parts.items()
    }
    assert all(len(english) > 50 for english in texts.values())
    assert not texts["training"] & texts["test"]
    assert not texts["training"] & texts["validation"]
    assert not texts["validation"] & texts["test"]


@pytest.mark.slow
def test_targets_are_the_english_texts(corpus):
    pairs = corpus.parts["test"]
    assert corpus.decode(pairs.target) == [*pairs.english]
    first = pairs.source[:, 0] - corpus.source_words + len(corpus.languages)
    np.testing.assert_array_equal(first, pairs.languages)


@pytest.mark.slow
def test_a_batch_follows_from_seed_and_step(corpus, messages):
    pairs = corpus.parts["training"]
    options = {"tokens": 240, "temperature": 5.0}
    batches = messages.Batches(pairs, **options, seed=0)
    again = messages.Batches(pairs, **options, seed=0)
    other = messages.Batches(pairs, **options, seed=1)
    for step in (3, 0, 3):
        batch = batches.draw(step)
        assert batch.target.size == 240
        assert batch.lengths.max() <= batch.target.shape[1]
        np.testing.assert_array_equal(batch.target, again.draw(step).target)
    targets = [drawn.draw(3).english.tolist() for drawn in (batches, other)]
    assert targets[0] != targets[1]
    assert batches.draw(3).english.tolist() != batches.draw(4).english.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_languages_are_drawn_by_temperature(corpus, messages, temperature):
    pairs = corpus.parts["training"]
    batches = messages.Batches(pairs, tokens=960, temperature=temperature, seed=0)
    drawn = np.concatenate([batches.draw(step).languages for step in range(300)])
    chances = corpus.counts ** (1 / temperature)
    expected = chances[1] / chances.sum()
    deviation = (expected / len(drawn)) ** 0.5
    assert abs((drawn == 1).mean() - expected) < 5 * deviation


@pytest.mark.slow
def test_the_papers_models_have_its_numbers_of_parameters(messages):
    from translator import PAPER, count_parameters  # pyright: ignore

    counts = {name: count_parameters(sizes) for name, sizes in PAPER.items()}
    assert counts == {
        "400M": 430_723_920,
        "1.3B deep": 1_261_933_392,
        "1.3B wide": 1_261_749_072,
        "6B": 6_063_493_968,
    }


@pytest.mark.slow
def test_a_translation_stops_where_it_ends_and_reads_itself(messages):
    """The model says the token behind the last of its own, up to `END`."""
    from translator import translate  # pyright: ignore

    class Counting:
        def apply(self, variables, x):
            (source, shifted), _ = x.call
            last = shifted[:, :, None]
            words = jnp.arange(10)
            follows = jnp.where(last == messages.BEGIN, source[:, :1, None], last + 1)
            return jnp.where(follows > 8, words == messages.END, words == follows) * 1.0

    source = np.array([[5], [7]])
    tokens = translate(Counting(), None, source, 6)
    np.testing.assert_array_equal(tokens[:, :5], [[5, 6, 7, 8, 2], [7, 8, 2, 3, 4]])


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_result(tmp_path):
    command = [PROGRAM, "--tiny", "--folder=build/stopped"]
    first = run(*command, "--preempt-after=3", status=75, folder=tmp_path)
    assert re.search(r"\nsaved build/stopped/all-.*/3\n", first)
    second = run(*command, folder=tmp_path)
    assert re.search(r"restored .*/3\nstep 4:", second)
    assert re.search(r"not seen: loss \d\.\d+, BLEU \d+\.\d+, chrF \d+\.\d+", second)
    run(*command[:2], "--folder=build/whole", folder=tmp_path)
    results = [
        json.loads(path.read_text())
        for path in sorted(tmp_path.glob("build/*/all-*/result.json"))
    ]
    assert len(results) == 2
    for result in results:
        del result["seconds"]
    assert len(results[0]["losses"]) == 6
    assert results[0] == results[1]
    assert {path.name for path in tmp_path.iterdir()} == {"build"}


@pytest.mark.slow
def test_tables_hold_each_model_and_each_seed(tmp_path, messages):
    from translation_report import write_report  # pyright: ignore

    def result(score, language=None):
        counts = {"training": 9, "test": 3, "bleu": score, "chrf": 2 * score}
        names = [language] if language else ["es", "da", "fy"]
        return {
            "model": "T(1, 2, 3)",
            "parameters": 1234,
            "losses": [3.0, 2.0],
            "seed": 0,
            "steps": 2,
            "nll": 1.5,
            "bleu": score,
            "chrf": 2 * score,
            "languages": dict.fromkeys(names, counts),
        }

    tables = {
        "models": {"small": [result(3.0), result(5.0)]},
        "bilingual": {
            language: [result(1.0, language), result(2.0, language)]
            for language in ("es", "da", "fy")
        },
        "batches": {"1024": [result(2.0), result(4.0)]},
    }
    text = write_report(tables, tmp_path)
    assert "| small, T(1, 2, 3) | 2 | 1,234 | 1.500 ± 0.000 | 4.00 ± 1.41 |" in text
    assert "| da | 9 | 3 | 1.5 | 3.0 | +2.5 | +5.0 |" in text
    assert "| 1,024 | 2 | 2 | 1.500 ± 0.000 | 3.00 ± 1.41 |" in text
    for name in ("tables.json", "tables.md", "languages.png", "losses.png"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.slow
def test_the_papers_smallest_model_is_planned_without_memory_for_it(messages):
    from translation_report import plan_paper_models  # pyright: ignore

    text = plan_paper_models(["400M"])
    assert "| 400M | T(6, 8192, 16) | 430,723,920 | 2 | " in text
    assert re.search(r"\n0 +rank 0 +layers 0-\d of encoder", text)
    assert "16.0 GiB a device" in text
