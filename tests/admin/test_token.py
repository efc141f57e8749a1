"""The token of the HTTP routes, and the routes behind it."""

import asyncio
from types import SimpleNamespace

import pytest

fastapi = pytest.importorskip("fastapi")
from fastapi.testclient import TestClient  # noqa: E402

from vllm_tide.engine import endpoint  # noqa: E402
from vllm_tide.engine.endpoint import (  # noqa: E402
    PREFIX,
    AdminEndpoint,
    is_authorised,
    make_token,
    read_token,
)
from vllm_tide.transport.shm import TransportError  # noqa: E402


def test_a_token_is_made_once_and_private(tmp_path):
    path = make_token(tmp_path / "run")
    token = read_token(path)
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert make_token(tmp_path / "run") == path and read_token(path) == token
    assert sorted(p.name for p in path.parent.iterdir()) == ["admin.token"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.chmod(0o640), "chmod 600"),
        (lambda p: p.write_text("short"), "shorter than 16"),
        (lambda p: p.unlink(), "No such file"),
        (lambda p: p.write_text("x" * 4097), "longer than 4096"),
        (lambda p: p.write_text("geheimes passwort"), "no blanks"),
        (lambda p: p.write_text("pässwörter-sind-gut"), "only ASCII"),
        (lambda p: p.write_bytes(b"\xff\xfe" * 20), "only ASCII"),
    ],
)
def test_an_unfit_token_file_authorises_nobody(tmp_path, change, sentence):
    path = make_token(tmp_path)
    header = f"Bearer {read_token(path).decode()}"
    assert is_authorised(header, path)
    change(path)
    with pytest.raises(TransportError, match=sentence):
        is_authorised(header, path)


def app_of(section):
    """An app with the plugin, wired as vLLM does."""
    plugin, app = AdminEndpoint(), fastapi.FastAPI()
    plugin.attach_router(app)
    speculative = None if section is None else SimpleNamespace(tide=section)
    config = SimpleNamespace(speculative_config=speculative)
    client = SimpleNamespace(vllm_config=config)
    asyncio.run(plugin.init_state(client, app.state, None))
    return app, TestClient(app)


@pytest.fixture
def routes(tmp_path, monkeypatch):
    given = []

    def ask_all(run_dir, request, timeout_s):
        given.append((run_dir, request))
        return {"trainer 1": {"ok": request["do"] != "rollback"}}

    monkeypatch.setattr(endpoint, "ask_all", ask_all)
    app, client = app_of({"run_dir": str(tmp_path)})
    return app, client, tmp_path, given


def test_only_our_own_paths_are_added(routes):
    bare = {getattr(r, "path", "") for r in fastapi.FastAPI().routes}
    paths = set(routes[0].openapi()["paths"]) - bare
    names = ("status", "rollback", "pause", "resume")
    assert paths == {f"{PREFIX}/{name}" for name in names}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic x"])
@pytest.mark.parametrize("name", ["status", "rollback", "pause", "resume"])
def test_no_route_answers_without_the_token(routes, name, header):
    _, client, _, given = routes
    headers = {} if header is None else {"Authorization": header}
    method = client.get if name == "status" else client.post
    reply = method(f"{PREFIX}/{name}", headers=headers)
    assert reply.status_code == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert given == []


def test_the_token_opens_them(routes):
    _, client, run_dir, given = routes
    token = read_token(run_dir / "admin.token").decode()
    headers = {"Authorization": f"Bearer {token}"}
    reply = client.get(f"{PREFIX}/status", headers=headers)
    assert reply.json() == {"trainers": {"trainer 1": {"ok": True}}}
    assert client.post(f"{PREFIX}/pause", headers=headers).status_code == 200
    assert client.post(f"{PREFIX}/rollback", headers=headers).status_code == 409
    assert client.get(f"{PREFIX}/pause", headers=headers).status_code == 405
    assert given[0] == (run_dir, {"do": "status"})


@pytest.mark.parametrize("name", ["Bearer p\u00e4sswort-und-mehr", "Bearer \udce4" * 3])
def test_any_header_is_answered(tmp_path, name):
    assert not is_authorised(name, make_token(tmp_path))


def test_a_token_that_cannot_be_sent_is_told_at_the_start(tmp_path, caplog):
    path = make_token(tmp_path)
    path.write_text("pässwörter-sind-gut")
    _, client = app_of({"run_dir": str(tmp_path)})
    assert "only ASCII" in caplog.text
    # Mended while the server runs: it is read for every request.
    path.write_text("passwoerter-sind-gut")
    reply = client.get(
        f"{PREFIX}/status", headers={"Authorization": "Bearer passwoerter-sind-gut"}
    )
    assert reply.status_code == 503 and "no trainer" in reply.json()["error"]


def test_without_a_tide_section_everything_is_refused():
    reply = app_of(None)[1].get(f"{PREFIX}/status")
    assert reply.status_code == 503
    assert reply.json() == {"error": "this server has no tide section"}


def test_it_is_what_vllm_loads():
    plugin = AdminEndpoint()
    assert plugin.name == "vllm_tide" and plugin.required_tasks == ("generate",)
