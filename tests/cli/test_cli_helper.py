"""`offbeat helper` at the keyboard: what cannot work is one sentence, and nothing is written."""

from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.deploy import keys
from offbeat.deploy.network import bind_socket

WORDS = ["helper", "--key", "own.key", "--store", "store", "--token", "token"]
TLS = ["--certificate", "keys/helper.pem", "--certificate-key", "keys/helper.key"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    keys.create_keys(Path("keys"), ["localhost"], ["a"], ["localhost"], 2)
    Path("token").write_text("a-token-of-some-length\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (WORDS[:3], "the following arguments are required: --store, --token"),
        (WORDS, "give --certificate and --certificate-key"),
        ([*WORDS, *TLS[:2]], "give --certificate and --certificate-key"),
        ([*WORDS, *TLS, "--insecure"], "--insecure is for trials on this machine"),
        ([*WORDS, "--insecure", "--host", "0.0.0.0"], "--insecure is for trials on this machine"),
        ([*WORDS, *TLS[:3], "none.key"], "there is no file none.key"),
        ([*WORDS, *TLS[:3], "keys/server.key"], "are not a certificate and its key"),
        ([*WORDS[:-1], "none", "--insecure"], "the token none cannot be read"),
        ([*WORDS[:-1], "/dev/null", "--insecure"], "does not contain a token"),
        ([*WORDS, "--insecure", "--sites", "none"], "there is no folder none"),
        ([*WORDS, "--insecure", "--minimum", "1"], "a sum over 1 sites hides no site"),
        ([*WORDS, "--insecure", "--port", "99999"], "there is no port 99999"),
        ([*WORDS, *TLS, "--host", "192.0.2.1"], "cannot be used"),
        ([*WORDS, "--insecure", "--prot", "5"], "unknown option '--prot': did you mean --port"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    words: list[str], sentence: str, capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(words) == 2
    told = capfd.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
    assert not (folder / "own.key").exists()
    assert not (folder / "store").exists()


def test_a_port_in_use_is_one_sentence_and_leaves_nothing(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    with bind_socket("127.0.0.1", 0) as socket:
        assert main([*WORDS, "--insecure", "--port", str(socket.getsockname()[1])]) == 2
    assert "is in use: choose another with --port" in capfd.readouterr().err
    assert not (folder / "own.key").exists()
    assert not (folder / "store").exists()
