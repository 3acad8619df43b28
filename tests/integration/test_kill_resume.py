"""A training that is killed, or asked to end, goes on as if nothing had happened."""

import os
import random
import shutil
import signal

import pytest

from tests.stress import kill_resume
from tests.stress.kill_resume import (
    TASKS,
    compare,
    losses,
    run_killed,
    run_straight,
    wait_for_update,
    write_data,
)

from .commands import Commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    """A folder with data, and a training of each kind that nobody disturbs."""
    commands = Commands(command_server, tmp_path_factory.mktemp("killed"))
    write_data(commands.folder, commands)
    commands.straight = {name: run_straight(commands, name) for name in TASKS}
    return commands


@pytest.mark.parametrize(("name", "kills"), [("translation", 2), ("speech", 1)])
def test_a_killed_training_goes_on_bit_for_bit(commands, name, kills, monkeypatch):
    monkeypatch.setattr(kill_resume, "OF_WRITING", 0.5)
    straight, seconds = commands.straight[name]
    logs, what, broken = run_killed(commands, name, kills, random.Random(3), seconds / 4)
    assert len(what) > 0
    assert broken == 0
    assert compare(straight, logs, commands.folder, name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_asked_to_end_saves_first(commands, number):
    name = "translation"
    command = f"{TASKS[name]} --save-dir {name}-killed"
    shutil.rmtree(commands.folder / f"{name}-killed", ignore_errors=True)
    run = commands.start(command)
    assert wait_for_update(run)
    os.kill(run.pid, number)
    first = run.wait()
    assert first.returncode == 128 + number, first.stderr
    assert f"{number.name}: finishing this update, then saving" in first.stderr
    assert f"{number.name} after update" in first.stdout
    second = commands.run(command)
    assert second.returncode == 0, second.stderr
    assert min(losses(second.stdout)) == max(losses(first.stdout)) + 1  # not one update was lost
    assert compare(commands.straight[name][0], [first.stdout, second.stdout], commands.folder, name) == []


def test_a_second_training_in_the_same_folder_is_refused_and_the_first_goes_on(commands):
    name = "translation"
    command = f"{TASKS[name]} --save-dir {name}-killed"
    shutil.rmtree(commands.folder / f"{name}-killed", ignore_errors=True)
    folder = commands.folder / f"{name}-killed"
    folder.mkdir()
    (folder / "checkpoint_1_7.pt.tmp").touch()  # of a training that was killed: cleared away
    first = commands.start(command)
    assert wait_for_update(first)
    assert not list(folder.glob("*_7.pt.tmp"))
    second = commands.run(command)
    assert second.returncode == 1
    message = f"error: {folder}: another training (process {first.pid}) saves there; wait for it or give another"
    assert message in second.stderr
    assert commands.run(f"{command} --no-save --max-update 1").returncode == 0  # writes nothing there
    done = first.wait()
    assert done.returncode == 0, done.stderr
    assert compare(commands.straight[name][0], [done.stdout], commands.folder, name) == []
