"""What the processes of a kit refuse: ids, files and configurations of jobs that are not this package's.

What closes a process stays closed, so that each of these has a process of its own.
"""

import json
import os
import subprocess
import sys
import uuid
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from fl_lightning.kit_guard import APP_FILES, META_KEYS, AppFiles, JobDeployer, JobGuard, check_job_id, check_meta
from fl_lightning.remote.flare import check_kit, own_folder
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.submit import Submission

ID = str(uuid.UUID(int=0xABCDEF, version=4))
#: Folders of a kit, and others that NVFlare takes as the id of a job.
FOLDERS = ("startup", "local", "account", "federations", "work", "transfer", "a.b", ID.upper(), f"{ID}.old", ID[:-1])


def kit(folder: Path) -> Path:
    """A kit with what its owner cannot do without."""
    for name in ("startup", "local", "account", "federations"):
        (folder / name).mkdir(parents=True)
        (folder / name / "kept").touch()
    return folder


def job(folder: Path) -> Path:
    """The folder of a job of this package."""
    submission = Submission(job=Job(name="wards", sites=["berlin"], strategy={"class": "FedAvg"}), config="")
    return submission.write_job(folder)


def zipped(*names: str) -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as app:
        for name in names:
            app.writestr(name, "{}")
    return content.getvalue()


