"""The files that users deploy by: the manifest means to Kubernetes and KubeRay what it should, the script is bash."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

HERE = Path(__file__).resolve().parents[2] / "docs" / "cluster"
MANIFEST: dict[str, Any] = yaml.safe_load((HERE / "raycluster.yaml").read_text())
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


RAY_CLUSTER = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=closed("name", name={"type": "string"}),
    spec=closed(
        "headGroupSpec workerGroupSpecs",
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=closed("", version={"enum": ["v1", "v2"]}),
        headGroupSpec=closed("template", rayStartParams=TEXTS, template={"type": "object"}),
        workerGroupSpecs={
            "type": "array",
            "items": closed(
                "groupName minReplicas maxReplicas template",
                groupName={"type": "string"},
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                labels=TEXTS,
                rayStartParams=TEXTS,
                template={"type": "object"},
            ),
        },
    ),
)
"""What of `ray.io/v1` the manifest uses, by what KubeRay 1.5 and later publish; no package carries it."""


def templates() -> dict[str, Any]:
    spec = MANIFEST["spec"]
    return {"head": spec["headGroupSpec"]["template"]} | {
        group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]
    }


def test_the_fields_of_the_manifest_are_those_of_a_ray_cluster() -> None:
    jsonschema.validate(MANIFEST, RAY_CLUSTER)
    for group in (MANIFEST["spec"]["headGroupSpec"], *MANIFEST["spec"]["workerGroupSpecs"]):
        # The definition takes any texts there. KubeRay itself refuses labels among them, and starts nothing.
        assert group["rayStartParams"].keys() <= {"num-cpus"}


@pytest.mark.parametrize("name", ["head", "agents"])
def test_pod_templates_are_valid_by_the_published_schema_of_kubernetes(name: str) -> None:
    template = templates()[name]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    pod["spec"] = {**template["spec"], "hostUser": False}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_workers_may_do_what_boxes_need_and_the_docs_show_it() -> None:
    worker = templates()["agents"]["spec"]
    context = worker["containers"][0]["securityContext"]
    assert {"SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE"} <= set(context["capabilities"]["add"])
    assert context["procMount"] == "Unmasked" and worker["hostUsers"] is False and not context["privileged"]
    page = (HERE.parent / "cluster.md").read_text()
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    assert shown["securityContext"] == context


def test_the_script_for_slurm_is_bash() -> None:
    done = subprocess.run(["bash", "-n", str(HERE / "slurm.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
