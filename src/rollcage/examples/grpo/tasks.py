"""The tasks of the demonstration: a question about a file, answered with one command in a ```bash block.

The agent is ten lines of Python that the agent `shell` runs in the box: one call to the model, one command.
"""

import json
import random

import rollcage

SYSTEM = "You are a shell. Answer with one bash command in a ```bash block."
COMMANDS = {"count": "wc -l <", "first": "head -1", "last": "tail -1", "sort": "sort"}
WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan spruce willow yew".split()
MOST_TOKENS = 24

TRAINING = {
    "files": ("notes.txt", "list.txt", "data.txt", "words.txt"),
    "count": ("How many lines does {} have?", "Count the lines of {}."),
    "first": ("What is the first line of {}?", "Show the first line of {}."),
    "last": ("What is the last line of {}?", "Show the last line of {}."),
    "sort": ("Sort the lines of {}.", "Put the lines of {} in order."),
}
HELD_OUT = {
    "files": ("items.txt", "names.txt", "log.txt"),
    "count": ("Tell me the number of lines in {}.",),
    "first": ("Which line comes first in {}?",),
    "last": ("Which line comes last in {}?",),
    "sort": ("Give me {} with its lines sorted.",),
}

AGENT = """\
exec python3 -I /dev/fd/3 3<<'END'
import json, os, re, subprocess, urllib.request
body = json.loads(BODY)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""
block = re.search("```bash\\n(.*?)(```|$)", answer, re.DOTALL)
if block:
    subprocess.run(["bash", "-c", block[1]], timeout=10)
END
"""

VERIFY = """\
reward=0
if [ -s answer.txt ]; then
  reward=0.1
  if [ "$(head -c 4096 answer.txt | tr -s '[:space:]' ' ')" = "$(tr -s '[:space:]' ' ' < "$TESTS_DIR/expected")" ]; then
    reward=1
  fi
fi
echo $reward > "$REWARD_FILE"
"""


def questions(which: dict) -> list[str]:
    """All of them, one kind after the other, so that as many adjacent ones as there are kinds hold one of each."""
    pairs = [(file, place) for file in which["files"] for place in range(len(which["count"]))]
    return [which[kind][place].format(file) for file, place in pairs for kind in COMMANDS]


KIND_OF = {
    which[kind][place].format(file): (kind, file)
    for which in (TRAINING, HELD_OUT)
    for kind in COMMANDS
    for file in which["files"]
    for place in range(len(which[kind]))
}


def task(question: str, *, said: str = "", ids: tuple[int, ...] = ()) -> rollcage.Task:
    """A box with a file of a few random words, the question, and what the answer would be.

    `said`: what the engine is made to say, by its grammar, so that a teacher's answers become rollouts with the engine's
    own ids. `ids`: the tokens it prefers then, those of the text itself: a grammar alone allows any split of it.
    """
    kind, file = KIND_OF[question]
    lines = random.sample(WORDS, random.randint(4, 8))
    expected = {"count": [str(len(lines))], "first": lines[:1], "last": lines[-1:], "sort": sorted(lines)}[kind]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "policy", "messages": messages, "max_tokens": MOST_TOKENS}
    if said:
        bias = {str(each): 100 for each in ids}
        body |= {"structured_outputs": {"choice": [said]}, "logit_bias": bias, "max_tokens": 2 * MOST_TOKENS}
    return rollcage.Task(
        id=kind,
        instruction=AGENT.replace("BODY", repr(json.dumps(body))),
        files={file: "".join(f"{line}\n" for line in lines)},
        tests={"expected": "".join(f"{line}\n" for line in expected)},
        verify=(VERIFY,),
        limits=rollcage.Limits(agent_timeout_s=120),
    )


def teacher(rng: random.Random, question: str) -> str:
    """An answer that knows the form, but often not the command or where the result goes: that is left to learn."""
    kind, file = KIND_OF[question]
    if rng.random() >= 0.6:
        kind = rng.choice([other for other in COMMANDS if other != kind])
    sink = rng.choices([" > answer.txt", " > out.txt", " > result.txt", ""], [0.4, 0.2, 0.2, 0.2])[0]
    return f"```bash\n{COMMANDS[kind]} {file}{sink}\n```"
