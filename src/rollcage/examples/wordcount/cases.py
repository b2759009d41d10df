"""Runs the program on cases the agent has not seen, and writes the share that passed as the reward.

`untrusted` starts the program apart from this script: it finds neither these cases nor the reward, and cannot reach
this process. All that comes back is what it printed and how it ended.
"""

import sys

from untrusted import run

TEXT = "One two two\nthree three three, it's\n\n"
FILE = "/tmp/sample.txt"  # in the program's own /tmp


def wordcount(*arguments, stdin=""):
    write = 'printf %s "$1" > ' + FILE + ' && shift && exec ./wordcount "$@"'
    return run(["bash", "-c", write, "wordcount", TEXT, *arguments], input=stdin, text=True, timeout=5)


def counts_a_file():
    return wordcount(FILE).stdout == f"3 7 {len(TEXT)}\n"


def reads_standard_input():
    return wordcount(stdin="a b\n").stdout == "1 2 4\n" and wordcount("-", stdin="").stdout == "0 0 0\n"


def counts_bytes_and_not_characters():
    return wordcount(stdin="naïve").stdout == "0 1 6\n"


def lists_the_most_frequent():
    return wordcount("--top", "2", FILE).stdout == "3 three\n2 two\n"


def orders_equal_counts_by_the_alphabet():
    return wordcount("--top", "3", "-", stdin="b a c C").stdout == "2 c\n1 a\n1 b\n"


def complains_about_a_missing_file():
    ended = wordcount("/no/such/file")
    return ended.returncode == 1 and ended.stdout == "" and len(ended.stderr.strip().splitlines()) == 1


CASES = [
    counts_a_file,
    reads_standard_input,
    counts_bytes_and_not_characters,
    lists_the_most_frequent,
    orders_equal_counts_by_the_alphabet,
    complains_about_a_missing_file,
]

passed = 0
for case in CASES:
    ok = case()
    print("passed" if ok else "FAILED", case.__name__)
    passed += ok
with open(sys.argv[1], "w") as file:
    file.write(str(passed / len(CASES)))
