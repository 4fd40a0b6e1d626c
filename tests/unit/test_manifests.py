"""deploy/ and docker/ keep their word: valid for Kubernetes (unknown fields are faults), restricted, in step.

They are run by `make test-docker`; this looks at what a run would not show.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relay import errors
from relay.config import Config, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
# The oldest that has every field that we use, and the newest that the schemas know.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def named(file: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects(FOLDER / file) if each["kind"] == kind]
    return found


PODS = {
    "singleton": named("singleton.yaml", "Deployment")["spec"]["template"],
    "standby": named("standby.yaml", "Deployment")["spec"]["template"],
    "setup": named("setup.yaml", "Job")["spec"]["template"],
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """What the ConfigMap holds, as the relay reads it."""
    file = tmp_path / "relay.toml"
    file.write_text(named("base.yaml", "ConfigMap")["data"]["relay.toml"])
    return load(file, {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path, version: str) -> None:
    for each in objects(path):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_validation_is_strict() -> None:
    wrong = copy.deepcopy(named("singleton.yaml", "Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_are_restricted(pod: dict[str, Any]) -> None:
    """The Pod Security Standard `restricted`, and more: a read-only root, no token."""
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert all(volume.keys() <= {"name", "configMap", "secret"} for volume in spec["volumes"])


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_run_as_the_user_of_the_image_and_are_let_out(pod: dict[str, Any]) -> None:
    dockerfile = (ROOT / "docker/relay/Dockerfile").read_text()
    context = pod["spec"]["securityContext"]
    assert f"\nUSER {context['runAsUser']}:{context['runAsGroup']}\n" in dockerfile
    (rule,) = named("base.yaml", "NetworkPolicy")["spec"]["podSelector"]["matchExpressions"]
    assert pod["metadata"]["labels"][rule["key"]] in rule["values"]


@pytest.mark.parametrize("variant", ["singleton", "standby"])
def test_deployments_fit_the_configuration(variant: str, config: Config) -> None:
    spec = PODS[variant]["spec"]
    (container,) = spec["containers"]
    (port,) = container["ports"]
    assert config.admin.listen == f":{port['containerPort']}"
    assert spec["terminationGracePeriodSeconds"] > config.delivery.shutdown_timeout
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(config.database.password_file).rpartition("/")[0] in mounted
    assert named("base.yaml", "Secret")["stringData"].keys() == {Path(str(config.database.password_file)).name}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    for selector in (named(f"{variant}.yaml", "Deployment")["spec"]["selector"],):
        assert selector["matchLabels"].items() <= PODS[variant]["metadata"]["labels"].items()


def test_a_singleton_is_never_two_and_a_stand_by_never_blocks_an_update() -> None:
    singleton = named("singleton.yaml", "Deployment")["spec"]
    assert (singleton["replicas"], singleton["strategy"]) == (1, {"type": "Recreate"})
    standby = named("standby.yaml", "Deployment")["spec"]
    assert (standby["replicas"], standby["strategy"]["type"]) == (2, "RollingUpdate")
    # With /readyz as its probe the stand-by would never be ready, and the update would wait for it for ever.
    assert "httpGet" not in PODS["standby"]["spec"]["containers"][0]["readinessProbe"]


@pytest.mark.parametrize(
    ("code", "answer", "ready"),
    [
        (200, '{"ready": true, "state": "streaming"}', True),
        (503, '{"ready": false, "state": "standby"}', True),
        (503, '{"ready": false, "state": "reconnecting"}', False),
    ],
)
def test_the_probe_of_the_stand_by_variant(code: int, answer: str, ready: bool) -> None:
    (container,) = PODS["standby"]["spec"]["containers"]
    program = container["readinessProbe"]["exec"]["command"][-1]
    server = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        self.send_response({code}); self.end_headers(); self.wfile.write({answer!r}.encode())\n"
        "    def log_message(self, *_): pass\n"
        "s = h.HTTPServer(('127.0.0.1', 0), H)\n"
        "import threading; threading.Thread(target=s.serve_forever, daemon=True).start()\n"
    )
    port = container["ports"][0]["containerPort"]
    assert f":{port}/readyz" in program
    moved = program.replace(f'"http://127.0.0.1:{port}/readyz"', 'f"http://127.0.0.1:{s.server_port}/readyz"')
    done = subprocess.run([sys.executable, "-I", "-c", server + moved], check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert (done.returncode == 0) is ready


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (ROOT / "deploy/systemd/relay.service").read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def test_the_systemd_unit_fits_the_relay() -> None:
    settings = unit()
    assert float(settings["TimeoutStopSec"][0]) > Config().delivery.shutdown_timeout
    hopeless = {errors.ConfigError([]).exit_code, errors.OperatorError("").exit_code}
    assert {int(code) for code in settings["RestartPreventExitStatus"][0].split()} == hopeless
    for key, value in {"DynamicUser": "yes", "ProtectSystem": "strict", "NoNewPrivileges": "yes"}.items():
        assert settings[key] == [value]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy/systemd/relay.service").read_text()
    copied = tmp_path / "relay.service"
    copied.write_text(text.replace("/opt/relay/bin/relay", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copied)], check=False, capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "relay.service" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("broker", ["nats", "kafka"])
def test_compose_gives_the_relay_a_valid_configuration(broker: str) -> None:
    merged: dict[str, dict[str, Any]] = {}
    for file in ("docker-compose.yml", f"docker-compose.{broker}.yml"):
        for name, service in yaml.safe_load((ROOT / "docker" / file).read_text())["services"].items():
            both = merged.setdefault(name, {})
            for key, value in service.items():
                both[key] = {**both[key], **value} if isinstance(value, dict) and key in both else value
    defaults = {
        name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in merged["relay"]["environment"].items()
    }
    config = load(None, defaults)
    assert config.sink.kind == {"nats": "jetstream", "kafka": "kafka"}[broker]
    assert float(merged["relay"]["stop_grace_period"].removesuffix("s")) > config.delivery.shutdown_timeout
    for name, service in merged.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert set(service.get("depends_on", {})) <= set(merged)
    assert broker in merged["relay"]["depends_on"]


@pytest.mark.parametrize("knows", [True, False], ids=["15.19 and later", "15.18 and before"])
def test_wal2json_is_allowed_where_the_server_knows_how(knows: bool, tmp_path: Path) -> None:
    """The entry point against a stand-in that answers as either server does: the image has only one of them."""
    parameters = ["wal_level"] + ["output_plugin_libraries"] * knows + ["work_mem"] * 50_000
    (tmp_path / "parameters").write_text("".join(f"{name}\tsighup\n" for name in parameters))
    server = tmp_path / "postgres"
    server.write_text(
        '#!/bin/bash\nif [ "$1" = --describe-config ]; then cat "${0%/*}/parameters"; else printf "%s\\n" "$@"; fi\n'
    )
    server.chmod(0o755)
    (tmp_path / "PG_VERSION").write_text("15\n")
    done = subprocess.run(
        [ROOT / "docker/postgres/entrypoint", "postgres", "-c", "fsync=off"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PGDATA": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    allowed = ["-c", "output_plugin_libraries=pgoutput, test_decoding, wal2json"] if knows else []
    assert done.stdout.splitlines() == [*allowed, "-c", "fsync=off"]
