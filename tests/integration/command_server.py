"""Runs fairseq commands in forks of a process that has imported fairseq and the plugin, which is what takes their time.

A line of JSON comes in: the words of a command, a folder, a file for its output and one for its errors, environment
variables. A line goes out when it has started, its process id, and ``wait <pid>`` asks for its exit code.
"""

import argparse
import atexit
import importlib
import json
import logging
import os
import runpy
import signal
import sys
import traceback


def run(words: list[str], folder: str, out: str, err: str, environment: dict[str, str]) -> int:
    """Be the command."""
    os.chdir(folder)
    os.environ.update(environment)
    for name, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
    for handler in logging.root.handlers[:]:
        logging.root.removeHandler(handler)
    command, *sys.argv[1:] = words
    sys.argv[0] = command
    try:
        if command.endswith(".py"):
            runpy.run_path(command, run_name="__main__")
        else:
            module = importlib.import_module(command.replace("fairseq-", "fairseq_cli.").replace("-", "_"))
            if command != "fairseq-generate":
                logging.basicConfig(format="%(levelname)s | %(name)s | %(message)s", level="INFO", stream=sys.stdout)
            module.cli_main()
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:  # as Python itself would
        try:
            sys.excepthook(*sys.exc_info())
        except BaseException:
            traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import fairseq_cli.generate
    import fairseq_cli.preprocess
    import fairseq_cli.train  # noqa: F401
    from fairseq.utils import import_user_module

    import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("wait "):
            _, status = os.waitpid(int(line.split()[1]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        request = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(**request)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


main()
