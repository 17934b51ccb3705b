"""Tests which names can be on the hub, and the one phrase that says why it did not deliver something."""

import logging

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from qerl_jax.checkpoint import hf_folder
from qerl_jax.cli import main
from qerl_jax.data import datasets
from qerl_jax.system import hub

RESPONSE = httpx.Response(401, request=httpx.Request("GET", "https://example.org/x"))
OFFLINE = "HF_HUB_OFFLINE is set, and no copy of it is"
LONG = "Cannot find an appropriate cached snapshot\n\nfolder. Please check your connection"


def unreachable():
    try:
        raise httpx.ConnectError("[Errno -2] Name or service not known")
    except httpx.ConnectError as error:
        cause = errors.LocalEntryNotFoundError(LONG)
        cause.__cause__ = error
        return cause


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (unreachable(), "the hub cannot be reached, and no copy of it is in the cache"),
        (errors.OfflineModeIsEnabled("offline"), OFFLINE),
        (errors.LocalEntryNotFoundError("... outgoing traffic has been disabled ..."), OFFLINE),
        (errors.RepositoryNotFoundError(LONG, response=RESPONSE), "there is none of that name, or"),
        (errors.GatedRepoError(LONG, response=RESPONSE), "it is gated: accept its terms on its pa"),
        (errors.HFValidationError(LONG), "its names are NAME or OWNER/NAME"),
        (httpx.ReadTimeout("timed out"), "the hub does not answer"),
        (RuntimeError("first line\nsecond"), "RuntimeError: first line"),
    ],
)
def test_why_the_hub_gave_nothing_is_one_line_of_our_own(error, reason, monkeypatch, capsys):
    def download(*_, **__):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.reason(error).startswith(reason)
    assert main.main(["generate", "a", "--model", "org/name"]) == 2
    text = capsys.readouterr().err
    start = "qerl generate: 'org/name' is no local folder, and the hub did not give it: "
    assert text.startswith(start + reason) and text.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    ["a/b/c", "a//b", "bad name", "./a", "~/none", "{folder}/none", "{folder}/file/x", "a.gguf"],
)
def test_what_can_only_be_local_is_not_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="no such (file|folder)$"):
        hf_folder.local_folder(name.format(folder=tmp_path))


def test_a_file_and_a_folder_that_is_there_beside_a_missing_one_are_local(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    rule = "no such folder; the hub is not asked, since there is a local folder 'runs'$"
    with pytest.raises(FileNotFoundError, match=f"'runs/none'; {rule}"):
        hf_folder.local_folder("runs/none")
    for name in ("file", "gone"):
        with pytest.raises(FileNotFoundError, match="must be a model folder, or a .gguf file"):
            hf_folder.local_folder(name)


def test_a_data_set_of_an_unreachable_hub_is_one_line(monkeypatch):
    library = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'org/rows' on the Hub") from unreachable()

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    text = r"'org/rows' \(split 'train'\): the hub cannot be reached, and no copy .*`path`$"
    with pytest.raises(ValueError, match=f"data set {text}"):
        datasets.load_rows("org/rows", None, None, "train")


@pytest.mark.parametrize(
    ("command", "name", "what"),
    [
        ("generate --output o.jsonl --input", "rows.jsonl", "Is a directory"),
        ("eval", "rows.jsonl", "Is a directory"),
        ("plan", 300 * "x" + ".toml", "File name too long"),
    ],
)
def test_an_error_of_the_system_names_the_path_and_what_is_intact(
    command, name, what, tmp_path, capsys
):
    (tmp_path / "rows.jsonl").mkdir()
    assert main.main([*(words := command.split()), f"{tmp_path}/{name}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"qerl {words[0]}: {tmp_path}/{name}: could not be used: {what}")
    assert text.endswith("; what was saved before is intact\n")
