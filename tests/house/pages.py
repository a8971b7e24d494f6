"""The Python of pages, run one after the other in one process with two devices.

The imports, and programs that several pages have, cost their time once:

    test    --  [program, folder]  -->  process
    test   <--  [status, text]     --   process
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Self

from ..programs import ROOT, accelerated, environment


def read_blocks(page: str, containing: str = "") -> str:
    """The Python of a page, as one program; its path is relative to the checkout.

    Args:
      page: the path.
      containing: a text that is in each block; by default all blocks are read.
    """
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return "\n".join(block for block in blocks if containing in block)


class Interpreter:
    """A process that runs programs, as a context."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.house.pages"],
            cwd=ROOT,
            env=environment(devices=2),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()  # it ends where its input does

    def run(self, program: str, folder: Path = ROOT) -> str:
        """The text that a program prints, which runs in a folder."""
        assert self._process.stdin
        assert self._process.stdout
        if "jax_num_cpu_devices" in program:
            program = accelerated(program)
        request = [program, str(folder)]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process has ended"
        is_right, text = json.loads(answer)
        assert is_right, text
        return text


def main() -> None:
    """Runs the programs of the standard input."""
    answers = sys.stdout
    for request in sys.stdin:
        program, folder = json.loads(request)
        os.chdir(folder)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(program, "page", "exec"), {"__name__": "__main__"})
            answer = [True, printed.getvalue()]
        except BaseException:
            answer = [False, printed.getvalue() + traceback.format_exc()]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
