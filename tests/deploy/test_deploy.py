"""What `deploy/` has, each file checked by the tool or schema that its system uses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dataplane import cli
from tests.cases import each_case
from tests.optional import needs
from tests.tools import tool

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((DEPLOY / "slurm").iterdir())


def documents(path: Path) -> list[Any]:
    import yaml

    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def check_node(arguments: list[str]) -> None:
    """Raises SystemExit where `dataplane` does not take these."""
    cli._parser().parse_args(arguments)


@needs("kubernetes_validate")
@each_case("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_manifests_are_valid(path: Path) -> None:
    import kubernetes_validate

    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@needs("yaml")
def test_pods_run_the_node_command_with_valid_options() -> None:
    (daemons,) = [each for each in documents(DEPLOY / "kubernetes" / "nodes.yaml") if each["kind"] == "DaemonSet"]
    container = daemons["spec"]["template"]["spec"]["containers"][0]
    check_node(container["args"])
    check_node(container["readinessProbe"]["exec"]["command"][1:])
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in daemons["spec"]["template"]["spec"]["volumes"]}


@needs("check_jsonschema")
def test_the_compose_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("yaml")
def test_compose_services_run_the_node_command_and_mount_existing_files() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    nodes = [each for name, each in compose["services"].items() if name.startswith("node-")]
    assert len(nodes) == 3
    for node in nodes:
        check_node(node["command"])
        assert (DEPLOY / node["build"]["context"] / node["build"]["dockerfile"]).exists()
    for name in ("prometheus", "grafana"):
        for volume in compose["services"][name]["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).is_dir()
    scraped = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert scraped == [f"node-{number}:9464" for number in range(3)]


def test_deployment_scripts_pass_shellcheck() -> None:
    done = subprocess.run([tool("shellcheck"), *SCRIPTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_runs_the_node_command_with_valid_options(tmp_path: Path) -> None:
    """A `dataplane` in the path that only says how it was called."""
    said = tmp_path / "said"
    command = tmp_path / "dataplane"
    command.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{said}\n')
    command.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "DATAPLANE_KEY": "cluster.key",
        "DATAPLANE_SEEDS": "a,b,c/job-7",
        "DATAPLANE_SOCKET": f"{tmp_path}/node/node.sock",
        "SLURMD_NODENAME": "a",
    }
    subprocess.run([DEPLOY / "slurm" / "node.sh"], env=environment, check=True)
    check_node(said.read_text().splitlines())
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700


SLURM = {
    "scontrol": f"""
        case $2 in
            job) echo "   Command={DEPLOY}/slurm/job.sbatch python train.py" ;;
            hostnames) printf "a\\nb\\n" ;;
        esac""",
    "srun": """
        case ${!#} in
            */node.sh) touch started; until [ -e signalled ]; do sleep 0.01; done; touch ended ;;
            train.py) echo "$DATAPLANE_SEEDS $*" >ran ;;
            *) until [ -e started ]; do sleep 0.01; done ;;
        esac""",
    "scancel": 'echo "$*" >draft; mv draft signalled',
    "dataplane": '[ ! -e "$2" ] && touch "$2"',
}
"""Commands in the path that do what the script of a job needs of them. The srun of the nodes ends when they do."""


def test_a_slurm_job_signals_its_nodes_and_waits_for_their_end(tmp_path: Path) -> None:
    for name, script in SLURM.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{script}\n")
        command.chmod(0o755)
    (tmp_path / "dataplane-7.key").touch()  # the job was requeued
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    job = ["bash", DEPLOY / "slurm" / "job.sbatch", "python", "train.py"]
    subprocess.run(job, env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "ran").read_text() == "a/job-7 --overlap python train.py\n"
    assert (tmp_path / "signalled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "ended").exists()
    assert not (tmp_path / "dataplane-7.key").exists()


def test_the_image_is_built_from_the_package_alone() -> None:
    """The checkout also has the key of the cluster, which would stay in a layer."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]}
    assert copied == {"pyproject.toml", "setup.py", "README.md", "LICENSE", "dataplane"}
    assert all((DEPLOY.parent / source).exists() for source in copied)


def test_prometheus_rules_and_alerts_are_valid() -> None:
    promtool = tool("promtool")
    rules = [DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml")]
    subprocess.run([promtool, "check", "rules", *rules], check=True, capture_output=True)
    config = DEPLOY / "prometheus" / "prometheus.yml"
    subprocess.run([promtool, "check", "config", config], check=True, capture_output=True)


ALERTS = """
rule_files: [{rules}, {alerts}]
evaluation_interval: 5s
tests:
  - interval: 5s
    input_series:
      - {{series: 'up{{job="dataplane", instance="a:9464"}}', values: '1 1 0x20'}}
      - {{series: 'dataplane_failovers_total{{instance="b:9464"}}', values: '0 0 2x20'}}
      - {{series: 'dataplane_spill_failing{{instance="b:9464"}}', values: '0x20'}}
    alert_rule_test:
      - eval_time: 5s
        alertname: DataplaneNodeDown
      - eval_time: 60s
        alertname: DataplaneNodeDown
        exp_alerts:
          - exp_labels: {{severity: critical, job: dataplane, instance: "a:9464"}}
            exp_annotations:
              summary: "The node at a:9464 does not answer"
              description: >-
                Its partitions fail over to their followers; what only it held is lost (docs/failure.md).
      - eval_time: 60s
        alertname: DataplaneSpillFailing
      - eval_time: 60s
        alertname: DataplaneFailovers
        exp_alerts:
          - exp_labels: {{severity: warning, instance: "b:9464"}}
            exp_annotations:
              summary: "b:9464 took over partitions of a node that has gone"
              description: "Rows without replicas that were there are lost: `stream.lost()` names them."
"""


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    promtool = tool("promtool")
    rules, alerts = (DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml"))
    (tmp_path / "test.yml").write_text(ALERTS.format(rules=rules, alerts=alerts))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_panels_do_not_overlap_and_have_a_datasource() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "dataplane.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    uid = re.search(r"uid: (\w+)", (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert uid is not None
    assert {p["datasource"]["uid"] for p in dashboard["panels"] if p["type"] != "row"} == {uid[1]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
