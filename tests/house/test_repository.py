"""Files around the library: the workflow, the templates, the citation, the metadata."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def assert_runs(command: str) -> None:
    """The program of a command is in the checkout, or a target of its Makefile."""
    program, *words = command.split()
    if program == "make":
        targets = [word for word in words if "=" not in word]
        assert targets
        assert {*targets} <= {*TARGETS}, command
    else:
        assert os.access(ROOT / program, os.X_OK), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path):
    steps = [step for job in read_yaml(path)["jobs"].values() for step in job["steps"]]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    assert lines
    for line in lines:
        assert_runs(line)


def test_readme_begins_with_two_commands_that_need_only_a_clone():
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (\S.*?)(?: +#.*)?$", readme, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
    for command in commands[:2]:
        assert_runs(command)


def test_the_oldest_and_the_newest_python_are_tested():
    pattern = r"Programming Language :: Python :: (3\.\d+)$"
    matches = [re.match(pattern, classifier) for classifier in PROJECT["classifiers"]]
    supported = [match[1] for match in matches if match]
    assert PROJECT["requires-python"] == f">={supported[0]}"
    job = read_yaml(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == [supported[0], supported[-1]]


def test_the_hook_before_a_commit_formats_with_the_environment_of_make():
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert hook["language"] == "system"
    assert_runs(hook["entry"])


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_ask_for_something(name):
    form = read_yaml(ROOT / ".github/ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= {*form}
    for field in form["body"]:
        assert {"label", "description"} <= {*field["attributes"]}
    ids = [field["id"] for field in form["body"]]
    assert len({*ids}) == len(ids) > 1


def test_the_citation_is_of_this_project_and_of_papers_that_can_be_found():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    assert citation["license"] == PROJECT["license"]
    titles = [reference["title"] for reference in citation["references"]]
    for word in ("GPipe", "torchgpipe", "PipeDream", "Zero Bubble"):
        assert any(word in title for title in titles), word
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= {*reference}
        assert {"url", "doi"} & {*reference}
