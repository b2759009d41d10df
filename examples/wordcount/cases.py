"""Runs the program on cases the agent has not seen, and writes the share that passed as the reward."""

import subprocess
import sys
import tempfile

TEXT = "One two two\nthree three three, it's\n\n"


def run(*arguments, stdin=""):
    return subprocess.run(["./wordcount", *arguments], input=stdin, capture_output=True, text=True, timeout=10)


def counts_a_file(path):
    return run(path).stdout == f"3 7 {len(TEXT)}\n"


def reads_standard_input(path):
    return run(stdin="a b\n").stdout == "1 2 4\n" and run("-", stdin="").stdout == "0 0 0\n"


def counts_bytes_and_not_characters(path):
    return run(stdin="naïve").stdout == "0 1 6\n"


def lists_the_most_frequent(path):
    return run("--top", "2", path).stdout == "3 three\n2 two\n"


def orders_equal_counts_by_the_alphabet(path):
    return run("--top", "3", "-", stdin="b a c C").stdout == "2 c\n1 a\n1 b\n"


def complains_about_a_missing_file(path):
    ended = run("/no/such/file")
    return ended.returncode == 1 and ended.stdout == "" and len(ended.stderr.strip().splitlines()) == 1


CASES = [
    counts_a_file,
    reads_standard_input,
    counts_bytes_and_not_characters,
    lists_the_most_frequent,
    orders_equal_counts_by_the_alphabet,
    complains_about_a_missing_file,
]

with tempfile.NamedTemporaryFile("w", suffix=".txt") as sample:
    sample.write(TEXT)
    sample.flush()
    passed = 0
    for case in CASES:
        try:
            ok = case(sample.name)
        except Exception as error:
            ok = False
            print(f"{case.__name__}: {error}")
        print("passed" if ok else "FAILED", case.__name__)
        passed += ok
with open(sys.argv[1], "w") as file:
    file.write(str(passed / len(CASES)))
