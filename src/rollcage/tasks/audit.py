"""Is a task sound? What `rollcage audit` tries on it, and what follows from what each try earned. Nothing runs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollcage.tasks.cheats import COMMITTED, UNCOMMITTED, broken_for, cheats_for
from rollcage.types import Blame, Outcome, Task, Trust, Value

Kind = Literal["nothing", "reference", "proxied", "broken", "cheat"]


class Probe(Value):
    """One try."""

    name: str
    """`nothing`, `reference`, `proxied`, or the name of a cheat."""
    kind: Kind
    what: str
    """What it does, in words."""
    remedy: str = ""
    """What an author does about it, should it earn what it must not."""
    script: str = ""
    """What the agent `shell` runs; empty where the agent is `nop` or `oracle`."""


class Probed(Value):
    """What one try came to."""

    probe: Probe
    reward: float | None
    """What it earned; None where nothing was scored."""
    trust: Trust | None = None
    outcome: Outcome
    error: str | None = None
    blame: Blame | None = None
    suspicions: tuple[str, ...] = ()
    """What was noticed of it, by kind."""
    rollout_id: str
    """`rollcage show` tells the rest."""
    seconds: float = 0.0


class AuditFinding(Value):
    """Something that is wrong with a task, or could be better."""

    kind: Literal[
        "pays_for_nothing",
        "cheat_pays",
        "no_reward",
        "reference_fails",
        "flaky",
        "no_reference",
        "shared_trust",
        "cannot_run",
    ]
    level: Literal["problem", "advice"] = "problem"
    """Problems make the audit fail."""
    probe: str = ""
    """The try that showed it."""
    what: str
    remedy: str
    rollout_id: str = ""


class AuditReport(Value):
    """Everything an audit found out about one task."""

    task_id: str
    path: str = ""
    trust: Trust | None = None
    """Of the reward that the reference earned, or else nothing."""
    proxied_fits: bool | None = None
    """Whether the reference solution earns 1 with its checks proxied, too; None where that was not tried."""
    probes: tuple[Probed, ...] = ()
    findings: tuple[AuditFinding, ...] = ()

    @property
    def problems(self) -> tuple[AuditFinding, ...]:
        """What makes the audit fail."""
        return tuple(finding for finding in self.findings if finding.level == "problem")


RESIDUE = frozenset({"patched_framework", "always_equal"})
"""Cheats that no test framework in the process of the code withstands: `in_process` says so, and they are advice."""

NOTHING = Probe(
    name="nothing",
    kind="nothing",
    what="the agent does nothing",
    remedy="verify what the agent has to change, not what is true from the start",
)


PROXIED = Probe(
    name="proxied", kind="proxied", what="the reference solution, with checks proxied: does that fit these tests?"
)
PROXIES = ("pytest", "unittest", "node")
"""Kinds of checks that can be proxied."""


def first_probes(task: Task, repeat: int, *, reference: bool) -> list[Probe]:
    """What is tried first: nothing, and the reference solution `repeat` times."""
    what = "the reference solution"
    names = ["reference", *(f"reference ({number})" for number in range(2, repeat + 1))]
    solved = [
        Probe(name=name, kind="reference", what=what, remedy="mend the verifier or the solution") for name in names
    ]
    fitting = [PROXIED] if task_proxied(task) != task else []
    return [NOTHING, *((*solved, *fitting) if reference else ())]


def task_proxied(task: Task) -> Task:
    """The task with every check proxied that can be."""
    checks = tuple(
        check.model_copy(update={"isolation": "proxied"}) if check.kind in PROXIES else check for check in task.checks
    )
    return task.model_copy(update={"checks": checks})


def proxied_fits(probed: Sequence[Probed]) -> bool | None:
    """Whether proxied checks carry what the tests ask for; None where that was not tried."""
    return next((each.reward == 1 for each in probed if each.probe.kind == "proxied"), None)


def hostile_probes(task: Task, targets: Sequence[str]) -> list[Probe]:
    """What is tried then, on the files that honest work makes or changes: broken work, and cheats."""
    return [
        *(Probe(kind="broken", **cheat._asdict()) for cheat in broken_for(targets)),
        *(Probe(kind="cheat", **cheat._asdict()) for cheat in cheats_for(task, targets)),
    ]


def findings_of(probed: Sequence[Probed], *, floor: float = 0.0) -> list[AuditFinding]:
    """What follows. `floor`: what doing nothing may earn."""
    nothing = next((each for each in probed if each.probe.kind == "nothing"), None)
    references = [each for each in probed if each.probe.kind == "reference"]
    least = max([floor, *([nothing.reward] if nothing and nothing.reward is not None else [])])
    found = _about_references(references)
    for each in probed:
        if each.probe.kind in ("reference", "proxied"):
            continue
        if each.reward is None:
            found.append(
                _found("no_reward", each, f"{_named(each)}: no reward at all ({each.error or each.outcome.value})")
            )
        elif each.probe.kind == "nothing" and each.reward > floor:
            found.append(_found("pays_for_nothing", each, f"doing nothing earns {each.reward:g}"))
        elif each.reward > (least if (honest := _beside(each, probed)) is None else honest):
            found.append(_found("cheat_pays", each, f"{_named(each)}: earns {each.reward:g}"))
            if each.trust == "in_process" and each.probe.name in RESIDUE:
                remedy = 'try `isolation = "proxied"`; trust is `in_process` because of such code'
                found[-1] = found[-1].model_copy(update={"level": "advice", "remedy": remedy})
    trust = (references or probed)[0].trust if probed else None
    if trust == "shared":
        remedy = "use checks, or `untrusted` with `isolate`: docs/verification.md"
        what = "the verifier may run the agent's code beside itself: more cheats exist than are tried here"
        found.append(AuditFinding(kind="shared_trust", level="advice", what=what, remedy=remedy))
    return found


def _beside(cheat: Probed, probed: Sequence[Probed]) -> float | None:
    """What a cheat that comes with honest work earns by that work alone; None for all that come without."""
    if cheat.probe.name not in (UNCOMMITTED, COMMITTED):
        return None
    plain = next((each for each in probed if each.probe.name == UNCOMMITTED), cheat)
    return plain.reward or 0.0


def _about_references(references: Sequence[Probed]) -> list[AuditFinding]:
    if not references:
        remedy = "give the task `solution_script`, `solution_patch` or `solution`"
        what = "there is no reference solution: nobody knows whether honest work is paid"
        return [AuditFinding(kind="no_reference", level="advice", what=what, remedy=remedy)]
    earned = {each.reward for each in references}
    if len(earned) > 1:
        said = ", ".join("none" if each.reward is None else f"{each.reward:g}" for each in references)
        remedy = "find what differs from run to run: time, order, randomness, the network"
        what = f"the reference solution does not always earn the same: {said}"
        return [
            AuditFinding(
                kind="flaky", probe="reference", what=what, remedy=remedy, rollout_id=references[-1].rollout_id
            )
        ]
    worst = references[0]
    if worst.reward is None or worst.reward < 1:
        how = "no reward" if worst.reward is None else f"earns {worst.reward:g}"
        why = worst.error or (worst.outcome.value if worst.reward is None else "")
        told = f"the reference solution: {how}" + (f" ({why})" if why else "")
        return [_found("reference_fails", worst, told)]
    return []


def _found(
    kind: Literal["no_reward", "pays_for_nothing", "cheat_pays", "reference_fails"], of: Probed, what: str
) -> AuditFinding:
    return AuditFinding(kind=kind, probe=of.probe.name, what=what, remedy=of.probe.remedy, rollout_id=of.rollout_id)


def _named(probed: Probed) -> str:
    return f"{probed.probe.name} ({probed.probe.what})"
