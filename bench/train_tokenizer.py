"""Trains the merges of rollcage.simulators.scripted.tokenizer on the project's own text and on text made up here.

Usage: python bench/train_tokenizer.py [merges] > src/rollcage/simulators/scripted/merges.txt
New merges change every id, so a new file is a new tokenizer: retrain only for a reason.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

from rollcage.simulators.scripted.tokenizer import Pair, split_words

ROOT = Path(__file__).resolve().parent.parent

COMMON = """the of and to a in is it that for on with as be this are by at from or an not have has was but they you
we can will all if one which there their when what would so out up about more other into than them then no some these
its do does did done make makes made use used uses using only new now after before first last also any each every both
same here where how why who many most much such very just over under again never always often between through while
during against without within because since until must should could may might need needs want wants get gets got give
gives given take takes taken go goes went come comes see seen look looks find finds found know known think say says
said tell show shows shown try tries tried call calls called ask asks asked work works worked keep keeps kept let put
set run runs ran read reads write writes written wrote add adds added remove removed change changes changed move moved
start starts started stop stops stopped end ends ended begin begins open opens opened close closes closed create
created delete deleted update updated check checks checked build builds built fix fixed break breaks broken fail fails
failed pass passes passed return returns returned raise raises raised catch handle handled send sends sent receive
received wait waits waiting load loaded save saved store stored copy copied list lists test tests tested file files
path paths folder directory line lines word words name names value values number numbers text string strings byte
bytes code function functions class classes method methods module modules package packages import imports argument
arguments parameter parameters result results output outputs input inputs error errors message messages warning data
type types object objects array key keys item items index field fields table row rows column columns query request
requests response responses server client user users model models agent agents tool tools task tasks step steps turn
turns token tokens prompt prompts answer answers question system process processes thread memory disk network socket
port host address connection stream streams chunk chunks event events log logs time seconds minute hour day week month
year date timeout limit limits size length count total sum average minimum maximum small large long short high low
left right top bottom next previous current empty full true false none null good bad better best worse right wrong
simple complex easy hard fast slow safe unsafe public private local remote global default custom optional required
possible impossible different similar equal exact whole part parts piece pieces place places point points case cases
example examples problem problems solution reason way ways kind kinds thing things people person world life man woman
child hand head eye face side house home room door water food money book paper letter school city country state group
company service business program project version release branch commit merge review repository source target command
commands shell script terminal window page image button color white black red green blue light dark old young early
late today tomorrow yesterday morning night however therefore instead although perhaps already still yet even too else
please thanks hello yes sure note important below above following according available below correct expected actual
implement implementation implemented define defined describe description document documentation explain explained
understand configuration environment variable variables expression statement condition loop iteration recursion
algorithm sequence dictionary tuple integer float boolean character encoding decode encode parse parser format
formatted convert converted generate generated compute computed calculate validate validation verify verified ensure
install installed dependency dependencies library framework interface protocol database record records session
password secret certificate authentication authorization permission permissions access granted denied sandbox
container isolated reward rewards rollout rollouts trajectory policy training learning sample sampling temperature
probability distribution logprob logprobs gradient batch epoch loss accuracy benchmark performance latency throughput
measure measured median percent ratio cache cached buffer queue worker scheduler cancel cancelled abort aborted retry
retries attempt attempts""".split()

CODE = """self args kwargs init main def str int float bool dict list set tuple bytes None True False async await with
open print len range enumerate zip map filter sorted reversed isinstance super property classmethod staticmethod
dataclass field typing Optional Any Callable Iterable Sequence Mapping pathlib Path json os sys re subprocess asyncio
pytest assert raises fixture ValueError TypeError KeyError IndexError RuntimeError FileNotFoundError Exception const let
var function export default interface console document window undefined require module exports Promise resolve reject
public static void private final struct enum impl match mut pub fn usize Vec String Result Err Ok Some include define
typedef unsigned char sizeof malloc stdin stdout stderr echo grep find sed awk cat mkdir chmod git commit push pull
status diff log branch checkout npm install pip python python3 bash node make cmake docker curl http https localhost
content role assistant user system name arguments parameters properties description required additionalProperties
type object string number boolean array items command filePath oldString newString pattern offset limit timeout
workdir id index choices delta usage finish_reason tool_calls token_ids prompt_tokens completion_tokens total_tokens
base_url api_key model messages temperature max_tokens stream README LICENSE TODO FIXME""".split()

ENDINGS = ("s", "ed", "ing", "er", "ly", "tion", "ment", "able", "ness", "ful", "less", "ity", "ive", "al", "ous")


def sentence(rng: random.Random) -> str:
    """One English-looking sentence; common words come more often."""
    words = [COMMON[int(len(COMMON) * rng.random() ** 1.6)] for _ in range(rng.randint(4, 14))]
    if rng.random() < 0.2:
        words[-1] += rng.choice(ENDINGS)
    if rng.random() < 0.3:
        words[len(words) // 2] += ","
    return " ".join(words).capitalize() + rng.choice((".", ".", ".", "!", "?", ":"))


def snippet(rng: random.Random) -> str:
    """A few lines of code, data or shell."""
    a, b, c, d = (rng.choice(CODE if rng.random() < 0.5 else COMMON) for _ in range(4))
    number = rng.randint(0, 999)
    return rng.choice(
        (
            f"def {a}_{b}({c}: str, {d}: int = {number}) -> list[str]:\n    return [{c} for _ in range({d})]\n\n\n",
            f"class {a.capitalize()}{b.capitalize()}:\n    def __init__(self, {c}):\n        self.{c} = {c}\n\n",
            f'    if {a} is not None and {b} != {number}:\n        raise ValueError(f"{c}: {{{d}!r}}")\n',
            f'for {a} in {b}:\n    print({a}, end="")\n',
            f"import {a}\nfrom {b} import {c}\n",
            f"const {a} = ({b}) => {{\n  return {b}.{c}({number});\n}};\n",
            f"$ cat {a}/{b}.py | grep -n '{c}' && echo \"{d}\" > /tmp/{a}.txt\n",
            json.dumps({a: b, c: number, d: [True, None, {"type": "string", "description": sentence(rng)}]}) + "\n",
            json.dumps({"name": a, "arguments": {b: c, "command": f"ls -la /tmp/{d}", "timeout": number}}) + "\n",
            json.dumps({a: {"b": sentence(rng)}, c: f"{b}\n{d}\n"}, indent=2) + "\n",
            f"## {a.capitalize()} {b}\n\n- `{c}`: {sentence(rng)}\n- **{d}**\n\n```python\n{a} = {number}\n```\n",
            f"// {sentence(rng)}\nint {a}(void) {{\n    return {b}({c}, {number});\n}}\n",
            f'<div class="{a}">{b}</div>\n<{c}>\n</{c}>\n',
            f'{a}:\n  - {b}: "{c}"\n    {d}: {number}.{number}\n',
        )
    )


def corpus() -> str:
    """The project's own text, then made-up text; the same on every run over the same tree."""
    rng = random.Random(20261115)
    own = [path for pattern in ("src/**/*.py", "tests/*.py", "docs/*.md", "*.md") for path in ROOT.glob(pattern)]
    parts = [path.read_text(encoding="utf-8") for path in sorted(own)]
    parts += [" ".join(sentence(rng) for _ in range(5)) + "\n\n" for _ in range(2500)]
    parts += [snippet(rng) for _ in range(5000)]
    parts += [f" {word} {word.capitalize()} _{word} {word}{rng.choice(ENDINGS)}\n" for word in COMMON + CODE]
    return "".join(parts)


def train(text: str, merges: int) -> list[Pair]:
    """The most frequent pair becomes a token, over and over; ties go to the smaller ids."""
    counts = Counter(split_words(text))
    words = [list(word.encode()) for word in counts]
    weights = list(counts.values())
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = defaultdict(set)
    for n, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += weights[n]
            where[pair].add(n)
    learned: list[Pair] = []
    while len(learned) < merges and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], -pair[0], -pair[1]))
        if pairs[best] < 2:
            break
        merged = 256 + len(learned)
        learned.append(best)
        for n in where.pop(best):
            old, words[n] = words[n], join(words[n], best, merged)
            for pair in itertools.pairwise(old):
                pairs[pair] -= weights[n]
            for pair in zip(words[n], words[n][1:], strict=False):
                pairs[pair] += weights[n]
                where[pair].add(n)
        del pairs[best]
        pairs = +pairs if len(learned) % 500 == 0 else pairs
    return learned


def join(word: list[int], pair: Pair, merged: int) -> list[int]:
    """The word with this pair made one."""
    out: list[int] = []
    at = 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            out.append(merged)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return out


if __name__ == "__main__":
    for left, right in train(corpus(), int(sys.argv[1]) if len(sys.argv) > 1 else 3833):
        print(left, right)
