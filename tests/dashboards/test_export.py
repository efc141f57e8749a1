"""`vllm-tide dashboards export` writes what the package holds, and nothing over it."""

from __future__ import annotations

from vllm_tide.cli.main import main
from vllm_tide.dashboards import contents


def export(folder, *words: str) -> int:
    return main(["dashboards", "export", str(folder), *words])


def test_export_writes_every_file(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert export(folder) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert written == contents()
    assert sorted(written) == ["alerts.yml", "vllm_tide.json"]
    assert capsys.readouterr().out.count("written: ") == len(written)


def test_export_does_not_overwrite_unless_told_to(tmp_path, capsys):
    mine = tmp_path / "alerts.yml"
    mine.write_text("mine")
    assert export(tmp_path) == 2
    assert capsys.readouterr().err == (
        f"error: '{mine}' exists; give --force to overwrite it.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yml"]
    assert mine.read_text() == "mine"
    assert export(tmp_path, "--force") == 0
    assert mine.read_text(encoding="utf-8") == contents()["alerts.yml"]


def test_export_says_where_it_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert export(tmp_path / "file") == 2
    said = capsys.readouterr().err
    assert said == f"error: '{tmp_path / 'file'}' cannot be written (File exists).\n"
