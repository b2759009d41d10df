"""The only reader of the environment: what this machine's user has set, as one value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from rollcage.errors import UsageError
from rollcage.types import Value

KINDS = {"vllm": "VLLM", "openai": "OPENAI", "hf_router": "HF_ROUTER", "local": "ROLLCAGE"}
"""The catalog entries that can be set up by variables, and how the names of those variables begin."""


class EndpointSettings(Value):
    """What the environment says about one kind of endpoint; empty where it says nothing."""

    base_url: str = ""
    api_key: SecretStr = SecretStr("")
    model: str = ""


class FleetSettings(Value):
    """What the environment says about Fleet; empty where it says nothing."""

    api_key: SecretStr = SecretStr("")
    """`FLEET_API_KEY`."""
    base_url: str = ""
    """`FLEET_BASE_URL`: another control plane than Fleet's own."""


class E2BSettings(Value):
    """What the environment says about E2B's cloud; empty where it says nothing."""

    api_key: SecretStr = SecretStr("")
    """`E2B_API_KEY`."""
    domain: str = ""
    """`E2B_DOMAIN`: a deployment of one's own."""
    api_url: str = ""
    """`E2B_API_URL`: where boxes are ordered, if not at the domain's usual address."""
    sandbox_url: str = ""
    """`E2B_SANDBOX_URL`: where boxes are reached, if not at the domain's usual address."""


class Settings(Value):
    """Everything rollcage takes from its surroundings."""

    home: Path
    """Where the log, the layers and the boxes live."""
    endpoints: dict[str, EndpointSettings] = {}
    """What the variables say, by catalog entry."""
    fleet: FleetSettings = FleetSettings()
    """Remote environments."""
    engines: tuple[str, ...] = ()
    """Where a container engine may answer, in the order in which they are tried: `DOCKER_HOST`, or the usual places."""
    e2b: E2BSettings = E2BSettings()
    """E2B's cloud."""
    server_key: SecretStr = SecretStr("")
    """`ROLLCAGE_SERVER_KEY`: a key that may ask everything of the server."""
    no_color: bool = False
    """`NO_COLOR`: no colours, whatever the terminal can do."""
    debug: bool = False
    """`ROLLCAGE_DEBUG`: show where an error came from."""

    @property
    def log_path(self) -> Path:
        """The file that holds every rollout."""
        return self.home / "rollouts.db"

    @property
    def cache_dir(self) -> Path:
        """Where downloads are kept; all of it can be fetched again."""
        return self.home / "cache"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, root: bool | None = None) -> Settings:
        """Read the variables; `root` says whether we are the superuser, whose state lives in /var/lib."""
        return cls(
            home=_home(environ, os.geteuid() == 0 if root is None else root),
            endpoints={kind: _endpoint(environ, kind) for kind in KINDS},
            fleet=FleetSettings(
                api_key=SecretStr(environ.get("FLEET_API_KEY", "").strip()),
                base_url=environ.get("FLEET_BASE_URL", "").strip(),
            ),
            engines=_engines(environ),
            e2b=_e2b(environ),
            server_key=SecretStr(environ.get("ROLLCAGE_SERVER_KEY", "").strip()),
            no_color=bool(environ.get("NO_COLOR")),
            debug=environ.get("ROLLCAGE_DEBUG", "").strip().lower() not in ("", "0", "false", "no"),
        )


def variable(kind: str, field: str) -> str:
    """The name of the variable that sets `field` (`base_url`, `api_key`, `model`) of a catalog entry."""
    if (kind, field) == ("vllm", "base_url"):
        return "VLLM_URL"
    return f"{KINDS[kind]}_{field.upper()}"


def _endpoint(environ: Mapping[str, str], kind: str) -> EndpointSettings:
    values = {field: environ.get(variable(kind, field), "").strip() for field in ("base_url", "api_key", "model")}
    return EndpointSettings(base_url=values["base_url"], api_key=SecretStr(values["api_key"]), model=values["model"])


def _engines(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("DOCKER_HOST", "").strip() or environ.get("CONTAINER_HOST", "").strip()
    if named:
        return (named,)
    own = environ.get("XDG_RUNTIME_DIR", "").strip()
    # Rootless engines first: what breaks out of their boxes is an ordinary user.
    rootless = (f"{own}/podman/podman.sock", f"{own}/docker.sock") if own.startswith("/") else ()
    return tuple(f"unix://{path}" for path in (*rootless, "/run/podman/podman.sock", "/var/run/docker.sock"))


def _e2b(environ: Mapping[str, str]) -> E2BSettings:
    return E2BSettings.model_validate(
        {field: environ.get(f"E2B_{field.upper()}", "").strip() for field in E2BSettings.model_fields}
    )


def _home(environ: Mapping[str, str], root: bool) -> Path:
    named = environ.get("ROLLCAGE_HOME", "").strip()
    if named:
        return Path(named).absolute()
    if root:
        return Path("/var/lib/rollcage")
    state = environ.get("XDG_STATE_HOME", "").strip()
    # The XDG rules say that a relative path there is to be ignored.
    if state.startswith("/"):
        return Path(state) / "rollcage"
    home = environ.get("HOME", "").strip()
    if not home.startswith("/"):
        raise UsageError("no place for the log: HOME is not set; set ROLLCAGE_HOME to a folder you may write to")
    return Path(home) / ".local" / "state" / "rollcage"
