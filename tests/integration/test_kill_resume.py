"""A training that is killed, or asked to end, goes on as if nothing had happened."""

import os
import random
import signal
import time

import pytest

from tests.stress import kill_resume
from tests.stress.kill_resume import TASKS, compare, losses, run_killed, wait_for_update, write_data

from .commands import Commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    """A folder with data, and a training of each kind that nobody disturbs."""
    commands = Commands(command_server, tmp_path_factory.mktemp("killed"))
    write_data(commands.folder, commands)
    commands.straight = {}
    for name, command in TASKS.items():
        begin = time.monotonic()
        commands.straight[name] = commands.run(f"{command} --save-dir {name}-straight")
        commands.seconds = time.monotonic() - begin
        assert commands.straight[name].returncode == 0, commands.straight[name].stderr
    return commands


@pytest.mark.parametrize(("name", "kills"), [("translation", 2), ("speech", 1)])
def test_a_killed_training_goes_on_bit_for_bit(commands, name, kills, monkeypatch):
    monkeypatch.setattr(kill_resume, "OF_WRITING", 0.5)
    logs, what, broken = run_killed(commands, name, kills, random.Random(3), commands.seconds / 4)
    assert len(logs) > 1, what
    assert broken == 0
    assert compare(commands.straight[name], logs, commands.folder, name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_asked_to_end_saves_first(commands, number):
    name = "translation"
    command = f"{TASKS[name]} --save-dir {name}-killed"
    for path in (commands.folder / f"{name}-killed").glob("*"):
        path.unlink()
    run = commands.start(command)
    assert wait_for_update(run, commands.folder)
    os.kill(run.pid, number)
    first = run.wait()
    assert first.returncode == 128 + number, first.stderr
    assert f"{number.name}: finishing this update, then saving" in first.stderr
    assert f"{number.name} after update" in first.stdout
    second = commands.run(command)
    assert second.returncode == 0, second.stderr
    assert min(losses(second.stdout)) == max(losses(first.stdout)) + 1  # not one update was lost
    assert compare(commands.straight[name], [first.stdout, second.stdout], commands.folder, name) == []