def in_closed_process(code: str, cwd: Path) -> list[str]:
    """The lines that a process of a kit says."""
    actual = subprocess.run(
        [sys.executable, "-c", f"from fl_lightning.kit_guard import JobGuard\nguard = JobGuard()\n{code}"],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert actual.returncode == 0, actual.stderr
    return actual.stdout.splitlines()


@pytest.mark.parametrize("name", [*FOLDERS, "", None, 7, "../x"])
def test_only_a_uuid_is_the_id_of_a_job(name) -> None:
    check_job_id(ID)
    with pytest.raises(ValueError, match="leave job_id out of"):
        check_job_id(name)


@pytest.mark.full
def test_no_message_of_the_server_deletes_a_folder_of_the_kit(tmp_path) -> None:
    root = kit(tmp_path / "kit")
    (root / ID).mkdir()
    code = f"""
import types
from nvflare.private.fed.client.client_engine import ClientEngine
engine = object.__new__(ClientEngine)
engine.args = types.SimpleNamespace(workspace={str(root)!r})
for name in {[*FOLDERS, ID]!r}:
    try:
        engine.delete_run(name)
        print(name)
    except ValueError:
        pass
"""
    assert in_closed_process(code, tmp_path) == [ID]
    assert sorted(path.name for path in root.iterdir()) == ["account", "federations", "local", "startup"]
    assert all((root / name / "kept").exists() for name in ("account", "federations", "local", "startup"))


def test_a_site_deploys_no_app_into_a_folder_of_its_own_and_none_with_other_files(tmp_path) -> None:
    root = kit(tmp_path / "kit")
    workspace = Workspace(str(root), "berlin", "config")

    def refused(job_id: str, *names: str) -> str | None:
        return JobDeployer().deploy(workspace, job_id, {}, "app", zipped(*names), None)

    for name in FOLDERS:
        assert "the server chooses it" in (refused(name, "config/job.json") or "")
    for other in (
        "config/evil.py",
        "config/config_fed_client.conf",
        "config/config_fed_client.yml",
        "config/resources.json",
        "config/comm_config.json",
        "custom/x.py",
        "custom/",
        "../x",
        "/x",
        "config//job.json",
    ):
        assert repr(other) in (refused(ID, "config/job.json", other) or "")
    assert JobDeployer().deploy(workspace, ID, {}, "app", b"not a zip", None) == "File is not a zip file"
    assert sorted(path.name for path in root.iterdir()) == ["account", "federations", "local", "startup"]
    assert all((root / name / "kept").exists() for name in ("account", "federations", "local", "startup"))


def test_the_server_takes_an_app_of_this_package_and_none_with_other_files(tmp_path) -> None:
    app = job(tmp_path) / "app"
    assert AppFiles().validate(str(app)) == ("", {})
    assert {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()} <= APP_FILES
    for other in ("config/evil.py", "custom/x.py", "empty/x", "config/config_fed_server.conf"):
        (app / other).parent.mkdir(exist_ok=True)
        (app / other).touch()
        why, _ = AppFiles().validate(str(app))
        assert "which no job has here: submit jobs with fl-train submit" in why
        (app / other).unlink()
        if other.split("/")[0] != "config":
            assert AppFiles().validate(str(app))[0]  # an empty folder is one too many as well
            (app / other).parent.rmdir()


@pytest.mark.parametrize(
    "more", [{"job_id": "account"}, {"job_id": ID}, {"leak": "x"}, {"launcher_spec": {}}, {"resource_spec": {"a": {}}}]
)
def test_a_job_that_says_more_of_itself_is_blocked_when_it_is_submitted(tmp_path, more) -> None:
    meta = json.loads((job(tmp_path) / "meta.json").read_text())
    assert set(meta) | {"study"} == META_KEYS
    check_meta({**meta, "study": "default"})
    context = FLContext()
    context.set_prop(FLContextKey.JOB_META, {**meta, **more}, private=True, sticky=False)
    guard = object.__new__(JobGuard)
    guard.handle_event(EventType.SUBMIT_JOB, context)
    assert "submit jobs with fl-train submit" in context.get_prop(FLContextKey.JOB_BLOCK_REASON)


@pytest.mark.parametrize("meta", [None, [], "x", {7: 1}])
def test_a_description_that_is_none_is_blocked(meta) -> None:
    with pytest.raises(ValueError, match=r"meta\.json has"):
        check_meta(meta)


@pytest.mark.full
def test_configurations_are_json(tmp_path) -> None:
    """HOCON reads files, variables and modules: a submitted description was parsed in the server's main process."""
    (tmp_path / "secret.env").write_text("password = in-a-file-of-the-server\n")
    for ending in ("conf", "yml", "yaml"):
        folder = tmp_path / ending
        folder.mkdir()
        (folder / f"config_fed_client.{ending}").write_text("format_version: 2\n")
    code = f"""
import io, zipfile
from nvflare.apis.fl_constant import SiteType
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.fuel.utils.config_factory import ConfigFactory
for ending in ("conf", "yml", "yaml"):
    upload = io.BytesIO()
    with zipfile.ZipFile(upload, "w") as job:
        job.writestr(f"wards/meta.{{ending}}", 'leak=x, include file("{tmp_path / "secret.env"}")')
    print(JobMetaValidator().validate("wards", upload.getvalue()))
    try:
        print(ConfigFactory.load_config("config_fed_client.json", [f"{tmp_path}/{{ending}}"]))
    except ValueError as error:
        print(error)
"""
    remedy = "is not read here: write JSON, into a file whose name ends with .json"
    expected = []
    for ending, name in (("conf", "PYHOCON"), ("yml", "OMEGACONF"), ("yaml", "OMEGACONF")):
        expected += [f"(False, '{name} {remedy}', {{}})", f"config_fed_client.{ending} {remedy}"]
    assert in_closed_process(code, tmp_path) == expected


@pytest.mark.full
def test_a_job_that_would_fill_the_disk_is_not_unpacked(tmp_path) -> None:
    (tmp_path / "unpacked").mkdir()
    code = f"""
import io, os, zipfile
from nvflare.private.fed.client import training_cmds
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils import app_deployer
def zipped(name, size):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as job, job.open(name, "w") as file:
        for _ in range(size):
            file.write(bytes(1 << 20))
    return content.getvalue()
for module in (training_cmds, app_deployer):
    for size in (15, 17):
        try:
            module.unzip_all_from_bytes(zipped("config/job.json", size), {str(tmp_path / "unpacked")!r})
            print(os.stat({str(tmp_path / "unpacked" / "config" / "job.json")!r}).st_size >> 20)
        except ValueError as error:
            print(error)
print(JobMetaValidator().validate("wards", zipped("wards/meta.json", 17))[1])
"""
    bomb = "the job unpacks to 17,825,792 bytes, of at most 16,777,216: submit jobs with fl-train submit"
    assert in_closed_process(code, tmp_path) == ["15", bomb, "15", bomb, bomb]


@pytest.mark.full
def test_a_site_executes_no_commands_of_the_server(tmp_path) -> None:
    code = """
from nvflare.private.admin_defs import Message
from nvflare.private.defs import SysCommandTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
for each in ClientRequestProcessors.request_processors:
    if SysCommandTopic.SHELL in each.get_topics():
        print(each.process(Message(SysCommandTopic.SHELL, "cat patients.csv"), None).body)
"""
    (tmp_path / "patients.csv").write_text("not for the server\n")
    assert in_closed_process(code, tmp_path) == ["this site executes no shell commands"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "start a kit with its startup/start.sh, or set PYTHONSAFEPATH=1"),
        ({"PYTHONSAFEPATH": "1", "PYTHONPATH": f"/somewhere{os.pathsep}"}, "remove its empty entry"),
    ],
)
def test_a_process_that_imports_from_where_it_was_started_does_not_start(tmp_path, given, why) -> None:
    actual = subprocess.run(
        [sys.executable, "-c", "from fl_lightning.kit_guard import JobGuard; JobGuard()"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert why in actual.stderr


@pytest.mark.full
def test_the_main_processes_do_not_load_torch(tmp_path) -> None:
    """A machine that hosts many sites would load it once for each."""
    assert in_closed_process("import sys; print('torch' in sys.modules)", tmp_path) == ["False"]


def test_a_kit_of_an_earlier_version_is_refused() -> None:
    with pytest.raises(Refused, match=r"this kit is of an earlier version.*local/resources\.json"):
        check_kit()


def test_folders_of_an_earlier_version_get_names_that_no_job_can_have(tmp_path) -> None:
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / "privacy.json").write_text("{}")

    folder = own_folder(tmp_path, "account")

    assert (folder / "privacy.json").read_text() == "{}"
    assert not (tmp_path / "account").exists()
    with pytest.raises(ValueError, match="leave job_id out"):
        check_job_id(folder.name)
    with pytest.raises(ValueError, match="job_id"):
        Workspace._check_job_id(folder.name)  # NVFlare's own rule alone
    assert own_folder(tmp_path, "account") == folder
    (tmp_path / "account").mkdir()
    with pytest.raises(Refused, match="has both account and _account"):
        own_folder(tmp_path, "account")
