import subprocess
import sys

PROCESS = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # Registered first, it runs last.
{before}
begun = []
gc.callbacks.append(lambda phase, info: begun.append(info))
kept = [[] for _ in range(90_000)]
print(bool(begun))
"""
SELDOM = "from motet.environment import collect_rarely; collect_rarely()"


def _printed(before: str) -> list[str]:
    command = [sys.executable, "-c", PROCESS.format(before=before)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_garbage_is_looked_for_seldom_and_not_at_the_end() -> None:
    assert _printed("") == ["True", "False"]
    assert _printed(SELDOM) == ["False", "True"]
