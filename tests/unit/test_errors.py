"""A script's mistake is one line on standard error, and the exit code is not 0."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("print('x')", "error: standard output: No space left on device\n"),
        ("print('x' * 100_000)", "error: standard output: No space left on device\n"),
        ("print('x', flush=True)", "error: standard output: No space left on device\n"),
        ("open('/nowhere/a')", "error: /nowhere/a: No such file or directory\n"),
        ("open('/dev/full', 'w').write('x' * 100_000)", "error: No space left on device\n"),
    ],
)
def test_what_cannot_be_written_or_read_is_named(main, message):
    program = f"from speech_mt.errors import run\nrun(lambda: {main} and None)"
    full = "/dev/full" if "print" in main else "/dev/null"
    with open(full, "w") as output:
        done = subprocess.run([sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, message)
