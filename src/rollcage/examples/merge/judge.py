"""Is the merge committed, and do both features work? Asks git and the code from outside, and compares here."""

import json
import sys

from untrusted import run

CASES = {
    "sum": ("total([1.5, 2.25])", 3.75),
    "discount": ("total([10, 10], discount=0.25)", 15),
    "currency": ("total([10, 10], currency='USD')", 25),
    "both": ("total([10, 10], discount=0.5, currency='USD')", 12.5),
}


def git(*words):
    ended = run(["git", *words], text=True, timeout=10)
    return ended.stdout.strip() if ended.returncode == 0 else None


def committed():
    merged = git("merge-base", "--is-ancestor", "currency", "main") is not None
    return merged and git("rev-list", "--count", "--merges", "main") == "1" and git("status", "--porcelain") == ""


def value(expression):
    code = f"import json; from invoice import total; print(json.dumps({expression}))"
    try:
        return json.loads(run(["python3", "-c", code], text=True, timeout=10).stdout)
    except ValueError:
        return None


whole = committed()
parts = {name: float(whole and value(expression) == expected) for name, (expression, expected) in CASES.items()}
print("the merge is", "committed:" if whole else "not committed:", parts)
with open(sys.argv[1], "w") as file:
    json.dump({**parts, "reward": sum(parts.values()) / len(parts)}, file)
