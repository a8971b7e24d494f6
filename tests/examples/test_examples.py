"""The programs of `examples/` run, at a small size, and say what they shall."""

import re
from typing import Any

import pytest

import jpipe

from ..programs import ROOT, accelerated, run

EXAMPLES = ROOT / "examples"
# Modules that other examples import, and what Slurm starts.
HELPERS = {
    "README.md",
    "arrays.py",
    "images.py",
    "learner.py",
    "messages.py",
    "runs.py",
    "slurm.sh",
    "stdlib_text.py",
    "transfer_report.py",
    "transformer.py",
    "translation_report.py",
    "translation_runs.py",
    "translator.py",
}
# Libraries that some environments of the tests do not have, by example.
NEEDS = {"data_loading.py": "grain", "hugging_face.py": "transformers"}


def slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


def outlines(text: str) -> set[str]:
    """The different lines of what a program prints, but for numbers, units and space.

    A line in quotes is a text that a model wrote.
    """
    text = re.sub(r"^(['\"]).*\1$", "text", text, flags=re.MULTILINE)
    masked = re.sub(r"\d[\d.,:e+-]*( ([KMG]i)?B\b| [mµ]?s\b)?", "0", text)
    return {" ".join(line.split()) for line in masked.splitlines()}


def recorded(name: str) -> str:
    """What the page of an example says that it prints."""
    return (EXAMPLES / "outputs" / name).with_suffix(".txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        slow(
            "scanned_gpt.py --steps=2 --layers=8",
            r"(?s)cpu:2 +layers 4-5 .*cpu:3: .*differ by at most \d\.\de-(0[5-9]|\d\d)",
        ),
        (
            "logging_metrics.py --steps=3",
            r"read at once: .*\n.* read four steps later: .*\nwrote .*csv, 3 rows",
        ),
        slow("digits.py", r"9[5-9]\.\d"),
        slow(
            "generate.py --steps=3 --width=32 --blocks=2 --length=16 --prompts=4",
            r"(?s)greedy: 100\.0% of 64 tokens .*sampled at 0\.8: 100\.0% of 64",
        ),
        slow("gpt2.py --steps=1", r"differ by at most \d\.\de-0[67]\n"),
        slow("t5.py --steps=1", r"differ by at most \d\.\de-0[67]\n"),
        slow("functional_loop.py", r"(?s)last .*\b9\d\.\d%.*averaged .*\b9\d\.\d%"),
        slow("mixed_precision.py", r"\n1 of 400 steps skipped\n.* 9\d\.\d% on 360"),
        slow("lora.py", r"with the adapters\n  36,864 par.*\n  9\d\.\d%"),
        slow("unet.py --steps=60 --width=8", r"held back: 0\.02\d+, denoised 0\.0[01]"),
        slow("data_loading.py --steps=80", r"9\d\.\d% of 360 .*\na second .* same"),
        slow(
            "vit.py --epochs=1", r"(?s)in bfloat16, parameters in float32\n.*accuracy"
        ),
        slow("nnx_loop.py --epochs=3", r"epoch 2: .*\naccuracy 9\d\.\d%"),
        slow(
            "fsdp_mesh.py --steps=3",
            r"(?s)data=4.*differ by at most (0\.0e|\d\.\de-0[4-9])",
        ),
        slow(
            "hugging_face.py --steps=2", r"own call differs by at most \d\.\de-0[5-9]"
        ),
    ],
    ids=lambda text: text.split(".")[0] if ".py" in text else "",
)
def test_an_example_runs_and_writes_where_git_ignores(command, shown, tmp_path):
    name, *options = command.split()
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    printed = run(str(EXAMPLES / name), *options, folder=tmp_path)
    assert re.search(shown, printed), printed
    assert outlines(printed) == outlines(recorded(name)), "docs/record_examples.py"
    assert {path.name for path in tmp_path.iterdir()} <= {"build"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_examples_of_several_stages_run_on_one_device(name):
    program = accelerated((EXAMPLES / f"{name}.py").read_text())
    shown = run("-c", program, "--steps=1", devices=1)
    assert re.search(r"differ by at most \d\.\de-0[67]\n", shown)


def losses(printed: str) -> list[str]:
    """The lines that tell the loss of a step."""
    return [line for line in printed.splitlines() if "loss" in line]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_losses(tmp_path):
    command = [str(EXAMPLES / "resume.py"), "--steps=6", "--folder=build/stopped"]
    first = run(*command, "--preempt-after=3", status=75, folder=tmp_path)
    assert first.splitlines()[-1] == "saved build/stopped/3"
    second = run(*command, folder=tmp_path)
    assert second.startswith("restored build/stopped/3\nstep 4:")
    whole = run(*command[:2], "--folder=build/whole", folder=tmp_path)
    assert len(losses(whole)) == 6
    assert losses(first + second) == losses(whole)
    kept = recorded("resume").replace("build/resume", "build/whole")
    assert outlines(whole) == outlines(kept)


@pytest.mark.slow
def test_a_run_of_several_processes_saves_and_goes_on(tmp_path):
    launch = ["-m", "jpipe", "launch", "--processes=2", str(EXAMPLES / "resume.py")]
    command = [*launch, "--distributed", "--folder=build/both"]
    run(*command, "--steps=3", folder=tmp_path)
    printed = run(*command, "--steps=6", folder=tmp_path)
    assert "[1] restored build/both/3" in printed
    alone = [str(EXAMPLES / "resume.py"), "--steps=6", "--folder=build/alone"]
    whole = losses(run(*alone, folder=tmp_path))
    for process in ("[0] ", "[1] "):
        lines = [line for line in losses(printed) if line.startswith(process)]
        assert [line.removeprefix(process) for line in lines] == whole[3:]
    early = run(
        *command[:-1],
        "--steps=400",
        "--preempt-after=3",
        "--folder=build/early",
        status=75,
        folder=tmp_path,
    )
    assert re.search(r"\[0\] saved build/early/\d+$", early.strip())


SMALL = ["examples/train_text.py", "--steps=10", "--evaluations=2", "--width=32"]


@pytest.mark.slow
def test_the_main_job_has_one_loss_in_one_process_and_in_two():
    printed = [
        run(*SMALL, "--schedule=gpipe"),
        run(*SMALL, "--schedule=1f1b", "--processes=2"),
    ]
    shown = [
        re.findall(r"\d\.\d+(?= bits)|(?<=model)[ \d.]+", text) for text in printed
    ]
    assert len(shown[0]) == 11
    assert all(float(number) < 10 for number in shown[0])
    assert shown[0] == shown[1]
    assert re.search(r"difference is \d\.\de-0[5-9]", printed[0])
    assert re.search(r"it took \d+ s", printed[0])
    of_schedules = "rank ", "gpipe: ", "0f0b: "
    different = outlines(printed[0]) ^ outlines(recorded("train_text"))
    assert all(line.startswith(of_schedules) for line in different), different


@pytest.mark.slow
def test_every_option_of_the_main_job_is_documented():
    text = run("examples/train_text.py", "--help")
    options = set(re.findall(r"^\s+(--[\w-]+)", text, re.MULTILINE))
    assert {"--schedule", "--remat", "--steps"} <= options
    for line in re.findall(r"^\s+--[\w-]+ [^\n]*(?:\n\s{20,}[^\n]*)*", text, re.M):
        assert len(line.split()) > 3, line


@pytest.mark.slow
def test_a_plan_from_the_shell_is_of_a_profile_that_is_measured_once(tmp_path):
    small = "--blocks=4", "--width=64", "--words=500", "--devices=2"
    for profile in ("wrote", "read"):
        shown = run(str(EXAMPLES / "plan.py"), *small, folder=tmp_path)
        assert shown.startswith(f"{profile} build/plan/profile.json\nmeasured on cpu")
        assert re.search(r"(?m)^predicted: .* a step", shown)
        assert shown.endswith("wrote build/plan/plan.json and build/plan/plan.svg\n")
    plan = jpipe.Plan.from_json((tmp_path / "build/plan/plan.json").read_text())
    assert str(plan) in shown


@pytest.mark.slow
def test_the_picture_of_a_plan_is_what_the_example_draws(tmp_path):
    options = "--estimate", "--devices=4", f"--out={tmp_path}"
    printed = run("examples/plan.py", *options)
    drawn, kept = tmp_path / "plan.svg", ROOT / "docs/plan.svg"
    assert drawn.read_text("utf-8") == kept.read_text("utf-8")
    here = printed.replace(str(tmp_path), "build/plan")
    assert outlines(here) == outlines(recorded("plan"))


def test_the_table_has_each_example_once():
    page = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|.*\| `.*\1.*` \|", page, re.M)
    assert all(name == path for name, path in rows)
    names = [name for name, _ in rows]
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert sorted(names) == sorted(there - HELPERS | {"slurm.sh"})
