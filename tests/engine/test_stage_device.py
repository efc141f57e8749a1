"""The staging thread works on its rank's device, not on the one a thread begins on."""

from types import SimpleNamespace

from vllm_tide.engine import staged_draft as stage


def test_the_thread_is_on_the_device_of_its_room_before_it_looks(monkeypatch):
    done = []
    monkeypatch.setattr(stage.torch.cuda, "set_device", done.append)
    room = SimpleNamespace(device="cuda:3")
    stager = stage.Stager(SimpleNamespace(), SimpleNamespace(), room=room)
    monkeypatch.setattr(stage, "POLL_SECONDS", 0)

    def look():
        done.append("look")
        stager._stop.set()

    monkeypatch.setattr(stager, "check_now", look)
    stager.start()
    stager._thread.join(timeout=30)
    assert done == ["cuda:3", "look"]
