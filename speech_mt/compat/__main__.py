"""``python -m speech_mt.compat``: is the environment right, and which fixes does this fairseq need?"""

from speech_mt.compat import FIXES, check_environment
from speech_mt.errors import run


def main() -> None:
    check_environment()
    for fix in FIXES:
        print(f"[{'needed' if fix.needed() else '  -   '}] {fix.what}\n         {fix.why}; until {fix.until}")


run(main)
